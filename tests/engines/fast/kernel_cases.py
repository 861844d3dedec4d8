"""Runs a kernel on a random problem, and judges its results by the bounds of the operation's row."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from cudnn_actor.engines.cpu.fast.kernels import carried
from cudnn_actor.engines.cpu.rounding import clipped, rounding_to
from cudnn_actor.engines.cpu.scratch import Scratch, aligned_bytes
from cudnn_actor.protocol import TensorSpec

from ...gpu.operations.cases import OperationCase, arrays, error_over_bound, truth
from ...gpu.operations.drawing import draw

__all__ = ["Make", "check", "drawn", "run_kernel", "verdict"]

Make = Callable[[Any, Any], Any]
Values = dict[str, np.ndarray]


def drawn(family: str, makes: Mapping[Any, Make], count: int, seed: int = 38) -> Iterator[OperationCase]:
    """Random problems of those operations of a family that have a kernel."""
    cases = (draw(family, seed, number) for number in range(count))
    return (case for case in cases if type(case.operation) in makes)


def check(family: str, makes: Mapping[Any, Make], count: int) -> None:
    """Check so many random problems of a family, those that have a kernel; there must be one for most."""
    errors = [(case, verdict(makes[type(case.operation)], case)) for case in drawn(family, makes, count)]
    for case, error in errors:
        assert error is None or error <= 1, case
    assert sum(error is not None for _, error in errors) > len(errors) // 2


def verdict(make: Make, case: OperationCase) -> float | None:
    """The largest error in terms of what is allowed; None if the kernel is not for the case.

    Raises `AssertionError` if the results depend on the number of lanes.
    """
    given = {name: array.astype(carried(case.specs[name].dtype)) for name, array in arrays(case).items()}
    if make(case.operation, case.specs) is None:
        return None
    found = [run_kernel(make, case.operation, case.specs, given, lanes) for lanes in (1, 2, 3)]
    got = {name: _stored(case.specs[name], array) for name, array in found[0].items()}
    for other in found[1:]:
        for name, array in other.items():
            assert np.array_equal(array, found[0][name], equal_nan=array.dtype.kind == "f"), name
    return error_over_bound(case, got, truth(case))


def run_kernel(
    make: Make, operation: Any, specs: Mapping[str, TensorSpec], given: Mapping[str, np.ndarray], lanes: int
) -> Values:
    """The results, from arrays of the operands as kernels read them.

    Each operand and result has its spec's strides; what lies between its elements stays, and so do operands.
    """
    kernel = make(operation, specs)
    operands = {name: _strided(specs[name], array) for name, array in given.items()}
    outputs = [name for name, _ in operation.named(operation.outputs)]
    results = {name: _strided(specs[name], None) for name in outputs}
    size = kernel.footprint(lanes)
    memory = [aligned_bytes(size + 64) for _ in range(lanes)]
    for each in memory:
        each[:] = 0xFF  # NaN
    steps = kernel.bind(
        {name: array for name, (array, _) in operands.items()},
        {name: array for name, (array, _) in results.items()},
        [Scratch(each[:size]) for each in memory],
    )
    with np.errstate(all="ignore"):
        for _ in range(2):  # a second run finds what the first one left
            for step in steps:
                assert len(step) <= lanes
                for call in reversed(step):
                    call()
    for name, (array, _) in operands.items():
        assert np.array_equal(array, given[name], equal_nan=array.dtype.kind == "f"), f"{name} was written"
    found = {name: array.copy() for name, (array, _) in results.items()}
    for name, (array, whole) in results.items():
        array[...] = _GAP
        assert np.all(whole == whole.dtype.type(_GAP)), f"{name} was written between its elements"
    return found


_GAP = 77
"""What lies between the elements of an array."""


def _strided(spec: TensorSpec, values: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """An array with a spec's strides, and all of its memory."""
    dtype = carried(spec.dtype) if values is None else values.dtype
    size = (
        1 + sum((n - 1) * step for n, step in zip(spec.dims, spec.strides, strict=True)) if spec.size else 1
    )
    whole = np.full(size, _GAP, dtype)
    array = np.lib.stride_tricks.as_strided(
        whole, spec.dims, [step * dtype.itemsize for step in spec.strides]
    )
    array[...] = (math.nan if dtype.kind == "f" else 33) if values is None else values
    return array, whole


def _stored(spec: TensorSpec, array: np.ndarray) -> np.ndarray:
    """Results as they are stored."""
    if not spec.dtype.is_floating:
        return clipped(array, spec.dtype.numpy)
    result: np.ndarray = np.empty(array.shape, spec.dtype.numpy)
    with np.errstate(all="ignore"):
        rounding_to(result.dtype)(result, array.astype(np.float64))
    return result
