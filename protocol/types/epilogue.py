"""The epilogue of a convolution: what is applied to its result before it is stored."""

from __future__ import annotations

import enum
from typing import ClassVar

from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.types.checks import did_you_mean, is_finite
from cudnn_actor.protocol.types.records import Parameters

__all__ = ["DEFAULTS", "Activation", "Epilogue"]


class Activation(enum.StrEnum):
    """A pointwise function, applied last. In the formulas, x is the value and p the parameter."""

    IDENTITY = "identity"
    RELU = "relu"
    """max(x, 0)"""
    LEAKY_RELU = "leaky_relu"
    """x where x > 0, else p * x; p = 0.01 unless given"""
    SIGMOID = "sigmoid"
    """1 / (1 + exp(-x))"""
    TANH = "tanh"
    GELU = "gelu"
    """x * (1 + erf(x / sqrt(2))) / 2"""
    GELU_TANH = "gelu_tanh"
    """x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3))) / 2"""
    SWISH = "swish"
    """x / (1 + exp(-p * x)); p = 1 unless given"""
    ELU = "elu"
    """x where x > 0, else p * (exp(x) - 1); p = 1 unless given"""
    SOFTPLUS = "softplus"
    """log(1 + exp(p * x)) / p; p = 1 unless given"""


DEFAULTS = {
    Activation.LEAKY_RELU: 0.01,
    Activation.SWISH: 1.0,
    Activation.ELU: 1.0,
    Activation.SOFTPLUS: 1.0,
}
"""The parameters of the activations that have one, unless they are given."""


class Epilogue(Parameters):
    """The function of alpha * conv(x, w) + beta * y + bias that is stored.

    Parameters
    ----------
    activation
        The pointwise function; identity for none.
    parameter
        Slope, alpha or beta of an activation that has one (see `Activation`); None for its default.

    Raises
    ------
    InvalidRequest
        The activation is unknown, or has no parameter and one was given, or the parameter is not finite (or,
        for softplus, not positive).
    """

    example: ClassVar[str] = "Epilogue(activation=Activation.RELU)"
    activation: Activation = Activation.IDENTITY
    parameter: float | None = None

    def __post_init__(self) -> None:
        if self.activation not in Activation.__members__.values():
            raise InvalidRequest(
                field="activation",
                value=self.activation,
                problem="is not an activation",
                fix=f"{did_you_mean(self.activation, Activation)}use one of {', '.join(Activation)}",
            )
        if self.parameter is None:
            return
        if self.activation not in DEFAULTS:
            raise InvalidRequest(
                field="parameter",
                value=self.parameter,
                problem=f"is given, but {self.activation} has no parameter",
                fix="leave it out",
            )
        if not is_finite(self.parameter) or (self.activation == Activation.SOFTPLUS and self.parameter <= 0):
            raise InvalidRequest(
                field="parameter",
                value=self.parameter,
                problem="must be a finite number, and > 0 for softplus",
                fix="leave it out for the default",
            )

    @property
    def effective_parameter(self) -> float | None:
        """The parameter in effect: the given one, the activation's default, or None."""
        if self.parameter is None:
            return DEFAULTS.get(self.activation)
        return float(self.parameter) + 0.0  # -0.0 becomes 0.0: equal epilogues mean the same
