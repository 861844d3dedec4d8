"""Pointwise functions in float64, which write their results to arrays that there are."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import numpy as np

from cudnn_actor.engines.cpu.exact.special import erf, erfc
from cudnn_actor.engines.cpu.scratch import Array
from cudnn_actor.protocol.operations import FUNCTIONS, PointwiseMode

__all__ = ["BINARY", "UNARY", "Unary"]

Unary = Callable[[Array, float, Array], object]
"""Takes the argument, the function's parameter (1 if it has none), and the array of the result, which may be
the argument's."""


_XP = SimpleNamespace(**{**vars(np), "erf": erf, "erfc": erfc})
"""NumPy, and the functions that definitions call and that it lacks."""


def _function_of(mode: PointwiseMode) -> Unary:
    """The function of a mode, by its row of `FUNCTIONS`."""
    formula, parameters = FUNCTIONS[mode].formula, FUNCTIONS[mode].parameters
    assert not isinstance(formula, str), "NumPy's own functions take `out`"

    def apply(x: Array, parameter: float, out: Array) -> None:
        out[...] = formula(_XP, x, parameter) if parameters else formula(_XP, x)

    return apply


UNARY: dict[PointwiseMode, Unary] = {
    PointwiseMode.RELU: lambda x, _, out: np.maximum(x, 0, out=out),
    PointwiseMode.TANH: lambda x, _, out: np.tanh(x, out=out),
    **{
        mode: _function_of(mode)
        for mode in (
            PointwiseMode.LEAKY_RELU,
            PointwiseMode.SIGMOID,
            PointwiseMode.GELU,
            PointwiseMode.GELU_TANH,
            PointwiseMode.SWISH,
            PointwiseMode.ELU,
            PointwiseMode.SOFTPLUS,
        )
    },
}
"""The functions of the modes that are most frequent in fused graphs. RELU's is without slope and bounds."""
BINARY: dict[PointwiseMode, np.ufunc] = {PointwiseMode.ADD: np.add, PointwiseMode.MUL: np.multiply}
