"""What moves a model by an aggregated update: what `fedloom.core.server` offers."""

from fedloom.core.server import Adaptive as Adaptive
from fedloom.core.server import Lookahead as Lookahead
from fedloom.core.server import Momentum as Momentum
from fedloom.core.server import Plain as Plain
from fedloom.core.server import ServerRule as ServerRule
