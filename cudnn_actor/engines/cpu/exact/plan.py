"""Plans: a graph cut into stages, and each stage into boxes, ready to be bound to a workspace.

All results in a stage have the same dims, so all its operations run on one box before the next box.
Intermediate values then need scratch memory for one box only, and are still in the cache.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np

from cudnn_actor.engines.base import no_progress
from cudnn_actor.engines.cpu.boxes import Box, box_dims, boxes, count_boxes, whole
from cudnn_actor.engines.cpu.exact.convolution import Kernel
from cudnn_actor.engines.cpu.exact.pointwise import Elementwise
from cudnn_actor.engines.cpu.exact.steps import Step, round_to, store
from cudnn_actor.engines.cpu.rounding import Rounding
from cudnn_actor.engines.cpu.scratch import Array, Bytes, Dims, Scratch, footprint
from cudnn_actor.protocol.graphs.explanation import Explanation, piece_of
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.graphs.step_kinds import StepKind
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["Convolved", "CpuPlan", "Mapped", "Program", "Stage", "Target", "View"]

_MOST_BOUND_PARTS = 1 << 14
"""Plans with more parts bind them again in every run. A part that is kept takes about 1.3 KB."""
_NARROW_BYTES = 8 << 10
"""The fewest bytes of each array of a box. With shorter arrays, NumPy takes longer for the call than for the
elements."""


@dataclass(frozen=True)
class Target:
    """The place of a result: its index among the values of a run."""

    index: int
    rounding: Rounding


@dataclass(frozen=True)
class Convolved:
    """A stage's convolution: its kernel, its result's uid, and where the result is stored, if at all.

    `read_as`: the type that the result is rounded to before other operations read it; None to leave it.
    """

    kernel: Kernel
    uid: int
    target: Target | None
    read_as: DType | None


@dataclass(frozen=True)
class Mapped:
    """One of a stage's pointwise operations. The other fields are as in `Convolved`."""

    operation: Elementwise
    uid: int
    target: Target | None
    read_as: DType | None


@dataclass(frozen=True)
class Stage:
    """At most one convolution, which goes first, and pointwise operations, all with results of `dims`."""

    dims: Dims
    convolved: Convolved | None
    mapped: tuple[Mapped, ...]

    @property
    def grid(self) -> Dims:
        """Dims of the tensor that is cut into boxes: the result, or the tensor that is summed over."""
        return self.dims if self.convolved is None else self.convolved.kernel.grid

    def kept_footprint(self) -> int:
        """Bytes of scratch that do not depend on the tile."""
        if self.convolved is None:
            return 0
        kernel = self.convolved.kernel
        return footprint(kernel.kept) + (self._mapped_footprint(self.dims) if kernel.accumulates else 0)

    def tile_footprint(self, tile: Dims) -> int:
        """Bytes of scratch for a box of `grid` of these dims."""
        if self.convolved is None:
            return self._mapped_footprint(tile)
        kernel = self.convolved.kernel
        return kernel.footprint(tile) + (0 if kernel.accumulates else self._mapped_footprint(tile))

    def count_parts(self, tile: Dims) -> int:
        """How many `parts` yields, or a few more."""
        return count_boxes(self.grid, tile) * (1 + len(self.mapped))

    def narrow_footprint(self) -> int:
        """Bytes of scratch for a box of so few elements that NumPy's time for a call begins to count."""
        return self._scratch_dims.total() * _NARROW_BYTES

    def parts(self, tile: Dims, memory: Scratch) -> Iterator[list[Step]]:
        """The steps of a run of this stage, in order: a list for each operation on each box."""
        if self.convolved is None:
            for box in boxes(self.grid, tile):
                yield from self._finish(box, [], {}, memory.fork())
            return
        kernel = self.convolved.kernel
        kept = memory.take(kernel.kept)
        steps = kernel.begin(kept)
        for box in boxes(self.grid, tile):
            scratch = memory.fork()
            result, computing = kernel.bind(box, kept, scratch)
            steps += computing
            if kernel.accumulates:
                yield steps
            else:
                yield from self._finish(box, steps, {self.convolved.uid: result}, scratch)
            steps = []
        if kernel.accumulates:
            yield from self._finish(whole(self.dims), steps, {self.convolved.uid: result}, memory)

    def _finish(
        self, box: Box, steps: list[Step], passed: dict[int, Array], memory: Scratch
    ) -> Iterator[list[Step]]:
        """The convolution, whose first steps are `steps`, and the pointwise operations, with their stores."""
        spare = memory.take(box_dims(box)) if self._rounds else None
        if self.convolved is not None:
            yield steps + self._keep(self.convolved, passed[self.convolved.uid], spare, box)
        for item in self.mapped:
            passed[item.uid], steps = item.operation.bind(box, passed, memory)
            yield steps + self._keep(item, passed[item.uid], spare, box)

    @functools.cached_property
    def _rounds(self) -> bool:
        """Whether any result is rounded in place."""
        return any(item.read_as is not None for item in (self.convolved, *self.mapped) if item is not None)

    def _keep(self, item: Convolved | Mapped, result: Array, spare: Array | None, box: Box) -> list[Step]:
        """Round a result as its readers see it, and store it."""
        steps = []
        if item.read_as is not None:
            assert spare is not None
            steps.append(round_to(item.read_as, result, spare))
        if item.target is not None:
            steps.append(store(item.target.rounding, result, item.target.index, self.dims, box))
        return steps

    @functools.cached_property
    def _scratch_dims(self) -> Counter[Dims]:
        """Dims of the arrays that the pointwise operations take from scratch memory, and how many of each.

        Counted once: finding a tile asks for many footprints, and a stage may have thousands of operations
        but has few different dims.
        """
        taken = Counter(dims for item in self.mapped for dims in item.operation.scratch_dims())
        if self._rounds:
            taken[self.dims] += 1
        return taken

    def _mapped_footprint(self, tile: Dims) -> int:
        return sum(
            count * footprint(tuple(map(min, dims, tile))) for dims, count in self._scratch_dims.items()
        )


class View(NamedTuple):
    """A reshape that only adds or removes dims of size 1: its number in the graph, a buffer's place, dims."""

    operation: int
    buffer: int
    dims: Dims


@dataclass(frozen=True)
class Program:
    """A plan bound to a workspace: its intermediate arrays, the steps of each stage, grouped as there, and
    its views."""

    intermediates: tuple[Array, ...]
    stages: Callable[[], Iterable[Iterable[Iterable[Step]]]]
    views: tuple[View, ...]

    def run(
        self,
        buffers: Sequence[np.ndarray],
        scalars: Iterable[float],
        on_progress: Callable[[], None] = no_progress,
        on_piece: Callable[[], None] = no_progress,
    ) -> None:
        """Compute. `on_piece` is called behind each stage.

        Raises `ValueError` if a buffer's dims do not match the graph's.
        """
        views = [buffers[view.buffer].reshape(view.dims) for view in self.views]
        values = (*self.intermediates, *buffers, *scalars, *views)
        # Overflow to infinity, and NaN, are valid results, as on a GPU.
        with np.errstate(all="ignore"):
            for stage in self.stages():
                for steps in stage:
                    for step in steps:
                        step(values)
                    on_progress()
                on_piece()


@dataclass(frozen=True, eq=False)
class CpuPlan:
    """A graph that is ready to run on the CPU; immutable.

    Parameters
    ----------
    tag
        `cpu/conv_fwd/1f2e3d4c/exact`: the operation and the first digits of the graph's digest.
    workspace
        Bytes of scratch that a run needs. While an activation is computed, NumPy also takes a few times the
        size of a tile's results.
    stages
        What to run, in order, each with the tile that its grid is cut into.
    operations
        The numbers that each stage's operations have in the graph.
    intermediates
        Dims of the tensors that one stage writes and a later one reads.
    buffers, scalars
        How many of each a run takes.
    views
        Reshapes that are read where their operands lie.
    """

    tag: str
    workspace: int
    stages: tuple[tuple[Stage, Dims], ...]
    operations: tuple[tuple[int, ...], ...]
    intermediates: tuple[Dims, ...]
    buffers: int
    scalars: int
    views: tuple[View, ...] = ()
    checked: ClassVar[bool] = True
    provisional: ClassVar[bool] = False

    def bind(self, workspace: Bytes) -> Program:
        """The plan on a workspace of at least `self.workspace` bytes."""
        memory = Scratch(workspace)
        intermediates = tuple(map(memory.take, self.intermediates))
        if sum(stage.count_parts(tile) for stage, tile in self.stages) > _MOST_BOUND_PARTS:
            # Refer to the stages only. The engine keeps programs in a dict with weak keys, the plans; a
            # program that referred to its plan would keep it alive.
            return Program(intermediates, functools.partial(_bind_stages, self.stages, memory), self.views)
        stages = tuple(map(tuple, _bind_stages(self.stages, memory)))
        return Program(intermediates, lambda: stages, self.views)

    def explain(self, graph: OperationGraph) -> Explanation:
        """A piece for each stage; see `engines.base.Plan`."""
        pieces = (
            piece_of(graph, self.tag, numbers, StepKind.TILES.step_name()) for numbers in self.operations
        )
        return Explanation(
            plan=self.tag,
            digest=graph.digest(),
            pieces=tuple(pieces),
            views=tuple(graph.label(view.operation) for view in self.views),
            workspace=self.workspace,
        )


def _bind_stages(stages: tuple[tuple[Stage, Dims], ...], memory: Scratch) -> Iterator[Iterator[list[Step]]]:
    for stage, tile in stages:
        yield stage.parts(tile, memory.fork())
