"""The messages that run a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Union, get_args, get_origin

from cudnn_actor.protocol.messages.convolution_messages import ConvBwdData, ConvBwdFilter, ConvFwd
from cudnn_actor.protocol.messages.run_graph import RunGraph
from cudnn_actor.protocol.messages.run_loop import RunLoop
from cudnn_actor.protocol.operations import OPERATIONS, Operation
from cudnn_actor.protocol.types.buffers import BufferRef

__all__ = ["COMPUTE", "Compute", "GraphRun"]

if TYPE_CHECKING:
    _Operations = Operation[BufferRef]
else:
    _Operations = Union[tuple(operation[BufferRef] for operation in OPERATIONS)]  # noqa: UP007 - for the codec

Compute = ConvFwd | ConvBwdData | ConvBwdFilter | RunGraph | RunLoop | _Operations
"""Messages that run a plan."""

COMPUTE: frozenset[type] = frozenset(get_origin(each) or each for each in get_args(Compute))
"""The classes of `Compute`, for membership tests."""
GraphRun = RunGraph | RunLoop
"""Messages that run a `Graph`, their `graph`. It is sent to a worker once, and named by its identity then."""
