"""The functions of a `GraphBuilder` of elements, and reductions: by NumPy's names where NumPy has them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.graphs.expressions import Axes, Tensor
from cudnn_actor.protocol.graphs.graph_recorder import Recorder, as_called
from cudnn_actor.protocol.graphs.number_ranges import exact_bounds
from cudnn_actor.protocol.operations import (
    ArgReduction,
    Cumulative,
    PointwiseMode,
    Reduction,
    ReductionMode,
    Reshape,
)
from cudnn_actor.protocol.types.checks import as_index
from cudnn_actor.protocol.types.dtypes import DType, DTypeLike

__all__ = ["Functions"]

_M = PointwiseMode


def _one(mode: PointwiseMode, text: str) -> Callable[[Functions, Any], Tensor]:
    """A function of one tensor."""

    def function(self: Functions, x: Any) -> Tensor:
        return self._of_elements(mode, x=x)

    function.__doc__ = text
    return function


def _two(mode: PointwiseMode, text: str) -> Callable[[Functions, Any, Any], Tensor]:
    """A function of two operands, tensors or numbers, with NumPy's broadcasting."""

    def function(self: Functions, a: Any, b: Any) -> Tensor:
        return self._of_elements(mode, a=a, b=b)

    function.__doc__ = text
    return function


def _places_of(operands: Mapping[str, Any]) -> dict[str, str]:
    return {f"operands[{number}]": name for number, name in enumerate(operands)}


class Functions(Recorder):
    """Each adds operations to the graph, and raises `InvalidRequest` if its operands do not fit together. The
    formulas are those of `PointwiseMode`."""

    def _of_elements(self, mode: PointwiseMode, **operands: Any) -> Tensor:
        """A function of operands that are the caller's arguments of these names."""
        try:
            return self.pointwise(mode, *operands.values())
        except InvalidRequest as error:
            raise as_called(error, _places_of(operands)) from None

    # Of one operand.

    abs = _one(_M.ABS, "The magnitude.")
    negative = _one(_M.NEG, "-x.")
    sign = _one(_M.SIGN, "-1, 0 or 1.")
    square = _one(_M.SQUARE, "x * x.")
    sqrt = _one(_M.SQRT, "The square root.")
    rsqrt = _one(_M.RSQRT, "1 / sqrt(x).")
    reciprocal = _one(_M.RECIPROCAL, "1 / x.")
    exp = _one(_M.EXP, "e to the power x.")
    expm1 = _one(_M.EXPM1, "exp(x) - 1, exact near 0.")
    log = _one(_M.LOG, "The natural logarithm.")
    log1p = _one(_M.LOG1P, "log(1 + x), exact near 0.")
    sin = _one(_M.SIN, "The sine.")
    cos = _one(_M.COS, "The cosine.")
    tan = _one(_M.TAN, "The tangent.")
    arcsin = _one(_M.ASIN, "The inverse sine.")
    arccos = _one(_M.ACOS, "The inverse cosine.")
    arctan = _one(_M.ATAN, "The inverse tangent.")
    sinh = _one(_M.SINH, "The hyperbolic sine.")
    cosh = _one(_M.COSH, "The hyperbolic cosine.")
    tanh = _one(_M.TANH, "The hyperbolic tangent.")
    arcsinh = _one(_M.ASINH, "The inverse hyperbolic sine.")
    arccosh = _one(_M.ACOSH, "The inverse hyperbolic cosine.")
    arctanh = _one(_M.ATANH, "The inverse hyperbolic tangent.")
    erf = _one(_M.ERF, "The error function.")
    ceil = _one(_M.CEIL, "The least whole number that is not below x.")
    floor = _one(_M.FLOOR, "The largest whole number that is not above x.")
    round = _one(_M.ROUND, "The nearest whole number; of two, the even one.")
    trunc = _one(_M.TRUNC, "x without its fraction.")
    sigmoid = _one(_M.SIGMOID, "1 / (1 + exp(-x)).")
    selu = _one(_M.SELU, "The scaled exponential linear unit.")
    softsign = _one(_M.SOFTSIGN, "x / (1 + abs(x)).")
    mish = _one(_M.MISH, "x * tanh(log(1 + exp(x))).")
    hard_swish = _one(_M.HARD_SWISH, "x * min(max(x / 6 + 1 / 2, 0), 1).")
    isnan = _one(_M.IS_NAN, "Whether x is NaN.")
    isinf = _one(_M.IS_INF, "Whether x is infinite.")
    logical_not = _one(_M.LOGICAL_NOT, "Whether x is 0.")
    bitwise_not = _one(_M.BITWISE_NOT, "Every bit of an integer inverted.")

    # Of two.

    add = _two(_M.ADD, "a + b.")
    subtract = _two(_M.SUB, "a - b.")
    multiply = _two(_M.MUL, "a * b.")
    divide = _two(_M.DIV, "a / b.")
    mod = _two(_M.MOD, "a - b * floor(a / b).")
    fmod = _two(_M.FMOD, "a - b * trunc(a / b).")
    power = _two(_M.POW, "a to the power b.")
    maximum = _two(_M.MAX, "The larger one; NaN if one is NaN.")
    minimum = _two(_M.MIN, "The smaller one; NaN if one is NaN.")
    prelu = _two(_M.PRELU, "a where a ≥ 0, else b * a.")
    equal = _two(_M.EQ, "Whether a == b.")
    not_equal = _two(_M.NE, "Whether a != b.")
    less = _two(_M.LT, "Whether a < b.")
    less_equal = _two(_M.LE, "Whether a <= b.")
    greater = _two(_M.GT, "Whether a > b.")
    greater_equal = _two(_M.GE, "Whether a >= b.")
    logical_and = _two(_M.LOGICAL_AND, "Whether both are true.")
    logical_or = _two(_M.LOGICAL_OR, "Whether one of them is true.")
    logical_xor = _two(_M.LOGICAL_XOR, "Whether exactly one of them is true.")
    bitwise_and = _two(_M.BITWISE_AND, "The bits that are set in both.")
    bitwise_or = _two(_M.BITWISE_OR, "The bits that are set in one of them.")
    bitwise_xor = _two(_M.BITWISE_XOR, "The bits that are set in exactly one of them.")
    left_shift = _two(_M.SHIFT_LEFT, "The bits of a, moved b places up.")
    right_shift = _two(_M.SHIFT_RIGHT, "The bits of a, moved b places down.")

    def where(self, condition: Any, a: Any, b: Any) -> Tensor:
        """a where the condition is true or not 0, else b."""
        if isinstance(condition, Tensor) and condition.dtype.is_floating:
            condition = self._of_elements(_M.NE, condition=condition, zero=0.0)  # not of the result's dtype
        return self._of_elements(_M.SELECT, condition=condition, a=a, b=b)

    def clip(self, x: Any, lower: float | None = None, upper: float | None = None) -> Tensor:
        """min(max(x, lower), upper); a bound of None is none."""
        bounds = exact_bounds(lower, upper, x.dtype) if isinstance(x, Tensor) else None
        if bounds is not None:
            least, most = bounds
            x = x if least is None else self.maximum(x, least)
            return x if most is None else self.minimum(x, most)
        return self._with_parameters(_M.CLIP, x, lower=lower, upper=upper)

    # Activations with a parameter; None for the default.

    def _with_parameters(
        self,
        mode: PointwiseMode,
        x: Any,
        lower: float | None = None,
        upper: float | None = None,
        **parameter: float | None,
    ) -> Tensor:
        """A function of x with bounds, and with a parameter that is the caller's argument of that name."""
        ((name, value),) = parameter.items() or [("parameter", None)]
        try:
            return self.pointwise(mode, x, parameter=value, lower=lower, upper=upper)
        except InvalidRequest as error:
            raise as_called(error, {"operands[0]": "x", "parameter": name}) from None

    def relu(
        self, x: Any, *, slope: float | None = None, lower: float | None = None, upper: float | None = None
    ) -> Tensor:
        """x where x > lower, else lower + slope * (x - lower); at most `upper`. Else max(x, 0)."""
        return self._with_parameters(_M.RELU, x, lower, upper, slope=slope)

    def leaky_relu(self, x: Any, slope: float | None = None) -> Tensor:
        """x where x > 0, else slope * x; 0.01 * x by default."""
        return self._with_parameters(_M.LEAKY_RELU, x, slope=slope)

    def elu(self, x: Any, alpha: float | None = None) -> Tensor:
        """x where x > 0, else alpha * (exp(x) - 1)."""
        return self._with_parameters(_M.ELU, x, alpha=alpha)

    def celu(self, x: Any, alpha: float | None = None) -> Tensor:
        """x where x > 0, else alpha * (exp(x / alpha) - 1)."""
        return self._with_parameters(_M.CELU, x, alpha=alpha)

    def gelu(self, x: Any, *, approximate: bool = False) -> Tensor:
        """x times the normal distribution's function; `approximate` by a hyperbolic tangent."""
        if not isinstance(approximate, bool):
            raise InvalidRequest(
                field="approximate",
                value=approximate,
                problem="is not a bool",
                fix="pass True for the formula with tanh, or False for the exact one",
            )
        return self._of_elements(_M.GELU_TANH if approximate else _M.GELU, x=x)

    def softplus(self, x: Any, beta: float | None = None) -> Tensor:
        """log(1 + exp(beta * x)) / beta."""
        return self._with_parameters(_M.SOFTPLUS, x, beta=beta)

    def swish(self, x: Any, beta: float | None = None) -> Tensor:
        """x / (1 + exp(-beta * x)); with beta 1 also called silu."""
        return self._with_parameters(_M.SWISH, x, beta=beta)

    def hard_sigmoid(self, x: Any, alpha: float | None = None) -> Tensor:
        """min(max(alpha * x + 1 / 2, 0), 1), with alpha 1 / 6 by default."""
        return self._with_parameters(_M.HARD_SIGMOID, x, alpha=alpha)

    # Reductions.

    def sum(
        self,
        x: Tensor,
        axis: Axes = None,
        *,
        keepdims: bool = False,
        compute_dtype: DTypeLike | None = None,
    ) -> Tensor:
        """The sum of the elements along these dims.

        `compute_dtype`: as in `reduce`.
        """
        return self.reduce(ReductionMode.SUM, x, axis, keepdims=keepdims, compute_dtype=compute_dtype)

    def prod(
        self,
        x: Tensor,
        axis: Axes = None,
        *,
        keepdims: bool = False,
        compute_dtype: DTypeLike | None = None,
    ) -> Tensor:
        """The product of the elements along these dims.

        `compute_dtype`: as in `reduce`.
        """
        return self.reduce(ReductionMode.PRODUCT, x, axis, keepdims=keepdims, compute_dtype=compute_dtype)

    def mean(
        self,
        x: Tensor,
        axis: Axes = None,
        *,
        keepdims: bool = False,
        compute_dtype: DTypeLike | None = None,
    ) -> Tensor:
        """The mean of the elements along these dims, which must be floats.

        `compute_dtype`: as in `reduce`.
        """
        return self.reduce(ReductionMode.MEAN, x, axis, keepdims=keepdims, compute_dtype=compute_dtype)

    def max(self, x: Tensor, axis: Axes = None, *, keepdims: bool = False) -> Tensor:
        """The largest element along these dims; NaN if there is one."""
        return self.reduce(ReductionMode.MAX, x, axis, keepdims=keepdims)

    def min(self, x: Tensor, axis: Axes = None, *, keepdims: bool = False) -> Tensor:
        """The smallest element along these dims; NaN if there is one."""
        return self.reduce(ReductionMode.MIN, x, axis, keepdims=keepdims)

    def all(self, x: Tensor, axis: Axes = None, *, keepdims: bool = False) -> Tensor:
        """Whether all elements along these dims are true, or not 0: bool. True of no elements."""
        return self.min(self._truth(x), axis, keepdims=keepdims)

    def any(self, x: Tensor, axis: Axes = None, *, keepdims: bool = False) -> Tensor:
        """Whether any element along these dims is true, or not 0: bool. False of no elements."""
        return self.max(self._truth(x), axis, keepdims=keepdims)

    def _truth(self, x: Tensor) -> Tensor:
        self._own("x", x)
        return x if x.dtype is DType.BOOL else self.pointwise(_M.NE, x, 0)

    def logsumexp(
        self,
        x: Tensor,
        axis: Axes = None,
        *,
        keepdims: bool = False,
        compute_dtype: DTypeLike | None = None,
    ) -> Tensor:
        """The logarithm of the sum of exponentials along these dims, none of which overflows.

        `compute_dtype`: as in `reduce`.
        """
        return self.reduce(ReductionMode.LOG_SUM_EXP, x, axis, keepdims=keepdims, compute_dtype=compute_dtype)

    def reduce(
        self,
        mode: ReductionMode,
        x: Tensor,
        axis: Axes = None,
        *,
        keepdims: bool = False,
        compute_dtype: DTypeLike | None = None,
    ) -> Tensor:
        """Any other reduction along these dims: see `ReductionMode`.

        `compute_dtype`: the type that floats are summed up in, as in `pointwise`: "float64" of float32 and
        half types. The result has the dtype that it has without.
        """
        if compute_dtype is not None:
            made: Tensor = self._computed_in(
                compute_dtype, {"x": x}, lambda of: self.reduce(mode, of["x"], axis, keepdims=keepdims)
            )
            return made
        axes = axis if isinstance(axis, Sequence) else (axis,)
        try:
            kept = None if axis is None else tuple(map(as_index, axes))
        except TypeError:
            raise InvalidRequest(
                field="axis",
                value=axis,
                problem="has the wrong type",
                fix="pass a whole number, a tuple of them, or None",
            ) from None
        reduction = Reduction(x=x, mode=mode, axes=kept, keep_dims=keepdims)
        return self._result(reduction, axes="axis", keep_dims="keepdims")

    def argmax(self, x: Tensor, axis: int | None = None, *, keepdims: bool = False) -> Tensor:
        """The place of the largest element along a dim, int64; the first of equal ones.

        Without an axis, that of x reshaped to one dim.
        """
        return self._place(ReductionMode.MAX, x, axis, keepdims)

    def argmin(self, x: Tensor, axis: int | None = None, *, keepdims: bool = False) -> Tensor:
        """The place of the smallest element along a dim, int64; the first of equal ones. As `argmax`."""
        return self._place(ReductionMode.MIN, x, axis, keepdims)

    def _place(self, mode: ReductionMode, x: Tensor, axis: int | None, keepdims: bool) -> Tensor:
        if axis is None:
            place = self._place(mode, self._flat(x), 0, keepdims=False)
            return self._result(Reshape(x=place, dims=(1,) * x.rank)) if keepdims else place
        found = ArgReduction(x=x, mode=mode, axis=axis, keep_dims=keepdims)
        return self._result(found, keep_dims="keepdims")

    def cumsum(
        self, x: Tensor, axis: int | None = None, *, exclusive: bool = False, reverse: bool = False
    ) -> Tensor:
        """The sum of all elements up to each along a dim: see `Cumulative`.

        Without an axis, of x reshaped to one dim.
        """
        return self._running(ReductionMode.SUM, x, axis, exclusive, reverse)

    def cumprod(
        self, x: Tensor, axis: int | None = None, *, exclusive: bool = False, reverse: bool = False
    ) -> Tensor:
        """The product of all elements up to each along a dim: see `Cumulative`.

        Without an axis, of x reshaped to one dim.
        """
        return self._running(ReductionMode.PRODUCT, x, axis, exclusive, reverse)

    def _running(
        self, mode: ReductionMode, x: Tensor, axis: int | None, exclusive: bool, reverse: bool
    ) -> Tensor:
        if axis is None:
            x, axis = self._flat(x), 0
        return self._result(Cumulative(x=x, mode=mode, axis=axis, exclusive=exclusive, reverse=reverse))

    def _flat(self, x: Tensor) -> Tensor:
        """x as one dim."""
        self._own("x", x)
        return x if x.rank == 1 else self._result(Reshape(x=x, dims=(math.prod(x.dims),)))
