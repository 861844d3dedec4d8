"""Values with bounds of how far off they are, which are followed through what is computed of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cudnn_actor.protocol.operations.base import Array

from .rows import walk

__all__ = ["Off", "doubled", "sum_error"]

_MOST = 1e30
"""How far a product is said to be off at most, in terms of u. Beyond, bounds that feed on themselves would
become infinite, and 0 times that is no number."""


def sum_error(terms: int) -> float:
    """The error of a sum, also of one of equal terms, whose roundings do not cancel."""
    return max(walk(terms), terms / 2)


@dataclass(frozen=True)
class Off:
    """A value, and how far off it may be, in terms of u."""

    value: Array
    off: Array

    @classmethod
    def exact(cls, value: Array) -> Off:
        return cls(value, np.zeros(np.shape(value)))

    def __add__(self, other: Off) -> Off:
        return Off(self.value + other.value, self.off + other.off + np.abs(self.value) + np.abs(other.value))

    def __mul__(self, other: Off) -> Off:
        a, b = np.abs(self.value), np.abs(other.value)
        product = self.value * other.value
        off = a * other.off + b * self.off + 1e-7 * self.off * other.off + 2 * np.abs(product)
        return Off(product, np.minimum(off, _MOST))

    def __matmul__(self, weights: Array) -> Off:
        """Times exact weights."""
        a, b = np.abs(self.value), np.abs(weights)
        terms = weights.shape[-2]
        return Off(self.value @ weights, (self.off + (sum_error(terms) + 2) * a) @ b)

    def stored(self, more: float, least: float = 2.0**-14) -> Off:
        """Rounded once more, by `more` u of itself, or of `least` where that is more: by default of float16's
        smallest normal number."""
        return Off(self.value, self.off + more * np.maximum(np.abs(self.value), least))

    def complement(self) -> Off:
        """1 less it."""
        return Off(1 - self.value, self.off + 1 + np.abs(self.value))

    def sigmoid(self) -> Off:
        with np.errstate(over="ignore"):
            return Off(1 / (1 + np.exp(-self.value)), np.minimum(self.off / 4, 1e9) + 4)

    def tanh(self) -> Off:
        return Off(np.tanh(self.value), np.minimum(self.off, 1e9) + 4)

    def where(self, mask: Array, other: Off) -> Off:
        return Off(np.where(mask, self.value, other.value), np.where(mask, self.off, other.off))

    def part(self, count: int, number: int) -> Off:
        """One of the gates that lie beside each other."""
        return Off(*(np.split(each, count, axis=-1)[number] for each in (self.value, self.off)))

    def at(self, time: int) -> Off:
        """What it is at a step."""
        return Off(self.value[time], self.off[time])

    def along(self, axis: int) -> list[Off]:
        """The parts along an axis."""
        return [*map(Off, np.moveaxis(self.value, axis, 0), np.moveaxis(self.off, axis, 0))]


def doubled(off: Array) -> Array:
    """Twice as much, and what roundings below the smallest normal number of float32 add up to."""
    return np.where(off > 0, 2 * off + 1e-36, 0)
