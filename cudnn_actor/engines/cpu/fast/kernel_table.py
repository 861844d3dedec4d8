"""Which kernel computes an operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cudnn_actor.engines.cpu.fast.kernels import Kernel
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.operations import Node, Specs

__all__ = ["kernel_of"]

_MAKERS: Mapping[type, Callable[[Node, Specs], Kernel | None]] = {}


def kernel_of(graph: OperationGraph, operation: Node) -> Kernel | None:
    """The kernel for an operation of a graph; None if it is to be evaluated by its definition."""
    make = _MAKERS.get(type(operation))
    specs = {name: graph.tensor(uid).spec for name, uid in operation.named()}
    if make is None or any(0 in spec.dims for spec in specs.values()):
        return None
    return make(operation, specs)
