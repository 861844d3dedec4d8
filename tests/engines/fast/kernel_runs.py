"""Runs kernels of the fast engine on arrays, as its plans do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cudnn_actor.engines.cpu.fast.kernels import Kernel, carried, of_calls
from cudnn_actor.engines.cpu.rounding import rounding_to
from cudnn_actor.engines.cpu.scratch import Scratch, aligned_bytes
from cudnn_actor.protocol import TensorSpec

from ...gpu.operations.cases import OperationCase, arrays, error_over_bound, truth

__all__ = ["array_of", "calls_of", "carried", "error", "run"]

Arrays = dict[Any, np.ndarray]


def array_of(spec: TensorSpec, values: np.ndarray | None = None) -> np.ndarray:
    """An array with a spec's strides; of values, or full of 0xA5."""
    dtype = carried(spec.dtype)
    span = 1 + sum((dim - 1) * stride for dim, stride in zip(spec.dims, spec.strides, strict=True))
    memory = np.frombuffer(bytearray(b"\xa5" * (span * dtype.itemsize)), dtype)
    strides = tuple(stride * dtype.itemsize for stride in spec.strides)
    found: np.ndarray = np.ndarray(spec.dims, dtype, memory, strides=strides)
    if values is not None:
        found[...] = values
    return found


def run(
    kernel: Kernel, operands: Mapping[Any, np.ndarray], results: Mapping[Any, np.ndarray], lanes: int = 1
) -> None:
    """Run a kernel twice, with scratch full of NaN. A lane's calls are made one lane after the other."""
    memory = [aligned_bytes(kernel.footprint(lanes)) for _ in range(lanes)]
    before = {name: array.copy() for name, array in operands.items()}
    with np.errstate(all="ignore"):
        steps = kernel.bind(operands, results, [Scratch(own) for own in memory])
        for own in memory:
            own[...] = 0xFF
        for step in steps:
            assert 1 <= len(step) <= lanes
            for call in step:
                call()
    for name, array in operands.items():
        np.testing.assert_array_equal(array, before[name])


def calls_of(
    kernel: Kernel, operands: Mapping[Any, np.ndarray], results: Mapping[Any, np.ndarray], lanes: int = 1
) -> int:
    """How many calls a run takes."""
    memory = [Scratch(aligned_bytes(kernel.footprint(lanes))) for _ in range(lanes)]
    return sum(len(of_calls(call)) for step in kernel.bind(operands, results, memory) for call in step)


def error(case: OperationCase, make: Any, lanes: int = 1) -> tuple[float, Arrays] | None:
    """The largest error of a kernel in terms of what is allowed, and what it gave; None if there is none."""
    kernel = make(case.operation, case.specs)
    if kernel is None:
        return None
    given = {name: array_of(case.specs[name], values.astype(carried(case.specs[name].dtype)))
             for name, values in arrays(case).items()}  # fmt: skip
    results = {name: array_of(spec) for name, spec in case.outputs.items()}
    run(kernel, given, results, lanes)
    rounded = {}
    for name, spec in case.outputs.items():
        rounded[name] = np.empty(spec.dims, spec.dtype.numpy)
        if spec.dtype.is_floating:
            with np.errstate(all="ignore"):
                rounding_to(spec.dtype.numpy)(rounded[name], results[name].astype(np.float64))
        else:
            rounded[name][...] = results[name]
    return error_over_bound(case, rounded, truth(case)), rounded
