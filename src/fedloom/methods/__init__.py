"""Methods: recipes of a few lines over stages and local rules, and the tables that name them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedloom._lazy import lazy

# These modules register themselves; none imports torch before it is called.
from fedloom.methods.across import across_tasks as across_tasks
from fedloom.methods.basic import fedavg as fedavg
from fedloom.methods.basic import fedprox as fedprox
from fedloom.methods.basic import local as local
from fedloom.methods.by_task import by_task as by_task
from fedloom.methods.cfl import cfl as cfl
from fedloom.methods.colnet import colnet as colnet
from fedloom.methods.conflict import cagrad as cagrad
from fedloom.methods.conflict import config as config
from fedloom.methods.conflict import gradvac as gradvac
from fedloom.methods.conflict import min_norm as min_norm
from fedloom.methods.conflict import pcgrad as pcgrad
from fedloom.methods.controls import server_step as server_step
from fedloom.methods.controls import support_mean as support_mean
from fedloom.methods.dfmtl import dfmtl as dfmtl
from fedloom.methods.ditto import ditto as ditto
from fedloom.methods.dpsgd import dpsgd as dpsgd
from fedloom.methods.f2dc import domain_weights as domain_weights
from fedloom.methods.f2dc import f2dc as f2dc
from fedloom.methods.f2dc import feature_modules as feature_modules
from fedloom.methods.famo import famo as famo
from fedloom.methods.fdse import fdse as fdse
from fedloom.methods.fedacg import fedacg as fedacg
from fedloom.methods.fedamp import fedamp as fedamp
from fedloom.methods.fedbabu import fedbabu as fedbabu
from fedloom.methods.fedbn import fedbn as fedbn
from fedloom.methods.fedbone import fedbone as fedbone
from fedloom.methods.feddea import feddea as feddea
from fedloom.methods.feddyn import feddyn as feddyn
from fedloom.methods.fedga import fedga as fedga
from fedloom.methods.fedhca2 import fedhca2 as fedhca2
from fedloom.methods.fedmtl import fedmtl as fedmtl
from fedloom.methods.fednova import fednova as fednova
from fedloom.methods.fedopt import fedopt as fedopt
from fedloom.methods.fedper import fedper as fedper
from fedloom.methods.fedpmt import fedpmt as fedpmt
from fedloom.methods.fedproto import fedproto as fedproto
from fedloom.methods.fedrcl import fedrcl as fedrcl
from fedloom.methods.fedrep import fedrep as fedrep
from fedloom.methods.fedsa import fedsa as fedsa
from fedloom.methods.fedsoft import fedsoft as fedsoft
from fedloom.methods.fedspd import fedspd as fedspd
from fedloom.methods.fedsta import fedsta as fedsta
from fedloom.methods.fedtgp import fedtgp as fedtgp
from fedloom.methods.fpl import fpl as fpl
from fedloom.methods.heal import heal as heal
from fedloom.methods.ifca import ifca as ifca
from fedloom.methods.ifca import rr_cluster as rr_cluster
from fedloom.methods.lora import fedex_lora as fedex_lora
from fedloom.methods.lora import fedsa_lora as fedsa_lora
from fedloom.methods.lora import flora as flora
from fedloom.methods.matfl import matfl as matfl
from fedloom.methods.matu import matu as matu
from fedloom.methods.merging import consensus as consensus
from fedloom.methods.merging import dare as dare
from fedloom.methods.merging import iso_c as iso_c
from fedloom.methods.merging import ties as ties
from fedloom.methods.merging import tsv_m as tsv_m
from fedloom.methods.moon import moon as moon
from fedloom.methods.ntk_fedavg import ntk_fedavg as ntk_fedavg
from fedloom.methods.overlap import activated_dimensions as activated_dimensions
from fedloom.methods.pfedme import pfedme as pfedme
from fedloom.methods.references import joint as joint
from fedloom.methods.references import trivial as trivial
from fedloom.methods.registry import ADDONS as ADDONS
from fedloom.methods.registry import CODECS as CODECS
from fedloom.methods.registry import METHODS as METHODS
from fedloom.methods.robust import centred_clip as centred_clip
from fedloom.methods.robust import clip as clip
from fedloom.methods.robust import krum as krum
from fedloom.methods.robust import median as median
from fedloom.methods.robust import multi_krum as multi_krum
from fedloom.methods.robust import nnm as nnm
from fedloom.methods.robust import rfa as rfa
from fedloom.methods.robust import trimmed_mean as trimmed_mean
from fedloom.methods.scaffold import scaffold as scaffold
from fedloom.methods.staleness import staleness as staleness
from fedloom.methods.weightings import aligned_mtl as aligned_mtl
from fedloom.methods.weightings import dualproj as dualproj
from fedloom.methods.weightings import fairgrad as fairgrad
from fedloom.methods.weightings import imtl_g as imtl_g
from fedloom.methods.weightings import upgrad as upgrad

if TYPE_CHECKING:
    from fedloom.methods.method import Method as Method

__getattr__, __dir__ = lazy(__name__)
