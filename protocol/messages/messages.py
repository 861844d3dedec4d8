"""The unions of messages, which follow from the lists of messages and of operations."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Union

from cudnn_actor.protocol.messages import kinds
from cudnn_actor.protocol.messages.any_message import AnyMessage
from cudnn_actor.protocol.messages.computations import *
from cudnn_actor.protocol.messages.kinds import *
from cudnn_actor.protocol.operations import OPERATIONS, Operation
from cudnn_actor.protocol.types.buffers import BufferRef

if TYPE_CHECKING:
    Message = AnyMessage[Any] | Operation[BufferRef]
    """Every message that a service answers."""
    Travelling = Message
    """Messages that can be encoded as bytes, and so could be answered in another process: all but `View`."""
else:
    _ALL = [each for each in vars(kinds).values() if isinstance(each, type)]
    _ALL += [operation[BufferRef] for operation in OPERATIONS]
    Message = Union[tuple(_ALL)]  # noqa: UP007 - for the codec
    Travelling = Union[tuple(each for each in _ALL if each is not View)]  # noqa: UP007
