"""The differences that a self-check allows, and the places where results differ by more.

The elements of a large result are compared on the device first, which only tells
whether all of them agree. If they do not, the host compares a sample of them exactly.
"""

from __future__ import annotations

import itertools
import math
from typing import NamedTuple, Self

import numpy as np

from cudnn_actor.engines.cpu.rounding import clip, integer_range
from cudnn_actor.engines.cuda.checking.self_check_memory import enqueue
from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.operations.base import Array
from cudnn_actor.protocol.types.dtypes import DType

__all__ = [
    "ROUNDING_DRAWS",
    "Accuracy",
    "Compared",
    "compare_on_device",
    "difference",
    "rounding_bound",
    "sample",
    "sampling_step",
]

_MOST_COMPARED = 1 << 20
"""The most elements of a result that are compared on the host, about."""


class _Tolerance(NamedTuple):
    own: float
    """Relative to the value itself: its rounding."""
    sums: float
    """Relative to the root mean square of all values, which stands for the size of a sum whose terms do not
    cancel: transforms such as Winograd's are as wrong as that everywhere."""
    underflow: float
    """Absolute: the smallest number, or the smallest normal one where subnormal ones may become zero."""


_TOLERANCES = {
    DType.FLOAT64: _Tolerance(1e-12, 1e-11, 2.0**-1022),
    DType.FLOAT32: _Tolerance(1e-5, 1e-4, 2.0**-126),
    DType.FLOAT16: _Tolerance(2**-9, 4e-3, 2.0**-24),
    DType.BFLOAT16: _Tolerance(2**-6, 4e-3, 2.0**-126),
}
_LARGEST = {
    DType.FLOAT64: math.inf,
    DType.FLOAT32: 2.0**128 - 2.0**104,
    DType.FLOAT16: 65504.0,
    DType.BFLOAT16: 2.0**128 - 2.0**120,
}
"""The largest finite value of a dtype. Values of at least this size are not compared, because they may be
stored as infinite."""
ROUNDING_DRAWS = 6
"""How often a result is computed with other roundings: once with all errors positive, once with all negative,
and otherwise with random signs."""


Compared = tuple[np.ndarray, np.ndarray]
"""(wanted, got) of the elements of a result that `difference` has to judge, on the host and not rounded."""


class Accuracy(NamedTuple):
    """How accurate a result is: as results of a dtype are, times `slack` (see `Operation.slack_of`)."""

    dtype: DType
    slack: float = 1.0

    @classmethod
    def of(cls, graph: OperationGraph, uid: int) -> Self:
        """The accuracy of a graph's result. It is float32's if an operation is computed in float32."""
        dtype = graph.tensor(uid).dtype
        if dtype is DType.FLOAT64 and any(graph.compute(op) is DType.FLOAT32 for op in graph.operations):
            dtype = DType.FLOAT32
        return cls(dtype, max(operation.slack_of(dtype) for operation in graph.operations))

    @property
    def of_sums(self) -> float:
        """The most that a sum may be off by, relative to the size of a sum whose terms do not cancel."""
        return self.slack * _TOLERANCES.get(self.dtype, _TOLERANCES[DType.FLOAT32]).sums


def rounding_bound(compute: DType) -> float:
    """The most that a value within a graph may be off by, relative to itself, if computed in `compute`."""
    return 64 * (2.0**-53 if compute is DType.FLOAT64 else 2.0**-24)


def difference(
    wanted: np.ndarray, got: np.ndarray, accuracy: Accuracy, uncertainty: np.ndarray | float = 0.0
) -> str | None:
    """How a result differs from the wanted one by more than rounding explains; None if it does not.

    `uncertainty`: how much further each element may be off, because operations magnify earlier roundings.
    """
    dtype = accuracy.dtype
    exact = dtype in (DType.INT64, DType.UINT64) and "f" not in wanted.dtype.kind + got.dtype.kind
    wrong = got != clip(wanted, dtype.numpy) if exact else _beyond(wanted, got, accuracy, uncertainty)
    if not wrong.any():
        return None
    first = int(np.argmax(wrong))
    share = float(np.mean(wrong))
    form = "d" if exact else "g"
    told = f"it computes {got[first]:{form}} instead of {wanted[first]:{form}}"
    return f"{share:.1%} of its results are wrong: {told}"


def _beyond(
    wanted: np.ndarray, got: np.ndarray, accuracy: Accuracy, uncertainty: np.ndarray | float
) -> np.ndarray:
    """A mask of the elements that differ from the wanted ones by more than rounding explains."""
    dtype = accuracy.dtype
    wanted, got = wanted.astype(np.float64), got.astype(np.float64)
    compared = np.ones(len(wanted), np.bool_)
    if dtype.is_floating:
        own, _, underflow = _TOLERANCES[dtype]
        finite = np.isfinite(wanted)
        compared = ~finite | (np.abs(wanted) < _LARGEST[dtype])
        scaling = wanted[finite & compared]
        scale = float(np.sqrt(np.mean(np.square(scaling)))) if len(scaling) else 0.0
        allowed = np.where(finite, own * np.abs(wanted) + accuracy.of_sums * scale + underflow, -1.0)
    else:  # rounding to a whole number, and float32 rounding before that
        if dtype is DType.BOOL:
            wanted = np.asarray(wanted != 0, np.float64)
        wanted = np.clip(np.where(np.isnan(wanted), 0, wanted), *integer_range(dtype.numpy))
        allowed = 0.5 + 1e-3 + 1e-6 * np.abs(wanted)
    with np.errstate(invalid="ignore"):
        wrong = np.logical_not(np.abs(got - wanted) <= allowed + uncertainty)
    alike = (got == wanted) | (np.isnan(got) & np.isnan(wanted)) | np.isinf(uncertainty)
    return np.asarray(wrong & compared & ~alike)


def sample(values: Array) -> np.ndarray:
    """Returns a sample of the elements, evenly spaced, on the host. Blocks."""
    return _on_host(values.ravel()[:: sampling_step(values.size)])


def compare_on_device(wanted: Array, got: Array, accuracy: Accuracy) -> Compared:
    """Compare arrays on the device. Blocks.

    Returns a sample of both for the host's exact comparison (`difference`), or two empty arrays if all
    elements that are looked at agree.
    """
    assert wanted.size == got.size
    if accuracy.dtype.is_floating and wanted.dtype == got.dtype == np.float64:
        wanted, got = wanted.ravel(), got.ravel()  # contiguous
        if _agree(wanted, got, accuracy):
            return np.empty(0), np.empty(0)
    return sample(wanted), sample(got)


def _agree(wanted: Array, got: Array, accuracy: Accuracy) -> bool:
    """Whether the sampled elements agree, as `difference` would say. False if one is not finite. Blocks."""
    own, _, underflow = _TOLERANCES[accuracy.dtype]
    cupy, step = libraries().cupy, sampling_step(got.size)
    count = -(-got.size // step)
    found = cupy.zeros(2, np.float64)
    enqueue("squares", count, (wanted, count, step, found))
    tolerance = own, accuracy.of_sums, underflow, _LARGEST[accuracy.dtype]
    enqueue("apart", count, (wanted, got, count, step, *tolerance, found))
    _, apart = cupy.asnumpy(found).tolist()
    return not apart


def _on_host(array: Array) -> np.ndarray:
    """A NumPy array of the same values. Blocks."""
    return array if isinstance(array, np.ndarray) else np.asarray(libraries().cupy.asnumpy(array))


def sampling_step(count: int) -> int:
    """The distance of two sampled elements in an array of `count`.

    It has no divisor in common with any dim, so the sample is not of a few columns only.
    """
    least = max(1, count // _MOST_COMPARED)
    return next(step for step in itertools.count(least) if math.gcd(step, count) == 1)
