"""Whether two answers to a case are the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

__all__ = ["Difference", "difference"]

_TOLERANCES = {"float64": 1e-6, "float32": 2e-4, "float16": 1e-2, "bfloat16": 6e-2}
"""Relative to the largest number of an output, or to the number itself."""


class Difference(NamedTuple):
    """How an output differs from that of another."""

    output: str
    text: str
    kind: str
    """ "dims", "values", or "infinities" where one of any two elements that differ is infinite or NaN."""
    largest: float = np.inf
    """The largest difference of finite elements."""


def difference(
    mine: Sequence[Any], theirs: Sequence[Any], names: Sequence[str], scale: float = 0.0
) -> Difference | None:
    """The first output that differs; None if all are the same.

    `scale`: of the numbers that were summed, whose rounding errors may be left of a result that is smaller.
    """
    for name, one, other in zip(names, mine, theirs, strict=True):
        if found := _difference(name, np.asarray(one), np.asarray(other), scale):
            return found
    return None


def _difference(name: str, one: np.ndarray, other: np.ndarray, scale: float) -> Difference | None:
    if one.dtype != other.dtype or one.shape != other.shape:
        text = f"{one.dtype} {list(one.shape)}, and theirs is {other.dtype} {list(other.shape)}"
        return Difference(name, f"{name}: {text}", "dims")
    if one.dtype.kind == "V" and one.dtype.name not in _TOLERANCES:  # of less than 16 bits
        one, other = (np.ascontiguousarray(each).view(np.uint8) for each in (one, other))
    near = np.asarray(_near(one, other, scale) if one.dtype.name in _TOLERANCES else one == other)
    if np.all(near):
        return None
    place = tuple(np.argwhere(~near)[0])
    text = f"{int(np.sum(~near))} of {one.size} elements, as {one[place]} for {other[place]}"
    a, b = (
        each[~near].astype(np.float64) if each.dtype.kind not in "OU" else np.zeros(1)
        for each in (one, other)
    )
    both = np.isfinite(a) & np.isfinite(b)
    largest = float(np.max(np.abs(a - b)[both], initial=0.0))
    where = [int(number) for number in place]
    return Difference(name, f"{name}: {text} at {where}", "values" if both.any() else "infinities", largest)


def _near(one: np.ndarray, other: np.ndarray, scale: float) -> Any:
    tolerance = _TOLERANCES[one.dtype.name]
    a, b = one.astype(np.float64), other.astype(np.float64)
    with np.errstate(all="ignore"):
        finite = np.abs(b[np.isfinite(b)])
        scale = max(scale, min(float(finite.max(initial=0.0)), 1e4))
        same = (a == b) | (np.isnan(a) & np.isnan(b))
        close = np.abs(a - b) <= tolerance * (np.abs(b) + scale + 1e-3)
        return same | (close & np.isfinite(a) & np.isfinite(b))
