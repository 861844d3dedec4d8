"""Outputs in short, as they are recorded: some of their elements, and their sums."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np

__all__ = ["Expected", "difference", "expected", "sampled", "sums"]

_MOST = 512


class Expected(NamedTuple):
    """An output that was recorded."""

    elements: np.ndarray
    sums: np.ndarray


def sampled(array: np.ndarray) -> np.ndarray:
    """At most 512 elements, evenly spaced. The step is odd, so that they are not all of one column."""
    flat = array.reshape(-1)
    return flat[:: (-(-flat.size // _MOST)) | 1].astype(np.float32)


def sums(array: np.ndarray) -> np.ndarray:
    """The sum of all elements, and that of their absolute values."""
    return np.array([array.sum(dtype=np.float64), np.abs(array).sum(dtype=np.float64)])


def expected(path: Path, batch: int) -> dict[str, Expected]:
    """The outputs by name that are recorded for a network's file."""
    with np.load(path.with_name(f"{path.name.partition('.')[0]}.npz")) as recorded:
        names = [key.split("/")[1] for key in recorded if key.startswith(f"{batch}/") and key.count("/") == 1]
        return {
            name: Expected(recorded[f"{batch}/{name}"], recorded[f"{batch}/{name}/sums"]) for name in names
        }


def difference(array: np.ndarray, wanted: Expected) -> float:
    """The relative error of the elements, by their norms, or that of the sums if it is larger.

    An error of a sum is relative to the sum of absolute values.
    """
    found = sampled(array)
    assert found.shape == wanted.elements.shape, "the output has other dims"
    elements = np.linalg.norm(found - wanted.elements) / np.linalg.norm(wanted.elements)
    return float(max(elements, np.abs(sums(array) - wanted.sums).max() / wanted.sums[1]))
