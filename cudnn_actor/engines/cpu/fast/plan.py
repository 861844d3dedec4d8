"""Fast plans: units in the order in which they run, and where the arrays between them lie."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from cudnn_actor.engines.base import no_progress
from cudnn_actor.engines.cpu.fast.kernels import Calls, Step, of_calls
from cudnn_actor.engines.cpu.fast.lanes import Lanes, run_alone
from cudnn_actor.engines.cpu.fast.units import Arrays, Unit
from cudnn_actor.engines.cpu.scratch import Bytes, Dims, Scratch
from cudnn_actor.protocol.graphs.explanation import Explanation, ScratchTensor, piece_of
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.operations import Movement
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["Buffer", "FastPlan", "FastProgram", "Piece", "Place", "RepeatedNumber", "View"]

_SMALL = 2048
"""Elements of a tensor in a plan of small products. In a product of three such matrices, m·n·k is at most
2048 ** 1.5."""


@dataclass(frozen=True)
class Buffer:
    """A bound tensor: the number of its array, and the dims and the dtype that its buffer must have."""

    number: int
    dims: Dims
    dtype: DType


@dataclass(frozen=True)
class Place:
    """An array in the workspace, and the first and the last piece that use it. `strides` are in bytes."""

    number: int
    offset: int
    dims: Dims
    strides: tuple[int, ...]
    dtype: np.dtype[Any]
    label: str
    nbytes: int
    first: int
    last: int


@dataclass(frozen=True)
class View:
    """An array in the memory of another array: a reshape, a transpose or a slice of it.

    Its strides and offset follow from those of `of` when the plan is bound.
    """

    number: int
    of: int
    movement: Movement[int]
    dims: Dims


@dataclass(frozen=True)
class RepeatedNumber:
    """A scalar or a constant: an array with the same number in all elements. `value`: None for a scalar,
    whose number comes with each run."""

    number: int
    dims: Dims
    dtype: np.dtype[Any]
    value: float | int | None


@dataclass(frozen=True)
class Piece:
    """Units that run together: the numbers of their operations, and their step's name in explanations."""

    operations: tuple[int, ...]
    step: str
    units: tuple[Unit, ...]


@dataclass(frozen=True, eq=False)
class FastPlan:
    """A graph that is ready to run in float32; immutable.

    Parameters
    ----------
    tag
        `cpu/conv_fwd/1f2e3d4c`: the operation and the first digits of the graph's digest.
    pieces
        The pieces, in the order in which they run.
    bound, places, repeated, views
        The arrays: buffers, arrays in the workspace, repeated numbers, and views of other arrays, each with
        the number of its operation.
    held_bytes
        Bytes of the workspace that `places` take.
    lane_bytes, lanes
        Bytes of scratch for each lane, and how many there are. They follow the places in the workspace.
    scalars
        How many numbers a run takes.
    updates
        Whether a run overwrites an operand.
    """

    tag: str
    pieces: tuple[Piece, ...]
    bound: tuple[Buffer, ...]
    places: tuple[Place, ...]
    repeated: tuple[RepeatedNumber, ...]
    views: tuple[tuple[int, View], ...]
    held_bytes: int
    lane_bytes: int
    lanes: int
    scalars: int
    updates: bool
    checked: ClassVar[bool] = True
    provisional: ClassVar[bool] = False

    @property
    def workspace(self) -> int:
        """Bytes of scratch that a run needs.

        Kernels may allocate copies of operands when they are bound. In a run, memory is allocated in two
        cases only: for operations whose definitions cannot be recorded, and by NumPy, for buffers of 1024
        elements in which it converts dtypes. Such an operation takes memory for a part on each lane, or for
        the whole if it has no parts.
        """
        return self.held_bytes + self.lanes * self.lane_bytes

    @functools.cached_property
    def has_small_products(self) -> bool:
        """Whether BLAS runs each product of the plan on its caller's thread, whatever its limit of threads.

        OpenBLAS 0.3 does so where m·n·k is at most 262,144, and where a product with a vector has fewer than
        9,216 elements.
        """
        dims = (*(each.dims for each in self.bound), *(each.dims for each in self.places))
        most = max(map(math.prod, dims), default=0)
        return most <= _SMALL and self.lane_bytes <= _SMALL * np.dtype(np.float32).itemsize

    @property
    def buffers(self) -> int:
        """How many buffers a run takes."""
        return len(self.bound)

    @property
    def places_written(self) -> frozenset[int]:
        """The places of the buffers that a run writes."""
        numbers = {number for piece in self.pieces for unit in piece.units for number in unit.writes}
        return frozenset(place for place, buffer in enumerate(self.bound) if buffer.number in numbers)

    def bind(
        self,
        buffers: Sequence[npt.NDArray[Any]],
        workspace: Bytes,
        on_progress: Callable[[], None] = no_progress,
    ) -> FastProgram:
        """The plan on these buffers, and on a workspace of at least `self.workspace` bytes.

        `on_progress` is called behind each piece: some thousand blocks take tenths of a second.

        Raises `ValueError` if a buffer's dims or dtype do not match the graph's.
        """
        arrays: dict[int, npt.NDArray[Any]] = {}
        for buffer, array in zip(self.bound, buffers, strict=True):
            if array.shape != buffer.dims:
                raise ValueError(f"a buffer of dims {array.shape} for a tensor of {buffer.dims}")
            if array.dtype != buffer.dtype.numpy:
                raise ValueError(f"a buffer of {array.dtype} for a tensor of {buffer.dtype}")
            arrays[buffer.number] = array
        for place in self.places:
            arrays[place.number] = np.ndarray(place.dims, place.dtype, workspace, place.offset, place.strides)
        scalars: list[npt.NDArray[Any]] = []
        for one in self.repeated:
            value = np.zeros((), one.dtype)
            if one.value is None:
                scalars.append(value)
            else:
                with np.errstate(all="ignore"):
                    value[...] = one.value
            arrays[one.number] = np.broadcast_to(value, one.dims)
        for _, view in self.views:
            arrays[view.number] = _array_of_view(view, arrays[view.of])
        lanes = [
            Scratch(workspace, self.held_bytes + number * self.lane_bytes) for number in range(self.lanes)
        ]
        steps = []
        for piece in self.pieces:
            steps.append(_steps(piece, arrays, lanes))
            on_progress()
        kept = sum(lane.kept_bytes for lane in lanes)
        return FastProgram(tuple(buffers), tuple(scalars), tuple(steps), kept)

    def explain(self, graph: OperationGraph) -> Explanation:
        """The explanation of the plan, piece by piece. See `engines.base.Plan`."""
        return Explanation(
            plan=self.tag,
            digest=graph.digest(),
            pieces=tuple(piece_of(graph, self.tag, piece.operations, piece.step) for piece in self.pieces),
            views=tuple(graph.label(number) for number, _ in self.views),
            scratch=tuple(
                ScratchTensor(
                    label=place.label,
                    nbytes=place.nbytes,
                    offset=place.offset,
                    first=place.first,
                    last=place.last,
                )
                for place in self.places
            ),
            scratch_bytes=self.held_bytes,
            workspace=self.workspace,
        )


def _steps(piece: Piece, arrays: Arrays, lanes: Sequence[Scratch]) -> tuple[Step, ...]:
    return tuple(
        step for unit in piece.units for step in unit.bind(arrays, [lane.fork() for lane in lanes]) if step
    )


def _array_of_view(view: View, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The part of an array that a movement shows. The compiler has made sure that it is possible."""
    itemsize = array.itemsize
    placed = view.movement.view(array.shape, tuple(stride // itemsize for stride in array.strides))
    assert placed is not None, "the compiler asked the same"
    start = array
    if placed.offset:
        count, step = abs(placed.offset), itemsize if placed.offset > 0 else -itemsize  # of a reversed array
        start = np.lib.stride_tricks.as_strided(array, (count + 1,), (step,))[count:]
    strides = tuple(stride * itemsize for stride in placed.strides)
    return np.lib.stride_tricks.as_strided(start, view.dims, strides)


@dataclass(frozen=True, eq=False)
class FastProgram:
    """A plan that is bound to buffers, which it keeps alive.

    Parameters
    ----------
    buffers
        The buffers that it is bound to.
    scalars
        The arrays to which a run writes its numbers.
    pieces
        The steps of each piece.
    kept_bytes
        Bytes of the arrays that its kernels allocated, for copies in another order or dtype, and for sums.
    """

    buffers: tuple[npt.NDArray[Any], ...]
    scalars: tuple[npt.NDArray[Any], ...]
    pieces: tuple[tuple[Step, ...], ...]
    kept_bytes: int = 0

    @functools.cached_property
    def calls(self) -> int:
        """How many calls it keeps. Those that a run makes several times count once."""
        calls = (one for steps in self.pieces for step in steps for call in step for one in of_calls(call))
        return len(set(map(id, calls)))

    def run(
        self,
        scalars: Sequence[float],
        lanes: Lanes,
        on_progress: Callable[[], None] = no_progress,
        on_piece: Callable[[], None] = no_progress,
    ) -> None:
        """Compute. `on_piece` is called behind each piece."""
        for place, value in zip(self.scalars, scalars, strict=True):
            place[...] = value
        lanes.call_with_settings(self._compute, lanes, on_progress, on_piece)

    def _compute(self, lanes: Lanes, on_progress: Callable[[], None], on_piece: Callable[[], None]) -> None:
        for steps in self.pieces:
            for step in steps:
                if len(step) > 1:
                    lanes.run(step, on_progress)
                elif type(call := step[0]) is Calls:
                    run_alone(call, on_progress)
                else:  # of small requests, whose time is that of what is called around it
                    call()
                    on_progress()
            on_piece()
