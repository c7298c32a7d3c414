"""Server rules, which move a model by an aggregated update: the names of `fedloom.core.server`."""

from fedloom.core.server import Adaptive as Adaptive
from fedloom.core.server import Lookahead as Lookahead
from fedloom.core.server import Momentum as Momentum
from fedloom.core.server import Plain as Plain
from fedloom.core.server import ServerRule as ServerRule
