"""Methods: recipes of a few lines over stages and local rules, and the tables that name them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedloom.core.lazy import lazy
from fedloom.methods.basic import centralised as centralised
from fedloom.methods.basic import constant as constant
from fedloom.methods.basic import fedavg as fedavg
from fedloom.methods.basic import fedprox as fedprox
from fedloom.methods.basic import local as local
from fedloom.methods.basic import separate as separate
from fedloom.methods.basic import simple as simple
from fedloom.methods.clusters import cfl as cfl
from fedloom.methods.clusters import colnet as colnet
from fedloom.methods.clusters import fedbone as fedbone
from fedloom.methods.clusters import fedmerge as fedmerge
from fedloom.methods.clusters import fedpmt as fedpmt
from fedloom.methods.clusters import fedsoft as fedsoft
from fedloom.methods.clusters import fedspd as fedspd
from fedloom.methods.clusters import fedsta as fedsta
from fedloom.methods.clusters import ifca as ifca
from fedloom.methods.clusters import matfl as matfl
from fedloom.methods.clusters import rr_cluster as rr_cluster
from fedloom.methods.conflict import aligned_mtl as aligned_mtl
from fedloom.methods.conflict import cagrad as cagrad
from fedloom.methods.conflict import config as config
from fedloom.methods.conflict import dualproj as dualproj
from fedloom.methods.conflict import fairgrad as fairgrad
from fedloom.methods.conflict import famo as famo
from fedloom.methods.conflict import fedga as fedga
from fedloom.methods.conflict import gradvac as gradvac
from fedloom.methods.conflict import imtl_g as imtl_g
from fedloom.methods.conflict import min_norm as min_norm
from fedloom.methods.conflict import pcgrad as pcgrad
from fedloom.methods.conflict import upgrad as upgrad
from fedloom.methods.distill import condistfl as condistfl
from fedloom.methods.distill import fedmd as fedmd
from fedloom.methods.drift import fedacg as fedacg
from fedloom.methods.drift import feddyn as feddyn
from fedloom.methods.drift import fednova as fednova
from fedloom.methods.drift import fedopt as fedopt
from fedloom.methods.drift import ntk_fedavg as ntk_fedavg
from fedloom.methods.drift import scaffold as scaffold
from fedloom.methods.f2dc import domain_weights as domain_weights
from fedloom.methods.f2dc import f2dc as f2dc
from fedloom.methods.f2dc import feature_modules as feature_modules
from fedloom.methods.fdse import fdse as fdse
from fedloom.methods.feddea import activated_dimensions as activated_dimensions
from fedloom.methods.feddea import feddea as feddea
from fedloom.methods.feddea import heal as heal
from fedloom.methods.feddea import server_step as server_step
from fedloom.methods.feddea import support_mean as support_mean

# These modules register themselves; none imports torch before it is called.
from fedloom.methods.fedhca2 import across_tasks as across_tasks
from fedloom.methods.fedhca2 import fedhca2 as fedhca2
from fedloom.methods.lora import fedex_lora as fedex_lora
from fedloom.methods.lora import fedsa_lora as fedsa_lora
from fedloom.methods.lora import flora as flora
from fedloom.methods.merging import by_task as by_task
from fedloom.methods.merging import consensus as consensus
from fedloom.methods.merging import dare as dare
from fedloom.methods.merging import fedrpca as fedrpca
from fedloom.methods.merging import iso_c as iso_c
from fedloom.methods.merging import matu as matu
from fedloom.methods.merging import ties as ties
from fedloom.methods.merging import tsv_m as tsv_m
from fedloom.methods.merging import wudi as wudi
from fedloom.methods.peers import dfmtl as dfmtl
from fedloom.methods.peers import dpsgd as dpsgd
from fedloom.methods.peers import plateau as plateau
from fedloom.methods.peers import sheaf_fmtl as sheaf_fmtl
from fedloom.methods.peers import staleness as staleness
from fedloom.methods.personal import ditto as ditto
from fedloom.methods.personal import fedamp as fedamp
from fedloom.methods.personal import fedbabu as fedbabu
from fedloom.methods.personal import fedbn as fedbn
from fedloom.methods.personal import fedmtl as fedmtl
from fedloom.methods.personal import fedper as fedper
from fedloom.methods.personal import fedrep as fedrep
from fedloom.methods.personal import pfedme as pfedme
from fedloom.methods.prototypes import fedproto as fedproto
from fedloom.methods.prototypes import fedrcl as fedrcl
from fedloom.methods.prototypes import fedsa as fedsa
from fedloom.methods.prototypes import fedtgp as fedtgp
from fedloom.methods.prototypes import fpl as fpl
from fedloom.methods.prototypes import moon as moon
from fedloom.methods.registry import ADDONS as ADDONS
from fedloom.methods.registry import CODECS as CODECS
from fedloom.methods.registry import METHODS as METHODS
from fedloom.methods.robust import centred_clip as centred_clip
from fedloom.methods.robust import clip as clip
from fedloom.methods.robust import krum as krum
from fedloom.methods.robust import mda as mda
from fedloom.methods.robust import median as median
from fedloom.methods.robust import multi_krum as multi_krum
from fedloom.methods.robust import nnm as nnm
from fedloom.methods.robust import rfa as rfa
from fedloom.methods.robust import trimmed_mean as trimmed_mean

if TYPE_CHECKING:
    from fedloom.methods.method import Method as Method

__getattr__, __dir__ = lazy(__name__)
