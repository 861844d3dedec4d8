"""Checks kernels on random problems, by the bounds of the operations' rows."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ....gpu.operations.cases import OperationCase
from ....gpu.operations.drawing import draw
from ....whole import some
from .kernel_runs import LANES, error

__all__ = ["Make", "check", "check_any", "drawn"]

Make = Callable[[Any, Any], Any]


def drawn(family: str, makes: Mapping[Any, Make], count: int, seed: int) -> Iterator[OperationCase]:
    """So many random problems of those operations of a family that have a kernel."""
    cases = (draw(family, seed, number) for number in itertools.count())
    return itertools.islice((case for case in cases if type(case.operation) in makes), count)


def check(family: str, makes: Mapping[Any, Make], count: int) -> None:
    """Check some of so many random problems that may have a kernel: more than a quarter of them must.

    Each is computed on several numbers of lanes, with the same result.
    """
    seed = secrets.randbelow(1 << 32)
    errors = [
        (case, error(case, makes[type(case.operation)], LANES))
        for case in drawn(family, makes, some(count), seed)
    ]
    for case, found in errors:
        assert found is None or found <= 1, f"seed {seed}: {case}"
    assert sum(found is not None for _, found in errors) > len(errors) // 4, f"seed {seed}"


def check_any(family: str, make: Make, count: int, *, least: int, allowed: float = 1) -> None:
    """Check some of so many random problems of a family, each on one, two or three lanes.

    Of `count` problems, `least` must have a kernel; of a part of them, half as large a share. `allowed`: the
    largest error, in terms of the bounds.
    """
    seed, ran = secrets.randbelow(1 << 32), 0
    for number in range(some(count)):
        case = draw(family, seed, number)
        found = error(case, make, [1 + number % 3])
        ran += found is not None
        assert found is None or found <= allowed, f"seed {seed}, number {number}: {case}"
    assert ran >= (least if some(count) == count else least * some(count) // (2 * count)), f"seed {seed}"
