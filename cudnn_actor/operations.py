"""Operations: each is a message that `gpu.ask`, `gpu.apply` and `gpu.compute` take, and a node of a graph.

from cudnn_actor.operations import MaxPool, Window
"""

from cudnn_actor.protocol.operations.base import Operation as Operation
from cudnn_actor.protocol.operations.families import *

__all__ = sorted(name for name in globals() if name[0] != "_")  # type-checkers see what is imported with `*`
