"""How far from the truth a result may be: bounds by norm, derived from the number of products in a sum.

A sum of L products in arithmetic of unit roundoff u, in any order, has a relative error of about sqrt(L) * u
where roundings are independent: N. J. Higham, T. Mary, "A new approach to probabilistic rounding error
analysis", SIAM J. Sci. Comput. 41 (2019), and "Sharper probabilistic backward error analysis for basic linear
algebra kernels with random data", ibid. 42 (2020). Tensor cores truncate, so their errors drift where those
would cancel (M. Fasi, N. J. Higham, M. Mikaitis, S. Pranesh, "Numerical behavior of NVIDIA tensor cores",
PeerJ Comput. Sci. 7 (2021)): that is what the factor `_WALK` leaves room for.

With c the convolution's sum and r the result, the error may have a norm of up to

    lip * |alpha| * (4 sqrt(L) u_sum + u_tf32) |c|     the sum; lip is the activation's steepest slope
  + lip * 4 u_pointwise |alpha c| + |beta y| + |b|     where there is anything but the sum
  + 40 u_pointwise (|r| + sqrt(n))                     where there is an activation; n is r's size
  + u_result |r| + tiny sqrt(n)                        r's own rounding; tiny is half its least subnormal
"""

from __future__ import annotations

import math

import numpy as np

from cudnn_actor.protocol import Activation, DType

from .cases import Case
from .oracle import Truth, rounded

__all__ = ["EXACT_SCALARS", "UNIT", "error_over_bound"]

UNIT = {DType.FLOAT64: 2.0**-53, DType.FLOAT32: 2.0**-24, DType.FLOAT16: 2.0**-11, DType.BFLOAT16: 2.0**-8}
"""Unit roundoffs: half the distance from 1 to the next larger number. bfloat16 has 8 bits, so 2**-8."""
_TINY = {DType.FLOAT64: 0.0, DType.FLOAT32: 2.0**-150, DType.FLOAT16: 2.0**-25, DType.BFLOAT16: 2.0**-134}
_TF32 = 2 * 2.0**-10
"""Both operands are cut off to 11 bits: tensor cores ignore the others, and cuDNN need not round before."""
_WALK, _POINTWISE, _FUNCTION = 4.0, 4.0, 40.0
"""The functions of cuDNN's fused kernels were seen to be off by up to 29 units (tanh around 0)."""
EXACT_SCALARS = (1.0, -1.0, 2.0, 0.5)
"""Values of alpha and beta that keep whole numbers exact in float32."""
_EXACT_ACTIVATIONS = (Activation.IDENTITY, Activation.RELU)
_STEEPEST = {
    Activation.SIGMOID: 0.25,
    Activation.GELU: 1.13,
    Activation.GELU_TANH: 1.13,
    Activation.SWISH: 1.1,
}


def error_over_bound(case: Case, got: np.ndarray, truth: Truth) -> float:
    """The error of a result in terms of what is allowed: up to 1 is right; NaN is infinitely wrong."""
    if got.shape != truth.wanted.shape or got.dtype != case.result.dtype.numpy:
        return math.inf
    if _is_exact(case):
        if np.array_equal(got, rounded(truth.wanted, case.result.dtype)):
            return 0.0
        if not case.result.dtype.is_floating:
            return math.inf
        # Engines that go by way of a transform (Winograd's, Fourier's) round where a plain sum would not.
    difference = got.astype(np.float64) - truth.wanted
    if not case.result.dtype.is_floating:
        return _integer_error(case, got, truth)
    if not np.isfinite(difference).all():
        return math.inf
    error, bound = float(np.linalg.norm(difference.ravel())), _bound(case, truth)
    return error / bound if bound else (math.inf if error else 0.0)


def _is_exact(case: Case) -> bool:
    """Whether every sum and product on the way is exact, so that the result is rounded once."""
    if not case.dtype.is_floating:
        return case.plain
    scalars = {abs(case.alpha), abs(case.beta)} <= {0.0, *map(abs, EXACT_SCALARS)}
    return case.whole and scalars and case.epilogue.activation in _EXACT_ACTIVATIONS


def _bound(case: Case, truth: Truth) -> float:
    # Sums of 8-bit integers are exact, and what is done to them is done in float32.
    unit = UNIT.get(case.dtype, 0.0) if case.dtype is DType.FLOAT64 else UNIT[DType.FLOAT32]
    walk = _WALK * math.sqrt(case.length) * unit if case.dtype.is_floating else 0.0
    walk += _TF32 if case.numerics.tf32 and case.dtype is DType.FLOAT32 else 0.0
    slope = _slope(case)
    result, root = _norm(truth.wanted), math.sqrt(truth.wanted.size)
    bound = slope * walk * _norm(truth.convolved)
    if truth.magnitude is not None:
        bound += slope * _POINTWISE * unit * _norm(truth.magnitude)
    if case.epilogue.activation is not Activation.IDENTITY:
        bound += _FUNCTION * unit * (result + root)
    return bound + UNIT[case.result.dtype] * result + _TINY[case.result.dtype] * root


def _integer_error(case: Case, got: np.ndarray, truth: Truth) -> float:
    """Of integers made from float32: each value rounds to one of its neighbours, as float32 sees it.

    The bound is on each element: half, and some float32 roundings of what was added up.
    """
    limits = np.iinfo(case.result.dtype.value)
    magnitude = np.abs(truth.convolved) if truth.magnitude is None else truth.magnitude
    slack = _slope(case) * _FUNCTION * UNIT[DType.FLOAT32] * (magnitude + 1.0)
    error = np.abs(got.astype(np.float64) - np.clip(truth.wanted, limits.min, limits.max))
    return float((error / (0.5 + slack)).max())


def _slope(case: Case) -> float:
    parameter = abs(case.epilogue.effective_parameter or 0.0)
    if case.epilogue.activation in (Activation.LEAKY_RELU, Activation.ELU):
        return max(1.0, parameter)
    return _STEEPEST.get(case.epilogue.activation, 1.0)


def _norm(values: np.ndarray) -> float:
    return float(np.linalg.norm(values.ravel()))
