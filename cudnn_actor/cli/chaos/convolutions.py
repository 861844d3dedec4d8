"""The convolutions of the load, and their expected results, computed here in whole numbers.

All values are small whole numbers. So every sum is exact in float32 in any order, and results are compared
bit by bit. The few inputs of each problem are made once and the results are cached: in the long run the
oracle only looks up what the service has to compute.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from cudnn_actor.protocol import ConvBwdData, ConvBwdFilter, ConvFwd, ConvSpec, TensorSpec
from cudnn_actor.protocol.tensor import LayoutName

__all__ = [
    "CLASS",
    "HEAVY",
    "INPUTS",
    "PROBLEMS",
    "READS",
    "VALUES",
    "WRITES",
    "Answers",
    "Kind",
    "Problem",
]

VALUES = 3
"""Number of different inputs of each operand."""
_LARGEST = 3


class Kind(enum.StrEnum):
    """Which convolution."""

    FORWARD = "forward"
    DATA = "data"
    FILTER = "filter"


CLASS = {Kind.FORWARD: ConvFwd, Kind.DATA: ConvBwdData, Kind.FILTER: ConvBwdFilter}
READS = {Kind.FORWARD: ("x", "w"), Kind.DATA: ("dy", "w"), Kind.FILTER: ("x", "dy")}
WRITES = {Kind.FORWARD: "y", Kind.DATA: "dx", Kind.FILTER: "dw"}
INPUTS = ("x", "w", "dy")


class Problem(NamedTuple):
    """Dims of input and filter, and the convolution's parameters."""

    x: tuple[int, int, int, int]
    w: tuple[int, int, int, int]
    conv: ConvSpec
    layout: LayoutName = "NCHW"

    def dims(self, role: str) -> tuple[int, ...]:
        """The dims of an operand, or of a gradient (the same as its operand's)."""
        match role.removeprefix("d"):
            case "x":
                return self.x
            case "w":
                return self.w
            case _:
                return self.conv.output_dims(self.x, self.w)

    def spec(self, role: str) -> TensorSpec:
        """The spec of an operand's buffer."""
        return TensorSpec.packed(self.dims(role), "float32", self.layout)


def _square(pad: int = 0, stride: int = 1, dilation: int = 1, groups: int = 1) -> ConvSpec:
    return ConvSpec.symmetric(2, pad=pad, stride=stride, dilation=dilation, groups=groups)


PROBLEMS = (
    Problem((1, 2, 6, 6), (3, 2, 3, 3), _square(pad=1)),
    Problem((2, 3, 8, 8), (4, 3, 3, 3), _square()),
    Problem((1, 4, 7, 7), (4, 2, 3, 3), _square(pad=1, groups=2)),
    Problem((2, 4, 9, 9), (2, 4, 3, 3), _square(pad=1, stride=2)),
    Problem((1, 3, 10, 10), (2, 3, 3, 3), _square(dilation=2)),
    Problem((4, 8, 5, 5), (8, 8, 1, 1), _square()),
    Problem((1, 6, 12, 12), (6, 1, 3, 3), _square(pad=1, groups=6)),
    Problem((2, 8, 8, 8), (8, 8, 3, 3), _square(pad=1), "NHWC"),
    Problem((1, 8, 16, 16), (16, 8, 3, 3), _square(pad=1)),
    Problem((3, 4, 6, 8), (4, 4, 5, 3), _square(pad=2), "NHWC"),
    Problem((2, 1, 160, 160), (2, 1, 1, 1), _square()),
    Problem((1, 1, 260, 260), (1, 1, 1, 1), _square()),
)
"""Many problems, since a quarantined one is not used again. The last two write much and compute little, so
that a fault sometimes hits them while they write."""

HEAVY = len(PROBLEMS) - 1
"""The last problem: its arrays have 264 KiB, more than an event loop copies itself."""


class Answers:
    """The inputs of every problem, and the results of every pair.

    Parameters
    ----------
    seed
        Decides the inputs.
    """

    def __init__(self, seed: int) -> None:
        self._inputs = {
            (number, role): _inputs(problem, role, np.random.default_rng([seed, number, place]))
            for number, problem in enumerate(PROBLEMS)
            for place, role in enumerate(INPUTS)
        }
        self._results: dict[tuple[int, Kind, int, int], np.ndarray] = {}

    def value(self, problem: int, role: str, number: int) -> np.ndarray:
        """One of the inputs of an operand. Do not write to it."""
        return self._inputs[problem, role][number]

    def result(self, kind: Kind, problem: int, first: np.ndarray, second: np.ndarray) -> np.ndarray:
        """The result for two of the inputs, `READS[kind]`. Cached by the inputs' ids, since they live as long
        as this."""
        key = (problem, kind, id(first), id(second))
        result = self._results.get(key)
        if result is None:
            result = self._results[key] = _convolve(kind, PROBLEMS[problem], first, second)
            result.setflags(write=False)
        return result


def _inputs(problem: Problem, role: str, rng: np.random.Generator) -> list[np.ndarray]:
    made = []
    for _ in range(VALUES):
        array = rng.integers(-_LARGEST, _LARGEST + 1, problem.dims(role)).astype(np.float32)
        array.setflags(write=False)
        made.append(array)
    return made


def _convolve(kind: Kind, problem: Problem, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """A convolution or a gradient, tap by tap. N batch, G groups, C and K channels of a group."""
    given = dict(zip(READS[kind], (first.astype(np.int64), second.astype(np.int64)), strict=True))
    groups, pad = problem.conv.groups, problem.conv.pre_padding
    padded = [(0, 0), (0, 0), *((size, size) for size in pad)]
    x = _grouped(np.pad(given["x"] if "x" in given else np.zeros(problem.x, np.int64), padded), groups)
    y = _grouped(given.get("dy", np.zeros(problem.dims("y"), np.int64)), groups)
    w = given.get("w", np.zeros(problem.w, np.int64)).reshape(groups, -1, *problem.w[1:])
    for row, column, window in _taps(problem):
        if kind is Kind.FORWARD:
            y += np.einsum("ngchw,gkc->ngkhw", x[window], w[..., row, column])
        elif kind is Kind.DATA:
            x[window] += np.einsum("ngkhw,gkc->ngchw", y, w[..., row, column])
        else:
            w[..., row, column] = np.einsum("ngchw,ngkhw->gkc", x[window], y)
    inside = (..., slice(pad[0], pad[0] + problem.x[2]), slice(pad[1], pad[1] + problem.x[3]))
    result = {Kind.FORWARD: y, Kind.DATA: x[inside], Kind.FILTER: w}[kind]
    return result.reshape(problem.dims(WRITES[kind])).astype(np.float32)


def _grouped(array: np.ndarray, groups: int) -> np.ndarray:
    batch, channels, *spatial = array.shape
    return array.reshape(batch, groups, channels // groups, *spatial)


def _taps(problem: Problem) -> Iterator[tuple[int, int, tuple[Any, ...]]]:
    """Each tap of the filter, and the part of the padded input that it multiplies."""
    stride, dilation = problem.conv.stride, problem.conv.dilation
    out = problem.dims("y")[2:]
    for row, column in np.ndindex(*problem.w[2:]):
        starts = row * dilation[0], column * dilation[1]
        spans = [
            slice(start, start + step * (size - 1) + 1, step)
            for start, step, size in zip(starts, stride, out, strict=True)
        ]
        yield row, column, (..., *spans)
