"""Plans that run a graph one operation after the other, each by its definition.

For graphs with operations that have no tiled kernel here. Whole tensors are
computed at a time, in memory that NumPy allocates, which is not part of the
workspace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from cudnn_actor.engines.base import blame, no_progress
from cudnn_actor.engines.cpu.exact.special import erf, erfc
from cudnn_actor.engines.cpu.rounding import clip, rounding_to
from cudnn_actor.engines.cpu.scratch import Bytes
from cudnn_actor.protocol.graphs.explanation import Explanation, piece_of
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.graphs.step_kinds import StepKind
from cudnn_actor.protocol.operations import Node, TensorRole
from cudnn_actor.protocol.operations.base import Array
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["XP", "EvaluatedPlan", "Evaluation", "NumPy", "exact", "round_into"]


class NumPy:
    """NumPy, and the functions that it lacks and that operations are defined with.

    `on_progress` is called at each use: some definitions walk through many thousand steps.
    """

    erf, erfc = staticmethod(erf), staticmethod(erfc)

    def __init__(self, on_progress: Callable[[], None] = no_progress) -> None:
        self._on_progress = on_progress

    def __getattr__(self, name: str) -> Any:
        self._on_progress()
        return getattr(np, name)


XP = NumPy()
"""The array module with which the engine evaluates definitions."""


@dataclass(frozen=True)
class Evaluation:
    """A graph that is run by its operations' definitions.

    `last`: for each operation, the tensors that no later one reads.
    """

    graph: OperationGraph
    last: tuple[frozenset[int], ...]

    def run(
        self,
        buffers: Iterable[np.ndarray],
        scalars: Iterable[float],
        on_progress: Callable[[], None] = no_progress,
        on_piece: Callable[[], None] = no_progress,
    ) -> None:
        """Compute. `on_piece` is called behind each operation.

        Raises `ValueError` if a buffer's dims do not match the graph's.
        """
        graph, xp = self.graph, NumPy(on_progress)
        bound = dict(zip(graph.bound, buffers, strict=True))
        for uid, buffer in bound.items():
            if buffer.shape != graph.tensor(uid).dims:
                raise ValueError(f"a buffer of dims {buffer.shape} for a tensor of {graph.tensor(uid).dims}")
        values = graph.given_values(xp, tuple(scalars))
        # Overflow to infinity, and NaN, are valid results, as on a GPU.
        with np.errstate(all="ignore"):
            for number, unread in enumerate(self.last):
                try:
                    self._run(xp, graph.operations[number], bound, values)
                except Exception as error:
                    blame(error, (number,))
                    raise
                for uid in unread:
                    values.pop(uid, None)
                on_progress()
                on_piece()

    def _run(
        self, xp: NumPy, operation: Node, bound: Mapping[int, np.ndarray], values: dict[int, Array]
    ) -> None:
        graph = self.graph
        for uid in operation.reads:
            if uid not in values:
                values[uid] = exact(bound[uid])
        for uid, result in graph.evaluate(xp, operation, values).items():
            tensor = graph.tensor(uid)
            place = (
                bound[uid] if tensor.role is TensorRole.BOUND else np.empty(tensor.dims, tensor.dtype.numpy)
            )
            round_into(result, tensor.dtype, place)
            values[uid] = exact(place)


def exact(array: np.ndarray) -> Array:
    """The values as float64, uint64 of uint64, or int64 of other integers and of bool, which is 0 or 1.

    A copy: the buffer may be written while they are used.
    """
    if array.dtype == np.uint64:
        return array.copy()
    return array.astype(np.int64 if array.dtype.kind in "iub" else np.float64)


def round_into(result: Array, dtype: DType, into: Array) -> None:
    """Store values of float64 or of integers, rounded to a dtype."""
    if result.dtype.kind in "iub" and not dtype.is_floating:
        into[...] = clip(result, dtype.numpy)
    elif result.dtype.kind in "iub" and dtype.itemsize >= 4:  # by way of float64, it would be rounded twice
        into[...] = result
    else:
        rounding_to(dtype.numpy)(into, result.astype(np.float64))


@dataclass(frozen=True, eq=False)
class EvaluatedPlan:
    """A graph that is ready to run; immutable. The fields are `CpuPlan`'s."""

    tag: str
    graph: OperationGraph
    workspace: ClassVar[int] = 0
    checked: ClassVar[bool] = True
    provisional: ClassVar[bool] = False

    @property
    def buffers(self) -> int:
        """How many a run takes."""
        return len(self.graph.bound)

    @property
    def scalars(self) -> int:
        """How many a run takes."""
        return len(self.graph.scalars)

    def bind(self, workspace: Bytes) -> Evaluation:
        """The plan, ready to run."""
        del workspace
        later: set[int] = set()
        last: list[frozenset[int]] = []
        for operation in reversed(self.graph.operations):
            touched = {*operation.reads, *operation.writes}
            last.append(frozenset(touched - later))
            later |= touched
        return Evaluation(self.graph, tuple(reversed(last)))

    def explain(self, graph: OperationGraph) -> Explanation:
        """A piece for each operation; see `engines.base.Plan`."""
        numbers = range(len(graph.operations))
        pieces = (piece_of(graph, self.tag, (number,), StepKind.NUMPY.step_name()) for number in numbers)
        return Explanation(plan=self.tag, digest=graph.digest(), pieces=tuple(pieces))
