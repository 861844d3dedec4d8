"""The interface of a kernel of the fast engine, and the calls that kernels make."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from cudnn_actor.engines.cpu.scratch import Scratch
from cudnn_actor.protocol.types.dtypes import DType

__all__ = [
    "BRIEF_NS",
    "COPY_NS",
    "MOST_SCRATCH",
    "Call",
    "Calls",
    "Kernel",
    "Operands",
    "Step",
    "carried_number",
    "carrier_dtype",
    "deal",
    "in_turn",
    "lanes_worth",
    "made_when_run",
    "most_calls",
    "of_calls",
    "step_by_lane",
]

T = TypeVar("T")

Call = Callable[[], object]
"""A part of a run, without arguments. It allocates only what the docstring of its maker says."""

Step = tuple[Call, ...]
"""Calls that may run at the same time, at most one for each lane. The next step begins when all are done."""

Operands = Mapping[str, npt.NDArray[Any]]
"""Arrays by the names of an operation's fields, in logical dims and with any strides.

Tensors of float32 and of smaller floating types are arrays of float32. All others have their own dtype.
"""


MOST_SCRATCH = 4 << 20
"""Bytes of scratch that a lane should have at most. What needs more is cut, or done without it."""

_MOST_CALLS = 100_000
"""Calls that any kernel may take. Each has about 1 kB, and takes 20 µs to be bound."""
_OF_A_BLOCK, _BLOCK_BYTES = 48, 32768
"""The calls that a kernel of large tensors may take for each block, and the bytes of a block."""


def most_calls(nbytes: int) -> int:
    """The most calls that a kernel may take whose largest tensor has `nbytes` bytes."""
    return max(_MOST_CALLS, _OF_A_BLOCK * (nbytes // _BLOCK_BYTES))


BRIEF_NS = 60_000
"""The nanoseconds below which work stays on one lane: a second lane would take as long to begin and to
end."""


COPY_NS = 0.45
"""About how many nanoseconds it takes to copy an element."""


def lanes_worth(lanes: Sequence[Scratch], ns: float) -> Sequence[Scratch]:
    """The lanes to which a step is dealt: all of them, or the first alone if the step is brief.

    `ns`: about how many nanoseconds the step takes on one lane.
    """
    return lanes if ns > BRIEF_NS else lanes[:1]


def carrier_dtype(dtype: DType) -> np.dtype[Any]:
    """The dtype of the arrays that kernels read and write for tensors of a dtype."""
    return np.dtype(np.float32) if dtype.is_half else dtype.numpy


def carried_number(dtype: DType, number: float | None) -> np.dtype[Any]:
    """The dtype of a constant's array: int64 if the constant's own dtype does not hold the number.

    So 300 of uint8 is not cut off. Else the dtype is `carrier_dtype`.
    """
    wide = number is not None and not dtype.is_floating and not dtype.holds(number)
    return np.dtype(np.int64) if wide else carrier_dtype(dtype)


class Kernel(Protocol):
    """Computes one operation, block by block. It depends on dims and dtypes, not on addresses."""

    def footprint(self, lanes: int) -> int:
        """The bytes of scratch that each lane needs, if there are `lanes` of them."""

    def bind(self, operands: Operands, results: Operands, lanes: Sequence[Scratch]) -> list[Step]:
        """The steps of a run on these arrays, whose addresses stay the same. Operands are not written.

        Block i of a step goes to lane i modulo the number of lanes. The bounds of blocks do not depend on how
        many lanes there are. So the results do not either.
        """


class Calls:
    """One call that makes several calls, one after the other."""

    __slots__ = ("calls",)

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = tuple(each for call in calls for each in of_calls(call))

    def __call__(self) -> None:
        """Make the calls."""
        for call in self.calls:
            call()


def step_by_lane(blocks: Sequence[Sequence[Call]]) -> Step:
    """A step in which each lane makes its own calls, one after the other. Lanes without calls are left
    out."""
    return tuple(calls[0] if len(calls) == 1 else Calls(calls) for calls in blocks if calls)


def made_when_run(make: Callable[[], Iterable[Call]]) -> Call:
    """A call that makes and runs many calls in each run, and keeps none, since binding them all would take
    long."""

    def call() -> None:
        for each in make():
            each()

    return call


def of_calls(call: Call) -> tuple[Call, ...]:
    """The calls that a call consists of."""
    return call.calls if isinstance(call, Calls) else (call,)


def in_turn(calls: Sequence[Call]) -> Call:
    """A call that makes several calls, one after the other."""
    return calls[0] if len(calls) == 1 else Calls(calls)


def deal(
    blocks: Iterable[T],
    count: int,
    bind: Callable[[T, int], Call | Sequence[Call]],
    ahead: Sequence[Sequence[Call]] = (),
) -> Step:
    """A step in which `count` lanes compute blocks: block i is computed by lane i modulo `count`.

    `bind` takes a block and the number of its lane, and returns the block's calls. `ahead`: the calls that
    each lane makes first.
    """
    calls = [[*first] for first in ahead] or [[] for _ in range(count)]
    for number, block in enumerate(blocks):
        bound = bind(block, number % count)
        calls[number % count] += (bound,) if callable(bound) else bound
    return step_by_lane(calls)
