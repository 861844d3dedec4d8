"""Remembers which of cuDNN's kernels for attention have been compiled in this process.

cuDNN notes of each candidate for attention that it compiles a kernel. That takes 0.25 to 0.45 s (H200), and
the interpreter's lock is held meanwhile. But cuDNN keeps the kernel, which takes sizes as arguments: the same
candidate for another number of samples is built in 30 ms. Its first candidate for these may be another one.
"""

from __future__ import annotations

from collections.abc import Hashable

from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.operations import Attention

__all__ = ["COMPILED_ATTENTION", "CompiledAttention"]

_MOST = 1024


class CompiledAttention:
    """The kernels that are known to be compiled, by candidate. Any thread.

    What is said here decides how soon a plan is built, never whether it is right. So it need not be exact:
    after a wrong answer, cuDNN compiles a kernel. Each access to the dict is one step; of two names that two
    threads note at the same time, one may be lost.
    """

    def __init__(self) -> None:
        self._names: dict[Hashable, frozenset[str]] = {}

    def note(self, graph: OperationGraph, name: str) -> None:
        """Note that a candidate of that name has been built for a graph; for one of attention alone."""
        if (kind := _kind(graph)) is None:
            return
        if len(self._names) >= _MOST:
            self._names.clear()
        self._names[kind] = self._names.get(kind, frozenset()) | {name}

    def of(self, graph: OperationGraph) -> frozenset[str]:
        """The names of the candidates for a graph whose kernels are there."""
        return self._names.get(_kind(graph), frozenset())


COMPILED_ATTENTION = CompiledAttention()
"""The compiled attention of this process."""


def _kind(graph: OperationGraph) -> Hashable:
    """The key of what a kernel for attention is compiled for; None for other graphs."""
    match graph.operations:
        case [Attention() as operation]:
            widths = tuple(graph.tensor(uid).dims[-1] for uid in (operation.q, operation.v))
            operands = tuple((name, graph.tensor(uid).dtype) for name, uid in operation.named())
            return operation.attributes(), widths, operands, graph.numerics
    return None
