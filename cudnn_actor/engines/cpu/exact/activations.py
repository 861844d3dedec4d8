"""Pointwise functions in float64, stable for arguments of any size.

Each reads its operands and writes `out`, which may be one of the operands. The formulas are those of
`cudnn_actor.protocol.types.epilogue.Activation`, rearranged where they would overflow or lose digits.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from cudnn_actor.engines.cpu.exact.special import erfc
from cudnn_actor.engines.cpu.scratch import Array
from cudnn_actor.protocol.operations import PointwiseMode

__all__ = ["BINARY", "UNARY", "Unary"]

Unary = Callable[[Array, float, Array], None]
"""Takes the argument, the activation's parameter (1 if it has none) and the output array."""


def _relu(x: Array, _parameter: float, out: Array) -> None:
    np.maximum(x, 0, out=out)


def _leaky_relu(x: Array, parameter: float, out: Array) -> None:
    out[...] = np.where(x > 0, x, parameter * x)


def _sigmoid(x: Array, _parameter: float, out: Array) -> None:
    decay = np.exp(-np.abs(x))
    np.divide(np.where(x >= 0, 1, decay), 1 + decay, out=out)


def _tanh(x: Array, _parameter: float, out: Array) -> None:
    np.tanh(x, out=out)


def _gelu(x: Array, _parameter: float, out: Array) -> None:
    out[...] = x * (erfc(x * -math.sqrt(0.5)) / 2)


def _gelu_tanh(x: Array, _parameter: float, out: Array) -> None:
    # (1 + tanh(z)) / 2 is sigmoid(2 z), which does not cancel for negative z.
    weight = np.empty_like(x)
    _sigmoid(math.sqrt(8 / math.pi) * (x + 0.044715 * x**3), 1, weight)
    np.multiply(x, weight, out=out)


def _swish(x: Array, parameter: float, out: Array) -> None:
    weight = np.empty_like(x)
    _sigmoid(parameter * x, 1, weight)
    np.multiply(x, weight, out=out)


def _elu(x: Array, parameter: float, out: Array) -> None:
    # Of -0, np.minimum(x, 0) may be 0.
    out[...] = np.where(x > 0, x, parameter * np.expm1(np.where(x > 0, 0, x)))


def _softplus(x: Array, parameter: float, out: Array) -> None:
    scaled = parameter * x
    np.divide(np.maximum(scaled, 0) + np.log1p(np.exp(-np.abs(scaled))), parameter, out=out)


UNARY: dict[PointwiseMode, Unary] = {
    PointwiseMode.RELU: _relu,
    PointwiseMode.LEAKY_RELU: _leaky_relu,
    PointwiseMode.SIGMOID: _sigmoid,
    PointwiseMode.TANH: _tanh,
    PointwiseMode.GELU: _gelu,
    PointwiseMode.GELU_TANH: _gelu_tanh,
    PointwiseMode.SWISH: _swish,
    PointwiseMode.ELU: _elu,
    PointwiseMode.SOFTPLUS: _softplus,
}
BINARY: dict[PointwiseMode, np.ufunc] = {PointwiseMode.ADD: np.add, PointwiseMode.MUL: np.multiply}
