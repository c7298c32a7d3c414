"""MaTU's task vectors: the names of `fedloom.core.taskvectors`."""

from fedloom.core.taskvectors import Array as Array
from fedloom.core.taskvectors import Combine as Combine
from fedloom.core.taskvectors import Cross as Cross
from fedloom.core.taskvectors import Source as Source
from fedloom.core.taskvectors import TaskAggregate as TaskAggregate
from fedloom.core.taskvectors import Upload as Upload
from fedloom.core.taskvectors import Zeros as Zeros
from fedloom.core.taskvectors import aggregate_tasks as aggregate_tasks
from fedloom.core.taskvectors import modulate as modulate
from fedloom.core.taskvectors import pack_mask as pack_mask
from fedloom.core.taskvectors import sign_similarity as sign_similarity
from fedloom.core.taskvectors import unify as unify
from fedloom.core.taskvectors import unpack_mask as unpack_mask
