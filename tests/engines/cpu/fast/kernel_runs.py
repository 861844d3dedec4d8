"""Runs kernels of the fast engine on arrays, as its plans do, and judges their results."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from cudnn_actor.engines.cpu.fast.kernels import Kernel, carrier_dtype, of_calls
from cudnn_actor.engines.cpu.rounding import clip, rounding_to
from cudnn_actor.engines.cpu.scratch import Scratch, aligned_bytes
from cudnn_actor.protocol import TensorSpec

from ....gpu.operations.cases import OperationCase, arrays, error_over_bound, truth
from ....whole import WHOLE

__all__ = ["LANES", "array_of", "calls_of", "carrier_dtype", "error", "peak_of_second", "run"]
__all__ += ["run_kernel", "stored"]

Arrays = dict[Any, np.ndarray]
LANES = (1, 2, 3) if WHOLE else (1, 3)
"""Numbers of lanes whose results must be the same. Of 3, each has neighbours, and their parts may differ."""
_RUNS = 2
"""A second run finds what the first one has left."""


def array_of(spec: TensorSpec, values: np.ndarray | None = None) -> np.ndarray:
    """An array with a spec's strides; of values, or full of 0xA5."""
    dtype = carrier_dtype(spec.dtype)
    span = 1 + sum((dim - 1) * stride for dim, stride in zip(spec.dims, spec.strides, strict=True))
    memory = np.frombuffer(
        bytearray(b"\xa5" * (span * dtype.itemsize if spec.size else dtype.itemsize)), dtype
    )
    strides = tuple(stride * dtype.itemsize for stride in spec.strides)
    found: np.ndarray = np.ndarray(spec.dims, dtype, memory, strides=strides)
    if values is not None:
        found[...] = values
    return found


def run(
    kernel: Kernel, operands: Mapping[Any, np.ndarray], results: Mapping[Any, np.ndarray], lanes: int = 1
) -> None:
    """Run a kernel twice, with scratch full of NaN, the last lane first.

    Raises `AssertionError` if it writes to an operand, or between the elements of a result.
    """
    memory = [aligned_bytes(kernel.footprint(lanes)) for _ in range(lanes)]
    before = {name: array.copy() for name, array in operands.items()}
    around = {name: _memory(array).copy() for name, array in results.items()}
    with np.errstate(all="ignore"):
        steps = kernel.bind(operands, results, [Scratch(own) for own in memory])
        for own in memory:
            own[...] = 0xFF
        for _ in range(_RUNS):
            for step in steps:
                assert 1 <= len(step) <= lanes
                for call in reversed(step):
                    call()
    for name, array in operands.items():
        np.testing.assert_array_equal(array, before[name], err_msg=f"{name} was written")
    for name, array in results.items():
        expected = np.ndarray(array.shape, array.dtype, around[name], _offset(array), array.strides)
        expected[...] = array
        assert np.array_equal(_memory(array), around[name]), f"{name} was written between its elements"


def run_kernel(
    make: Any, operation: Any, specs: Mapping[str, TensorSpec], given: Mapping[str, np.ndarray], lanes: int
) -> Arrays:
    """The results of an operation, from values of its operands as kernels read them.

    Each operand and result has its spec's strides. Raises `AssertionError` as `run` does.
    """
    operands = {name: array_of(specs[name], values) for name, values in given.items()}
    results = {name: array_of(specs[name]) for name, _ in operation.named(operation.outputs)}
    run(make(operation, specs), operands, results, lanes)
    return results


def calls_of(
    kernel: Kernel, operands: Mapping[Any, np.ndarray], results: Mapping[Any, np.ndarray], lanes: int = 1
) -> int:
    """How many calls a run takes."""
    memory = [Scratch(aligned_bytes(kernel.footprint(lanes))) for _ in range(lanes)]
    return sum(len(of_calls(call)) for step in kernel.bind(operands, results, memory) for call in step)


def peak_of_second(run: Callable[[], object]) -> int:
    """The most bytes that are allocated at a time in the second run of two."""
    run()
    tracemalloc.start()
    try:
        run()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def error(case: OperationCase, make: Any, lanes: Sequence[int] = (1,)) -> float | None:
    """The largest error of a kernel in terms of what is allowed; None if it is not for the case.

    It runs on each of these numbers of lanes. Raises `AssertionError` if the results depend on the number.
    """
    if make(case.operation, case.specs) is None:
        return None
    values = arrays(case)
    given = {name: array.astype(carrier_dtype(case.specs[name].dtype)) for name, array in values.items()}
    specs = {**case.specs, **case.outputs}
    first, *others = (run_kernel(make, case.operation, specs, given, number) for number in lanes)
    found = {name: stored(spec, first[name]) for name, spec in case.outputs.items()}
    for other in others:
        for name, spec in case.outputs.items():
            bits = f"u{found[name].itemsize}"
            again = stored(spec, other[name]).view(bits)
            np.testing.assert_array_equal(again, found[name].view(bits), str(case))
    return error_over_bound(case, found, truth(case, values))


def stored(spec: TensorSpec, array: np.ndarray) -> np.ndarray:
    """Results as they are stored in a buffer of a spec."""
    if not spec.dtype.is_floating:
        return clip(array, spec.dtype.numpy)
    found: np.ndarray = np.empty(array.shape, spec.dtype.numpy)
    with np.errstate(all="ignore"):
        rounding_to(found.dtype)(found, array.astype(np.float64))
    return found


def _memory(array: np.ndarray) -> np.ndarray:
    """The bytes of the memory that an array lies in."""
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array.reshape(-1).view(np.uint8)


def _offset(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0] - _memory(array).__array_interface__["data"][0])
