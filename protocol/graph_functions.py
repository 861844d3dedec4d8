"""The functions of a `GraphBuilder`: by NumPy's names where NumPy has them, else by the field's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from cudnn_actor.protocol.checks import is_whole
from cudnn_actor.protocol.dtypes import DType, DTypeLike
from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.operations import (
    AdaptiveWindow,
    ArgReduction,
    Attention,
    AvgPool,
    BatchNorm,
    BatchNormTraining,
    Cumulative,
    Gather,
    GatherElements,
    GatherND,
    GroupedMatMul,
    GroupNorm,
    InstanceNorm,
    LayerNorm,
    LocalResponseNorm,
    LpPool,
    MatMul,
    MaxPool,
    Operation,
    PointwiseMode,
    RandomBernoulli,
    RandomIntegers,
    Randomness,
    RandomNormal,
    RandomUniform,
    Reduction,
    ReductionMode,
    RMSNorm,
    Scatter,
    ScatterElements,
    ScatterND,
    ScatterReduction,
    Softmax,
    TopK,
    Window,
)
from cudnn_actor.protocol.operations.attention import alibi_slopes
from cudnn_actor.protocol.operations.base import axis_of
from cudnn_actor.protocol.spatial import spread
from cudnn_actor.protocol.tensor import TensorSpec

if TYPE_CHECKING:
    from cudnn_actor.protocol.graph_builder import Tensor

__all__ = ["Functions"]

Axes = int | Sequence[int] | None
"""One dim, several, or None for all."""
_M = PointwiseMode


def _one(mode: PointwiseMode, text: str) -> Callable[[Functions, Any], Tensor]:
    """A function of one tensor."""

    def function(self: Functions, x: Any) -> Tensor:
        return self.pointwise(mode, x)

    function.__doc__ = text
    return function


def _two(mode: PointwiseMode, text: str) -> Callable[[Functions, Any, Any], Tensor]:
    """A function of two operands, tensors or numbers, with NumPy's broadcasting."""

    def function(self: Functions, a: Any, b: Any) -> Tensor:
        return self.pointwise(mode, a, b)

    function.__doc__ = text
    return function


class Functions:
    """What a `GraphBuilder` computes with. Each adds operations to the graph, and raises `InvalidRequest`
    if its operands do not fit together. The formulas are those of `PointwiseMode`."""

    def apply(self, operation: Operation[Any], *, also: Sequence[str] = ()) -> Any:
        """See `GraphBuilder.apply`."""
        raise NotImplementedError

    def pointwise(self, mode: str, *operands: Any, **parameters: float | None) -> Tensor:
        """See `GraphBuilder.pointwise`."""
        raise NotImplementedError

    def broadcast_to(self, x: Tensor, dims: Sequence[int]) -> Tensor:
        """See `GraphBuilder.broadcast_to`."""
        raise NotImplementedError

    def _result(self, operation: Operation[Any]) -> Tensor:
        """The result of an operation that has one."""
        made: Tensor = self.apply(operation)
        return made

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
    prelu = _two(_M.PRELU, "a where a > 0, else b * a.")
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
        """a where the condition is true, else b."""
        return self.pointwise(_M.SELECT, condition, a, b)

    def clip(self, x: Any, lower: float | None = None, upper: float | None = None) -> Tensor:
        """min(max(x, lower), upper); a bound of None is none."""
        return self.pointwise(_M.CLIP, x, lower=lower, upper=upper)

    # Activations with a parameter; None for the default.

    def relu(
        self, x: Any, *, slope: float | None = None, lower: float | None = None, upper: float | None = None
    ) -> Tensor:
        """x where x > lower, else lower + slope * (x - lower); at most `upper`. Else max(x, 0)."""
        return self.pointwise(_M.RELU, x, parameter=slope, lower=lower, upper=upper)

    def leaky_relu(self, x: Any, slope: float | None = None) -> Tensor:
        """x where x > 0, else slope * x; 0.01 * x by default."""
        return self.pointwise(_M.LEAKY_RELU, x, parameter=slope)

    def elu(self, x: Any, alpha: float | None = None) -> Tensor:
        """x where x > 0, else alpha * (exp(x) - 1)."""
        return self.pointwise(_M.ELU, x, parameter=alpha)

    def celu(self, x: Any, alpha: float | None = None) -> Tensor:
        """x where x > 0, else alpha * (exp(x / alpha) - 1)."""
        return self.pointwise(_M.CELU, x, parameter=alpha)

    def gelu(self, x: Any, *, approximate: bool = False) -> Tensor:
        """x times the normal distribution's function; `approximate` by a hyperbolic tangent."""
        return self.pointwise(_M.GELU_TANH if approximate else _M.GELU, x)

    def softplus(self, x: Any, beta: float | None = None) -> Tensor:
        """log(1 + exp(beta * x)) / beta."""
        return self.pointwise(_M.SOFTPLUS, x, parameter=beta)

    def swish(self, x: Any, beta: float | None = None) -> Tensor:
        """x / (1 + exp(-beta * x)); with beta 1 also called silu."""
        return self.pointwise(_M.SWISH, x, parameter=beta)

    def hard_sigmoid(self, x: Any, alpha: float | None = None) -> Tensor:
        """min(max(alpha * x + 1 / 2, 0), 1), with alpha 1 / 6 by default."""
        return self.pointwise(_M.HARD_SIGMOID, x, parameter=alpha)

    # Reductions.

    def _reduced(self, mode: ReductionMode, x: Tensor, axis: Axes, keepdims: bool) -> Tensor:
        axes = None if axis is None else (axis,) if isinstance(axis, int) else tuple(axis)
        return self._result(Reduction(x=x, mode=mode, axes=axes, keep_dims=keepdims))

    def sum(self, x: Tensor, axis: Axes = None, *, keepdims: bool = False) -> Tensor:
        """The sum of the elements along these dims."""
        return self._reduced(ReductionMode.SUM, x, axis, keepdims)

    def prod(self, x: Tensor, axis: Axes = None, *, keepdims: bool = False) -> Tensor:
        """The product of the elements along these dims."""
        return self._reduced(ReductionMode.PRODUCT, x, axis, keepdims)

    def mean(self, x: Tensor, axis: Axes = None, *, keepdims: bool = False) -> Tensor:
        """The mean of the elements along these dims, which must be floats."""
        return self._reduced(ReductionMode.MEAN, x, axis, keepdims)

    def max(self, x: Tensor, axis: Axes = None, *, keepdims: bool = False) -> Tensor:
        """The largest element along these dims; NaN if there is one."""
        return self._reduced(ReductionMode.MAX, x, axis, keepdims)

    def min(self, x: Tensor, axis: Axes = None, *, keepdims: bool = False) -> Tensor:
        """The smallest element along these dims; NaN if there is one."""
        return self._reduced(ReductionMode.MIN, x, axis, keepdims)

    def logsumexp(self, x: Tensor, axis: Axes = None, *, keepdims: bool = False) -> Tensor:
        """The logarithm of the sum of exponentials along these dims, none of which overflows."""
        return self._reduced(ReductionMode.LOG_SUM_EXP, x, axis, keepdims)

    def reduce(self, mode: ReductionMode, x: Tensor, axis: Axes = None, *, keepdims: bool = False) -> Tensor:
        """Any other reduction along these dims: see `ReductionMode`."""
        return self._reduced(mode, x, axis, keepdims)

    def argmax(self, x: Tensor, axis: int, *, keepdims: bool = False) -> Tensor:
        """The place of the largest element along a dim, int64; the first of equal ones."""
        return self._result(ArgReduction(x=x, mode=ReductionMode.MAX, axis=axis, keep_dims=keepdims))

    def argmin(self, x: Tensor, axis: int, *, keepdims: bool = False) -> Tensor:
        """The place of the smallest element along a dim, int64; the first of equal ones."""
        return self._result(ArgReduction(x=x, mode=ReductionMode.MIN, axis=axis, keep_dims=keepdims))

    def cumsum(self, x: Tensor, axis: int, *, exclusive: bool = False, reverse: bool = False) -> Tensor:
        """The sum of all elements up to each along a dim: see `Cumulative`."""
        return self._running(ReductionMode.SUM, x, axis, exclusive, reverse)

    def cumprod(self, x: Tensor, axis: int, *, exclusive: bool = False, reverse: bool = False) -> Tensor:
        """The product of all elements up to each along a dim: see `Cumulative`."""
        return self._running(ReductionMode.PRODUCT, x, axis, exclusive, reverse)

    def _running(self, mode: ReductionMode, x: Tensor, axis: int, exclusive: bool, reverse: bool) -> Tensor:
        return self._result(Cumulative(x=x, mode=mode, axis=axis, exclusive=exclusive, reverse=reverse))

    # In order.

    def top_k(self, x: Tensor, k: int, axis: int = -1, *, largest: bool = True, in_order: bool = True) -> Any:
        """The k largest or smallest elements along a dim and their places, a named tuple: see `TopK`."""
        return self.apply(TopK(x=x, k=k, axis=axis, largest=largest, in_order=in_order), also=("indices",))

    def sort(self, x: Tensor, axis: int = -1, *, descending: bool = False) -> Tensor:
        """The elements along a dim in order; NaN is larger than any number."""
        return self._result(TopK(x=x, k=self._size(x, axis), axis=axis, largest=descending))

    def argsort(self, x: Tensor, axis: int = -1, *, descending: bool = False) -> Tensor:
        """The places, int64, of the elements along a dim in order; of equal ones, the lower place first."""
        found: Tensor = self.top_k(x, self._size(x, axis), axis, largest=descending).indices
        return found

    @staticmethod
    def _size(x: Tensor, axis: int) -> int:
        return x.dims[axis_of("axis", axis, x.rank)]

    # Reads at places that indices name.

    def take(self, x: Tensor, indices: Tensor, axis: int | None = None, *, batch_dims: int = 0) -> Tensor:
        """Slices of x along a dim, those that indices name; without one, elements of all: see `Gather`."""
        if axis is None:
            x, axis = x.reshape(-1), 0
        return self._result(Gather(x=x, indices=indices, axis=axis, batch_dims=batch_dims))

    def take_along_axis(self, x: Tensor, indices: Tensor, axis: int) -> Tensor:
        """The elements of x with these coordinates along a dim, with NumPy's broadcasting of the others.

        See `GatherElements`.
        """
        if x.rank == indices.rank:
            along = axis % max(x.rank, 1)
            pairs = list(enumerate(zip(x.dims, indices.dims, strict=True)))
            x = self.broadcast_to(x, [i if s == 1 and n != along else s for n, (s, i) in pairs])
            indices = self.broadcast_to(indices, [s if i == 1 and n != along else i for n, (s, i) in pairs])
        return self._result(GatherElements(x=x, indices=indices, axis=axis))

    def gather_nd(self, x: Tensor, indices: Tensor, *, batch_dims: int = 0) -> Tensor:
        """The parts of x that lists of indices name, along the last dim of `indices`: see `GatherND`."""
        return self._result(GatherND(x=x, indices=indices, batch_dims=batch_dims))

    def put(
        self,
        x: Tensor,
        indices: Tensor,
        updates: Tensor,
        axis: int = 0,
        *,
        batch_dims: int = 0,
        reduction: ScatterReduction = ScatterReduction.NONE,
    ) -> Tensor:
        """x with slices along a dim changed, those that indices name: see `Scatter`."""
        where: Any = {"indices": indices, "axis": axis, "batch_dims": batch_dims}
        return self._result(Scatter(x=x, updates=updates, reduction=reduction, **where))

    def put_along_axis(
        self,
        x: Tensor,
        indices: Tensor,
        updates: Tensor,
        axis: int,
        *,
        reduction: ScatterReduction = ScatterReduction.NONE,
    ) -> Tensor:
        """x with the elements changed that have these coordinates along a dim: see `ScatterElements`."""
        where: Any = {"indices": indices, "axis": axis}
        return self._result(ScatterElements(x=x, updates=updates, reduction=reduction, **where))

    def scatter_nd(
        self,
        x: Tensor,
        indices: Tensor,
        updates: Tensor,
        *,
        batch_dims: int = 0,
        reduction: ScatterReduction = ScatterReduction.NONE,
    ) -> Tensor:
        """x with the parts changed that lists of indices name: see `ScatterND`."""
        where: Any = {"indices": indices, "batch_dims": batch_dims}
        return self._result(ScatterND(x=x, updates=updates, reduction=reduction, **where))

    # Neural networks.

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """a @ b: see `MatMul`. An operand of one dim is a row or a column, as in NumPy."""
        row, column = a.rank == 1, b.rank == 1
        y = self._result(MatMul(a=a[None] if row else a, b=b[:, None] if column else b))
        y = y[..., 0] if column else y
        return (y[..., 0] if column else y[..., 0, :]) if row else y

    def grouped_matmul(self, tokens: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
        """Rows of tokens times the matrix of their expert: see `GroupedMatMul`."""
        return self._result(GroupedMatMul(tokens=tokens, weights=weights, offsets=offsets))

    def softmax(self, x: Tensor, axis: int = -1) -> Tensor:
        """exp(x) / sum of exp(x), along a dim."""
        return self._result(Softmax(x=x, axis=axis))

    def log_softmax(self, x: Tensor, axis: int = -1) -> Tensor:
        """The logarithm of the softmax along a dim."""
        return self._result(Softmax(x=x, axis=axis, log=True))

    def layer_norm(
        self,
        x: Tensor,
        scale: Tensor | None = None,
        bias: Tensor | None = None,
        *,
        axis: int = -1,
        epsilon: float = 1e-5,
    ) -> Tensor:
        """Layer norm over the dims from `axis` on: see `LayerNorm`."""
        return self._result(LayerNorm(x=x, scale=scale, bias=bias, axis=axis, epsilon=epsilon))

    def rms_norm(
        self, x: Tensor, scale: Tensor | None = None, *, axis: int = -1, epsilon: float = 1e-5
    ) -> Tensor:
        """RMS norm over the dims from `axis` on: see `RMSNorm`."""
        return self._result(RMSNorm(x=x, scale=scale, axis=axis, epsilon=epsilon))

    def batch_norm(
        self,
        x: Tensor,
        mean: Tensor,
        variance: Tensor,
        scale: Tensor | None = None,
        bias: Tensor | None = None,
        *,
        epsilon: float = 1e-5,
    ) -> Tensor:
        """Batch norm of channels with given statistics: see `BatchNorm`."""
        return self._result(
            BatchNorm(x=x, mean=mean, variance=variance, scale=scale, bias=bias, epsilon=epsilon)
        )

    def batch_norm_training(
        self,
        x: Tensor,
        scale: Tensor | None = None,
        bias: Tensor | None = None,
        running_mean: Tensor | None = None,
        running_variance: Tensor | None = None,
        *,
        epsilon: float = 1e-5,
        momentum: float = 0.1,
        unbiased: bool = True,
    ) -> Any:
        """Batch norm of channels with x's own statistics: see `BatchNormTraining`.

        Returns y; with running statistics, a named tuple of y and of the new ones, for `build(updates=...)`.
        """
        operation = BatchNormTraining(
            x=x,
            scale=scale,
            bias=bias,
            running_mean=running_mean,
            running_variance=running_variance,
            epsilon=epsilon,
            momentum=momentum,
            unbiased=unbiased,
        )
        running = {"new_running_mean": running_mean, "new_running_variance": running_variance}
        return self.apply(operation, also=tuple(name for name, old in running.items() if old is not None))

    def instance_norm(
        self, x: Tensor, scale: Tensor | None = None, bias: Tensor | None = None, *, epsilon: float = 1e-5
    ) -> Tensor:
        """Norm of each channel of each sample: see `InstanceNorm`."""
        return self._result(InstanceNorm(x=x, scale=scale, bias=bias, epsilon=epsilon))

    def group_norm(
        self,
        x: Tensor,
        groups: int,
        scale: Tensor | None = None,
        bias: Tensor | None = None,
        *,
        epsilon: float = 1e-5,
    ) -> Tensor:
        """Norm of so many groups of channels of each sample: see `GroupNorm`."""
        return self._result(GroupNorm(x=x, groups=groups, scale=scale, bias=bias, epsilon=epsilon))

    def local_response_norm(
        self, x: Tensor, size: int, *, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0
    ) -> Tensor:
        """x by a power of the squares of `size` channels around each: see `LocalResponseNorm`."""
        return self._result(LocalResponseNorm(x=x, size=size, alpha=alpha, beta=beta, bias=bias))

    def max_pool(
        self,
        x: Tensor,
        size: int | Sequence[int],
        *,
        pad: int | Sequence[int] = 0,
        stride: int | Sequence[int] | None = None,
        dilation: int | Sequence[int] = 1,
    ) -> Tensor:
        """The largest element of each window, which move by their size unless a stride is given."""
        window = Window.symmetric(x.rank - 2, size, pad, stride, dilation)
        return self._result(MaxPool(x=x, window=window))

    def avg_pool(
        self,
        x: Tensor,
        size: int | Sequence[int],
        *,
        pad: int | Sequence[int] = 0,
        stride: int | Sequence[int] | None = None,
        include_padding: bool = False,
    ) -> Tensor:
        """The mean of each window, which move by their size unless a stride is given."""
        window = Window.symmetric(x.rank - 2, size, pad, stride)
        return self._result(AvgPool(x=x, window=window, include_padding=include_padding))

    def lp_pool(
        self,
        x: Tensor,
        size: int | Sequence[int],
        p: float = 2.0,
        *,
        pad: int | Sequence[int] = 0,
        stride: int | Sequence[int] | None = None,
        dilation: int | Sequence[int] = 1,
    ) -> Tensor:
        """The p-norm of each window, which move by their size unless a stride is given."""
        window = Window.symmetric(x.rank - 2, size, pad, stride, dilation)
        return self._result(LpPool(x=x, window=window, p=p))

    def adaptive_max_pool(self, x: Tensor, output: int | Sequence[int]) -> Tensor:
        """The largest element of each of so many windows that cover x: see `AdaptiveWindow`."""
        return self._result(MaxPool(x=x, window=self._adaptive(x, output)))

    def adaptive_avg_pool(self, x: Tensor, output: int | Sequence[int]) -> Tensor:
        """The mean of each of so many windows that cover x: see `AdaptiveWindow`."""
        return self._result(AvgPool(x=x, window=self._adaptive(x, output)))

    @staticmethod
    def _adaptive(x: Tensor, output: int | Sequence[int]) -> AdaptiveWindow:
        return AdaptiveWindow(output=spread("output", output, len(_spatial(x))))

    def global_max_pool(self, x: Tensor) -> Tensor:
        """The largest element of each image and channel, with spatial dims of 1."""
        return self.max(x, _spatial(x), keepdims=True)

    def global_avg_pool(self, x: Tensor) -> Tensor:
        """The mean of each image and channel, with spatial dims of 1."""
        return self.mean(x, _spatial(x), keepdims=True)

    def global_lp_pool(self, x: Tensor, p: float = 2.0) -> Tensor:
        """The p-norm of each image and channel, with spatial dims of 1. For p of 1 and 2, a `Reduction`."""
        axes = _spatial(x)
        if p in (1, 2):
            return self.reduce(ReductionMode.L1 if p == 1 else ReductionMode.L2, x, axes, keepdims=True)
        return self._result(LpPool(x=x, window=self._adaptive(x, 1), p=p))

    def attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        bias: Tensor | None = None,
        lengths_q: Tensor | None = None,
        lengths_kv: Tensor | None = None,
        scale: float | None = None,
        causal: bool = False,
        window: tuple[int | None, int | None] = (None, None),
        alibi: bool | Sequence[float] = False,
        dropout: float = 0.0,
        state: Tensor | None = None,
    ) -> Tensor:
        """Attention of queries to keys and values, dims (B, H, S, D): see `Attention`.

        `window`: how many positions before and after its own one each sees; None for all. `alibi`: whether
        there are slopes as in the paper, or the slope of each head. `dropout` draws from `state`, and takes
        B * H * S * L of its numbers.
        """
        if isinstance(alibi, bool):
            slopes = alibi_slopes(q.dims[1]) if alibi and q.rank > 1 else None
        else:
            slopes = tuple(alibi)
        return self._result(
            Attention(
                q=q,
                k=k,
                v=v,
                bias=bias,
                lengths_q=lengths_q,
                lengths_kv=lengths_kv,
                state=state,
                scale=scale,
                causal=causal,
                window_left=window[0],
                window_right=window[1],
                slopes=slopes,
                dropout=dropout,
            )
        )

    # Random numbers. A state is int64 of dims (2,): the seed, and the number of the first element.

    def _drawn(self, kind: type[Randomness[Any]], dims: Sequence[int], dtype: DTypeLike, **of: Any) -> Tensor:
        spec = TensorSpec.packed(dims, dtype)
        return self._result(kind(dims=spec.dims, dtype=spec.dtype, **of))

    def uniform(
        self,
        dims: Sequence[int],
        state: Tensor,
        low: float = 0.0,
        high: float = 1.0,
        *,
        dtype: DTypeLike = DType.FLOAT32,
    ) -> Tensor:
        """Numbers from `low` on and below `high`, all equally likely: see `RandomUniform`."""
        return self._drawn(RandomUniform, dims, dtype, state=state, low=low, high=high)

    def normal(
        self,
        dims: Sequence[int],
        state: Tensor,
        mean: float = 0.0,
        std: float = 1.0,
        *,
        dtype: DTypeLike = DType.FLOAT32,
    ) -> Tensor:
        """Normally distributed numbers with that mean and standard deviation: see `RandomNormal`."""
        return self._drawn(RandomNormal, dims, dtype, state=state, mean=mean, deviation=std)

    def bernoulli(
        self, dims: Sequence[int], state: Tensor, probability: float = 0.5, *, dtype: DTypeLike = DType.BOOL
    ) -> Tensor:
        """1 with that probability, else 0: see `RandomBernoulli`."""
        return self._drawn(RandomBernoulli, dims, dtype, state=state, probability=probability)

    def randint(
        self, dims: Sequence[int], state: Tensor, low: int, high: int, *, dtype: DTypeLike = DType.INT64
    ) -> Tensor:
        """Whole numbers from `low` on and below `high`, all equally likely: see `RandomIntegers`."""
        return self._drawn(RandomIntegers, dims, dtype, state=state, low=low, high=high)

    def dropout(self, x: Tensor, probability: Any, state: Tensor) -> Tensor:
        """x with each element 0 with that probability, else divided by 1 - probability.

        Takes a number of the state for each element of x. Two that read the same state drop the same places:
        give the second one `advance(state, ...)`.
        """
        if not isinstance(probability, int | float) or not 0 <= probability < 1:
            raise InvalidRequest(
                field="probability",
                value=probability,
                problem="must be a number from 0 to below 1",
                fix="use 0.1 to drop one element in ten",
            )
        kept = self.bernoulli(x.dims, state, 1 - probability)
        return self.where(kept, x * (1 / (1 - probability)), 0.0)

    def advance(self, state: Tensor, count: int) -> Tensor:
        """The state behind `count` numbers: what is drawn from it is independent of those.

        With `g.build(..., updates={"state": g.advance(state, count)})` each run draws other numbers.
        """
        if state.dtype is not DType.INT64 or state.dims != (2,):
            raise InvalidRequest(
                field="state",
                value=state,
                problem="is not a state",
                fix="give a tensor of int64 and dims (2,): the seed, and the number of the first element",
            )
        if not is_whole(count) or count < 0:
            raise InvalidRequest(
                field="count",
                value=count,
                problem="must be a whole number ≥ 0",
                fix="give how many were drawn",
            )
        places = self.cumsum(state == state, 0, exclusive=True)  # noqa: PLR0124 - ones, and so 0 and 1
        return state + places * count


def _spatial(x: Tensor) -> tuple[int, ...]:
    """The spatial dims of a tensor. Raises `InvalidRequest` if it has none."""
    if x.rank < 3:
        raise InvalidRequest(
            field="x",
            value=x.dims,
            problem="has no spatial dims",
            fix="give it dims N, C, spatial",
        )
    return tuple(range(2, x.rank))
