"""The list of operations, and of the types of their fields: what users import from `cudnn_actor`.

What a family's module names in `__all__` is exported. Everything else follows from this list: `OPERATIONS`,
the unions that are decoded, the names in `cudnn_actor`. See "Adding an operation" in docs/architecture.md.
"""

from cudnn_actor.protocol.operations.attention import *
from cudnn_actor.protocol.operations.channel_norms import *
from cudnn_actor.protocol.operations.grid_sampling import *
from cudnn_actor.protocol.operations.grouped_matmul import *
from cudnn_actor.protocol.operations.indexing import *
from cudnn_actor.protocol.operations.matmul import *
from cudnn_actor.protocol.operations.movement import *
from cudnn_actor.protocol.operations.normalization import *
from cudnn_actor.protocol.operations.pointwise import *
from cudnn_actor.protocol.operations.pooling import *
from cudnn_actor.protocol.operations.random import *
from cudnn_actor.protocol.operations.reduction import *
from cudnn_actor.protocol.operations.resampling import *
from cudnn_actor.protocol.operations.response_norm import *
from cudnn_actor.protocol.operations.softmax import *
from cudnn_actor.protocol.operations.sorting import *
