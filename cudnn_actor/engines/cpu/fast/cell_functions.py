"""The functions of recurrent cells. They overwrite their operand.

They are those of `CellActivation`, rearranged into few calls with one spare array. A recording of the
definition would have more: a choice (`where`) is several calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from cudnn_actor.engines.cpu.fast.lines import Floats
from cudnn_actor.protocol.operations import CellActivation, CellFunction

__all__ = ["apply_function"]

_Mask = npt.NDArray[np.bool_]


def apply_function(activation: CellActivation, x: Floats, spare: Floats, mask: _Mask) -> None:
    """Overwrite x with its function. `spare` and `mask` are scratch arrays with the dims of x."""
    _APPLIED[activation.function](activation, x, spare, mask)


def _affine(of: CellActivation, x: Floats, _spare: Floats, _mask: _Mask) -> None:
    np.multiply(x, of.alpha, x)
    np.add(x, of.beta, x)


def _elu(of: CellActivation, x: Floats, spare: Floats, _mask: _Mask) -> None:
    np.minimum(x, 0, out=spare)
    np.expm1(spare, spare)
    np.multiply(spare, of.alpha, spare)
    np.maximum(x, 0, out=x)
    np.add(x, spare, x)


def _hard_sigmoid(of: CellActivation, x: Floats, spare: Floats, mask: _Mask) -> None:
    _affine(of, x, spare, mask)
    np.maximum(x, 0, out=x)
    np.minimum(x, 1, out=x)


def _leaky_relu(of: CellActivation, x: Floats, spare: Floats, _mask: _Mask) -> None:
    np.minimum(x, 0, out=spare)
    np.multiply(spare, of.alpha, spare)
    np.maximum(x, 0, out=x)
    np.add(x, spare, x)


def _scaled_tanh(of: CellActivation, x: Floats, _spare: Floats, _mask: _Mask) -> None:
    np.multiply(x, of.beta, x)
    np.tanh(x, x)
    np.multiply(x, of.alpha, x)


def _sigmoid(_of: CellActivation, x: Floats, _spare: Floats, _mask: _Mask) -> None:
    np.multiply(x, 0.5, x)
    np.tanh(x, x)
    np.multiply(x, 0.5, x)
    np.add(x, 0.5, x)


def _softsign(_of: CellActivation, x: Floats, spare: Floats, _mask: _Mask) -> None:
    np.absolute(x, spare)
    np.add(spare, 1, spare)
    np.divide(x, spare, x)


def _thresholded_relu(of: CellActivation, x: Floats, _spare: Floats, mask: _Mask) -> None:
    np.greater(x, of.alpha, mask)
    np.logical_not(mask, mask)  # also where x is NaN
    np.copyto(x, 0, where=mask)


_APPLIED: Mapping[CellFunction, Callable[[CellActivation, Any, Any, Any], object]] = {
    CellFunction.AFFINE: _affine,
    CellFunction.ELU: _elu,
    CellFunction.HARD_SIGMOID: _hard_sigmoid,
    CellFunction.LEAKY_RELU: _leaky_relu,
    CellFunction.RELU: lambda _of, x, _spare, _mask: np.maximum(x, 0, out=x),
    CellFunction.SCALED_TANH: _scaled_tanh,
    CellFunction.SIGMOID: _sigmoid,
    CellFunction.SOFTPLUS: lambda _of, x, _spare, _mask: np.logaddexp(x, 0, out=x),
    CellFunction.SOFTSIGN: _softsign,
    CellFunction.TANH: lambda _of, x, _spare, _mask: np.tanh(x, x),
    CellFunction.THRESHOLDED_RELU: _thresholded_relu,
}
