"""The demo's filter bank: classic 3x3 and 5x5 filters, written as cross-correlations."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

__all__ = ["LAPLACIAN", "Filter", "camera_shake", "filter_bank"]


@dataclass(frozen=True, kw_only=True)
class Filter:
    """One filter of the bank.

    Parameters
    ----------
    name
        The filter's name in the picture.
    taps
        The filter's values, square, float32.
    colour
        Whether the filter runs on each of the three colours (a depthwise convolution) or on the luminance.
    bias
        A number that is added to the result.
    """

    name: str
    taps: np.ndarray
    colour: bool = False
    bias: float = 0.0


LAPLACIAN = np.array([[0, -1, 0], [-1, 4, -1], [0, -1, 0]], dtype=np.float32)
"""Second differences. They flatten the spectrum of a photograph, whose low frequencies are much stronger."""

_SOBEL = np.array([[-1, 0, 1], [-2, 0, 2], [-1, 0, 1]], dtype=np.float32)
_EMBOSS = np.array([[-2, -1, 0], [-1, 0, 1], [0, 1, 2]], dtype=np.float32)


def filter_bank() -> tuple[Filter, ...]:
    """The ten filters, in the order of the picture."""
    gabors = [
        Filter(name=f"Gabor {degrees}°", taps=gabor(math.radians(degrees))) for degrees in (0, 45, 90, 135)
    ]
    return (
        Filter(name="Gaussian blur", taps=gaussian(1.5), colour=True),
        Filter(name="sharpen", taps=_identity(3) + LAPLACIAN, colour=True),
        Filter(name="emboss", taps=_EMBOSS, bias=0.5),
        Filter(name="edges: Laplacian", taps=LAPLACIAN),
        Filter(name="edges: Sobel", taps=_SOBEL),
        Filter(name="ridges: LoG", taps=laplacian_of_gaussian(1.0)),
        *gabors,
    )


def gaussian(sigma: float) -> np.ndarray:
    """A 5x5 Gaussian of sum 1; `sigma` in pixels."""
    y, x = _places()
    return _unit_sum(np.exp(-(x**2 + y**2) / (2 * sigma**2)))


def laplacian_of_gaussian(sigma: float) -> np.ndarray:
    """A 5x5 Laplacian of Gaussian, negated: responds to lines and spots. Sum 0."""
    y, x = _places()
    r2 = (x**2 + y**2) / (2 * sigma**2)
    return _zero_sum((1 - r2) * np.exp(-r2))


def gabor(angle: float, wavelength: float = 4.0, sigma: float = 1.6) -> np.ndarray:
    """A 5x5 wave times a Gaussian: responds to stripes across `angle` (radians). Sum 0."""
    y, x = _places()
    along = x * math.cos(angle) + y * math.sin(angle)
    bell = np.exp(-(x**2 + y**2) / (2 * sigma**2))
    return _zero_sum(bell * np.cos(2 * math.pi * along / wavelength))


def camera_shake(rng: np.random.Generator) -> np.ndarray:
    """The 5x5 blur of a shaken camera: the curved path of a point of light, of sum 1."""
    angle, bend = rng.uniform(0, 2 * math.pi), rng.uniform(0.8, 1.6)
    taps = np.zeros((6, 6))  # one more than needed: a point on the last row may spread beyond it
    for t in np.linspace(-1, 1, 201):
        across = bend * math.cos(2.5 * t + angle)
        row = 2 + 1.9 * t * math.sin(angle) + across * math.cos(angle)
        column = 2 + 1.9 * t * math.cos(angle) - across * math.sin(angle)
        _add_point(taps, min(max(row, 0.0), 4.0), min(max(column, 0.0), 4.0))
    return _unit_sum(taps[:5, :5])


def _add_point(taps: np.ndarray, row: float, column: float) -> None:
    top, left = int(row), int(column)
    down, right = row - top, column - left
    taps[top : top + 2, left : left + 2] += np.outer((1 - down, down), (1 - right, right))


def _identity(size: int) -> np.ndarray:
    taps = np.zeros((size, size), dtype=np.float32)
    taps[size // 2, size // 2] = 1
    return taps


def _places() -> tuple[np.ndarray, np.ndarray]:
    y, x = np.mgrid[-2:3, -2:3].astype(np.float64)
    return y, x


def _unit_sum(taps: np.ndarray) -> np.ndarray:
    return np.asarray(taps / taps.sum(), dtype=np.float32)


def _zero_sum(taps: np.ndarray) -> np.ndarray:
    return np.asarray(taps - taps.mean(), dtype=np.float32)
