"""Codecs, which encode updates for sending: the public names of `fedloom.core.codecs`."""

from fedloom.core.codecs import ByteCount as ByteCount
from fedloom.core.codecs import Codec as Codec
from fedloom.core.codecs import Cropped as Cropped
from fedloom.core.codecs import Folded as Folded
from fedloom.core.codecs import Packed as Packed
from fedloom.core.codecs import Raw as Raw
from fedloom.core.codecs import Sparse as Sparse
from fedloom.core.codecs import Unified as Unified
from fedloom.core.codecs import by_block as by_block
