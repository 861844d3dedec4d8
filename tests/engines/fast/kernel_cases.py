"""Checks kernels on random problems, by the bounds of the operations' rows."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from ...gpu.operations.cases import OperationCase
from ...gpu.operations.drawing import draw
from .kernel_runs import error

__all__ = ["Make", "check", "drawn", "verdict"]

Make = Callable[[Any, Any], Any]


def drawn(family: str, makes: Mapping[Any, Make], count: int, seed: int) -> Iterator[OperationCase]:
    """Random problems of those operations of a family that have a kernel."""
    cases = (draw(family, seed, number) for number in range(count))
    return (case for case in cases if type(case.operation) in makes)


def check(family: str, makes: Mapping[Any, Make], count: int) -> None:
    """Check so many random problems of a family, those that have a kernel: at least a quarter."""
    seed = secrets.randbelow(1 << 32)
    errors = [
        (case, verdict(makes[type(case.operation)], case)) for case in drawn(family, makes, count, seed)
    ]
    for case, found in errors:
        assert found is None or found <= 1, f"seed {seed}: {case}"
    assert sum(found is not None for _, found in errors) > len(errors) // 4, f"seed {seed}"


def verdict(make: Make, case: OperationCase) -> float | None:
    """The largest error in terms of what is allowed; None if the kernel is not for the case.

    Raises `AssertionError` if the results depend on the number of lanes.
    """
    first, *others = (error(case, make, lanes) for lanes in (1, 2, 3))
    if first is None:
        return None
    for other in filter(None, others):
        for name, array in other[1].items():
            np.testing.assert_array_equal(
                array.view(_bits(array)), first[1][name].view(_bits(array)), str(case)
            )
    return first[0]


def _bits(array: np.ndarray) -> str:
    return f"u{array.itemsize}"
