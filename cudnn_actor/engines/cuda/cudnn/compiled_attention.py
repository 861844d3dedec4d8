"""Remembers which of cuDNN's kernels for attention have been compiled in this process.

By cuDNN's notes, each candidate for attention compiles a kernel. That takes 0.25 to 0.45 s (H200), and holds
the interpreter's lock. But cuDNN keeps the kernel, which takes sizes as arguments: the same candidate is
built in 30 ms for another number of samples, for which cuDNN may name another candidate first.
"""

from __future__ import annotations

from collections.abc import Hashable

from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.operations import Attention

__all__ = ["COMPILED_ATTENTION", "CompiledAttention"]

_MOST = 1024


class CompiledAttention:
    """The candidates whose kernels are known to be compiled. Any thread.

    This decides how soon a plan is built, never whether it is right. So it need not be exact: after a wrong
    answer, cuDNN compiles a kernel. Each access to the dict is one step. If two threads note names at the
    same time, one of the names may be lost.
    """

    def __init__(self) -> None:
        self._names: dict[Hashable, frozenset[str]] = {}

    def note(self, graph: OperationGraph, name: str) -> None:
        """Note that a candidate has been built for a graph. Ignores graphs that are not attention alone."""
        if (kind := _kind(graph)) is None:
            return
        if len(self._names) >= _MOST:
            self._names.clear()
        self._names[kind] = self._names.get(kind, frozenset()) | {name}

    def of(self, graph: OperationGraph) -> frozenset[str]:
        """The names of the candidates for a graph whose kernels are compiled."""
        return self._names.get(_kind(graph), frozenset())


COMPILED_ATTENTION = CompiledAttention()
"""The candidates of this process."""


def _kind(graph: OperationGraph) -> Hashable:
    """The key of the graphs that share kernels with this one; None if it is not attention alone."""
    match graph.operations:
        case [Attention() as operation]:
            widths = tuple(graph.tensor(uid).dims[-1] for uid in (operation.q, operation.v))
            operands = tuple((name, graph.tensor(uid).dtype) for name, uid in operation.named())
            return operation.attributes(), widths, operands, graph.numerics
    return None
