"""The families of operations that are fuzzed and that the support matrix covers: one way to test them all."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from . import bounds, cases, drawing, oracle, support_matrix
from .operations import ROWS
from .operations import cases as operation_cases
from .operations import drawing as operation_drawing

__all__ = ["CONVOLUTION", "FAMILIES", "Family"]

CONVOLUTION = "convolution"


class Family(NamedTuple):
    """How a family is tested.

    Parameters
    ----------
    draw
        From a seed and a number: a random case.
    cells
        Gives the cells of the support matrix. Each has a name, a case for each seed, and why it is refused.
    run
        From an engine and a case: the values that it gives, and the plan's tag.
    truth
        What is right for a case. It can be pickled.
    error
        From a case, the values and the truth: the error in terms of what is allowed.
    """

    draw: Callable[[int, int], Any]
    cells: Callable[[], tuple[Any, ...]]
    run: Callable[..., Any]
    truth: Callable[[Any], Any]
    error: Callable[[Any, Any, Any], float]


def _of_operations(name: str) -> Family:
    return Family(
        partial(operation_drawing.draw, name),
        partial(operation_drawing.cells, name),
        operation_cases.run,
        operation_cases.truth,
        operation_cases.error_over_bound,
    )


FAMILIES = {
    CONVOLUTION: Family(drawing.draw, support_matrix.cells, cases.run, oracle.truth, bounds.error_over_bound),
    **{name: _of_operations(name) for name in dict.fromkeys(row.family for row in ROWS)},
}
"""By the names of the files that define them."""
