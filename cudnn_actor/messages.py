"""Messages other than operations, and what they are answered with.

    from cudnn_actor.messages import Allocate, Download

The methods of `CudnnRef` send them; pykka actors and threads send them themselves.
"""

from cudnn_actor.protocol.graphs.explanation import Explanation as Explanation, PieceOfPlan as PieceOfPlan
from cudnn_actor.protocol.graphs.timing import DeviceSpeed as DeviceSpeed, PieceTime as PieceTime
from cudnn_actor.protocol.messages.kinds import *
from cudnn_actor.protocol.messages.messages import Compute as Compute, Message as Message
from cudnn_actor.protocol.messages.model_messages import (
    Draws as Draws,
    ModelGraph as ModelGraph,
    ModelRef as ModelRef,
)
from cudnn_actor.protocol.messages.receipts import *
from cudnn_actor.protocol.messages.run_loop import Loop as Loop

__all__ = sorted(name for name in globals() if name[0] != "_")  # type-checkers see what is imported with `*`
