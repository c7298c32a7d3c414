"""Methods: recipes of a few lines over stages and local rules, and the tables that name them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedloom._lazy import lazy
from fedloom.methods.registry import ADDONS, METHODS

if TYPE_CHECKING:
    from fedloom.methods.method import Method

__getattr__, __dir__ = lazy(__name__, {"method": "Method"})

# These modules register themselves; none imports torch before it is called.
from fedloom.methods.across import across_tasks  # noqa: E402
from fedloom.methods.basic import fedavg, fedprox, local  # noqa: E402
from fedloom.methods.cfl import cfl  # noqa: E402
from fedloom.methods.colnet import colnet  # noqa: E402
from fedloom.methods.conflict import cagrad, min_norm, pcgrad  # noqa: E402
from fedloom.methods.controls import server_step, support_mean  # noqa: E402
from fedloom.methods.dfmtl import dfmtl  # noqa: E402
from fedloom.methods.ditto import ditto  # noqa: E402
from fedloom.methods.dpsgd import dpsgd  # noqa: E402
from fedloom.methods.f2dc import domain_weights, f2dc, feature_modules  # noqa: E402
from fedloom.methods.fdse import fdse  # noqa: E402
from fedloom.methods.fedacg import fedacg  # noqa: E402
from fedloom.methods.fedamp import fedamp  # noqa: E402
from fedloom.methods.fedbabu import fedbabu  # noqa: E402
from fedloom.methods.fedbn import fedbn  # noqa: E402
from fedloom.methods.fedbone import fedbone  # noqa: E402
from fedloom.methods.feddea import feddea  # noqa: E402
from fedloom.methods.feddyn import feddyn  # noqa: E402
from fedloom.methods.fedga import fedga  # noqa: E402
from fedloom.methods.fedhca2 import fedhca2  # noqa: E402
from fedloom.methods.fedmtl import fedmtl  # noqa: E402
from fedloom.methods.fednova import fednova  # noqa: E402
from fedloom.methods.fedopt import fedopt  # noqa: E402
from fedloom.methods.fedper import fedper  # noqa: E402
from fedloom.methods.fedproto import fedproto  # noqa: E402
from fedloom.methods.fedrcl import fedrcl  # noqa: E402
from fedloom.methods.fedrep import fedrep  # noqa: E402
from fedloom.methods.fedsa import fedsa  # noqa: E402
from fedloom.methods.fedsoft import fedsoft  # noqa: E402
from fedloom.methods.fedsta import fedsta  # noqa: E402
from fedloom.methods.fedtgp import fedtgp  # noqa: E402
from fedloom.methods.fpl import fpl  # noqa: E402
from fedloom.methods.heal import heal  # noqa: E402
from fedloom.methods.ifca import ifca  # noqa: E402
from fedloom.methods.matfl import matfl  # noqa: E402
from fedloom.methods.matu import matu  # noqa: E402
from fedloom.methods.moon import moon  # noqa: E402
from fedloom.methods.ntk_fedavg import ntk_fedavg  # noqa: E402
from fedloom.methods.overlap import activated_dimensions  # noqa: E402
from fedloom.methods.pfedme import pfedme  # noqa: E402
from fedloom.methods.scaffold import scaffold  # noqa: E402
from fedloom.methods.staleness import staleness  # noqa: E402

__all__ = [
    "ADDONS", "METHODS", "Method", "across_tasks", "activated_dimensions", "cagrad", "cfl", "colnet", "dfmtl", "ditto",
    "domain_weights", "dpsgd", "f2dc", "fdse", "feature_modules", "fedacg", "fedamp", "fedavg", "fedbabu", "fedbn",
    "fedbone", "feddea", "feddyn", "fedga", "fedhca2", "fedmtl", "fednova", "fedopt", "fedper", "fedproto", "fedprox",
    "fedrcl", "fedrep", "fedsa", "fedsoft", "fedsta", "fedtgp", "fpl", "heal", "ifca", "local", "matfl", "matu",
    "min_norm", "moon", "ntk_fedavg", "pcgrad", "pfedme", "scaffold", "server_step", "staleness", "support_mean",
]  # fmt: skip
