"""The error function and its complement, which NumPy lacks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np

from cudnn_actor.engines.cpu.scratch import Array

__all__ = ["erf", "erf_by_choice", "erfc", "erfc_by_choice"]

# Rational minimax approximations from W. J. Cody, "Rational Chebyshev approximations for the error
# function", Math. Comp. 23 (1969), 631-637. Highest power first, for Horner's scheme.
_SMALL_P = (
    1.85777706184603153e-1,
    3.16112374387056560e0,
    1.13864154151050156e2,
    3.77485237685302021e2,
    3.20937758913846947e3,
)
_SMALL_Q = (1.0, 2.36012909523441209e1, 2.44024637934444173e2, 1.28261652607737228e3, 2.84423683343917062e3)
_MIDDLE_P = (
    2.15311535474403846e-8,
    5.64188496988670089e-1,
    8.88314979438837594e0,
    6.61191906371416295e1,
    2.98635138197400131e2,
    8.81952221241769090e2,
    1.71204761263407058e3,
    2.05107837782607147e3,
    1.23033935479799725e3,
)
_MIDDLE_Q = (
    1.0,
    1.57449261107098347e1,
    1.17693950891312499e2,
    5.37181101862009858e2,
    1.62138957456669019e3,
    3.29079923573345963e3,
    4.36261909014324716e3,
    3.43936767414372164e3,
    1.23033935480374942e3,
)
_LARGE_P = (
    1.63153871373020978e-2,
    3.05326634961232344e-1,
    3.60344899949804439e-1,
    1.25781726111229246e-1,
    1.60837851487422766e-2,
    6.58749161529837803e-4,
)
_LARGE_Q = (
    1.0,
    2.56852019228982242e0,
    1.87295284992346725e0,
    5.27905102951428412e-1,
    6.05183413124413191e-2,
    2.33520497626869185e-3,
)
_Function = Callable[[Array], Array]
_ONE_OVER_SQRT_PI = 5.6418958354775628695e-1
_SMALL, _MIDDLE = 0.46875, 4.0
"""Magnitudes up to which there is a formula."""
_VANISHES = 27.3
"""erfc is below the smallest float64 from here on."""


def erfc(x: Array) -> Array:
    """1 - erf(x), with a relative error of a few 1e-16 in either tail; a new array.

    Both tails matter: GELU is x * erfc(-x / sqrt(2)) / 2, and 1 + erf would cancel for negative x.
    """
    magnitude = np.abs(x)
    result = np.full(x.shape, np.nan)
    small, large = magnitude <= _SMALL, magnitude > _MIDDLE
    middle = ~(small | large | np.isnan(x))
    result[small] = 1 - _near_zero(x[small])
    result[middle] = _tail(magnitude[middle], _middle)
    result[large] = _tail(np.minimum(magnitude[large], _VANISHES), _large)
    # erfc(-x) = 2 - erfc(x)
    np.subtract(2, result, out=result, where=~small & (x < 0))
    return result


def erf(x: Array) -> Array:
    """The error function, with a relative error of a few 1e-16; a new array."""
    return cast("Array", _erf_by(erfc, x))


def erfc_by_choice(x: Any) -> Any:
    """The same bits as `erfc`, without selecting elements: each formula is computed for all elements.

    So the calls do not depend on elements.
    """
    magnitude = np.abs(x)
    small = magnitude <= _SMALL
    outer = _tail(np.minimum(magnitude, _VANISHES), _large)
    result = np.where(magnitude > _MIDDLE, outer, _tail(magnitude, _middle))
    result = np.where(x < 0, 2 - result, result)
    return np.where(small, 1 - _near_zero(x), result)


def erf_by_choice(x: Any) -> Any:
    """The same bits as `erf`, computed like `erfc_by_choice`."""
    return _erf_by(erfc_by_choice, x)


def _erf_by(complement: Callable[[Any], Any], x: Any) -> Any:
    """The error function, by its own formula near zero, else by its complement."""
    small = np.abs(x) <= _SMALL
    return np.where(small, _near_zero(np.where(small, x, 0)), 1 - complement(x))


def _near_zero(x: Array) -> Array:
    square = x * x
    return x * (_horner(_SMALL_P, square) / _horner(_SMALL_Q, square))


def _tail(x: Array, scaled: _Function) -> Array:
    """exp(-x²) times `scaled`, with x² split so that rounding a large exponent costs no accuracy."""
    coarse = np.floor(x * 16) / 16
    rest = (x - coarse) * (x + coarse)
    return cast("Array", np.exp(-coarse * coarse) * np.exp(-rest) * scaled(x))


def _middle(x: Array) -> Array:
    return _horner(_MIDDLE_P, x) / _horner(_MIDDLE_Q, x)


def _large(x: Array) -> Array:
    inverse = 1 / (x * x)
    series = inverse * _horner(_LARGE_P, inverse) / _horner(_LARGE_Q, inverse)
    return (_ONE_OVER_SQRT_PI - series) / x


def _horner(coefficients: tuple[float, ...], x: Array) -> Array:
    result = x * coefficients[0] + coefficients[1]
    for coefficient in coefficients[2:]:
        result *= x
        result += coefficient
    return result
