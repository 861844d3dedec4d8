"""The functions of a `GraphBuilder` for neural networks: products, norms, pooling."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.graphs.convolution_functions import ConvolutionFunctions
from cudnn_actor.protocol.graphs.expressions import Tensor
from cudnn_actor.protocol.operations import (
    AdaptiveWindow,
    AvgPool,
    BatchNorm,
    BatchNormTraining,
    Coordinates,
    GridPadding,
    GridSample,
    GroupedMatMul,
    GroupNorm,
    InstanceNorm,
    LayerNorm,
    LocalResponseNorm,
    LpPool,
    MatMul,
    MaxPool,
    NearestRounding,
    Reduction,
    ReductionMode,
    Resample,
    ResampleMode,
    RMSNorm,
    Softmax,
    Window,
)
from cudnn_actor.protocol.operations.base import axes_of
from cudnn_actor.protocol.types.checks import is_finite, require_flag
from cudnn_actor.protocol.types.dtypes import DTypeLike
from cudnn_actor.protocol.types.spatial import are_several, spread
from cudnn_actor.protocol.types.tensor import MAX_RANK, whole_numbers

__all__ = ["NetworkFunctions"]

_WINDOW = {"window.size": "size", "window.pre_padding": "pad", "window.post_padding": "pad"}
"""The fields of a `Window` → the arguments of the poolings."""


class NetworkFunctions(ConvolutionFunctions):
    """Each function adds operations to the graph. Raises `InvalidRequest` if operands do not fit together."""

    def matmul(self, a: Tensor, b: Tensor, *, compute_dtype: DTypeLike | None = None) -> Tensor:
        """a @ b: see `MatMul`. An operand of one dim is a row or a column, as in NumPy.

        `compute_dtype`: the type that floats are summed up in, as in `pointwise`: "float64" of float32 and
        half types. The result has the dtype that it has without.
        """
        if compute_dtype is not None:
            made: Tensor = self._computed_in(
                compute_dtype, {"a": a, "b": b}, lambda of: self.matmul(of["a"], of["b"])
            )
            return made
        self._own("a", a)
        self._own("b", b)
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
        per_activation: bool = False,
    ) -> Tensor:
        """Batch norm of channels with given statistics: see `BatchNorm`.

        `per_activation`: each element of a sample has statistics, a scale and a bias of its own, which have
        the dims (C, ...) of a sample.
        """
        given = {"mean": mean, "variance": variance, "scale": scale, "bias": bias}
        flat = self._rows_of_samples(x, given, per_activation)
        y = self._result(BatchNorm(epsilon=epsilon, **flat))
        return y if y.dims == x.dims else self.reshape(y, x.dims)

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
        per_activation: bool = False,
    ) -> Any:
        """Batch norm of channels with x's own statistics: see `BatchNormTraining`.

        `per_activation`: as in `batch_norm`. Returns y; with running statistics, a named tuple of y and of
        the new ones, for `build(updates=...)`.
        """
        running = {"running_mean": running_mean, "running_variance": running_variance}
        flat = self._rows_of_samples(x, {"scale": scale, "bias": bias, **running}, per_activation)
        operation = BatchNormTraining(epsilon=epsilon, momentum=momentum, unbiased=unbiased, **flat)
        also = tuple(f"new_{name}" for name, old in running.items() if old is not None)
        made = self.apply(operation, also=also)
        if not per_activation:
            return made
        if not also:
            return self.reshape(made, x.dims)
        dims = (x.dims, *(x.dims[1:] for _ in also))
        return type(made)(*(self.reshape(one, wanted) for one, wanted in zip(made, dims, strict=True)))

    def _rows_of_samples(
        self, x: Tensor, others: Mapping[str, Tensor | None], per_activation: bool
    ) -> dict[str, Any]:
        """The operands of a batch norm; per activation, samples are rows, whose elements are channels."""
        require_flag("per_activation", per_activation)
        given: dict[str, Any] = {"x": x, **others}
        if not per_activation:
            return given
        self._own("x", x)
        if x.rank < 2:
            raise InvalidRequest(
                field="x", value=x.dims, problem="has no channels", fix="give it dims (N, C, ...)"
            )
        for name, tensor in others.items():
            if tensor is None and name not in ("mean", "variance"):
                continue
            self._own(name, tensor)
            if tensor is not None and tensor.dims != x.dims[1:]:
                raise InvalidRequest(
                    field=name,
                    value=tensor.dims,
                    problem="does not have a number for each element of a sample",
                    fix=f"give it dims {x.dims[1:]}",
                )
        width = math.prod(x.dims[1:])
        rows = {name: (x.dims[0], width) if name == "x" else (width,) for name in given}
        return {n: None if one is None else self.reshape(one, rows[n]) for n, one in given.items()}

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
        """Norm of each of `groups` groups of channels of each sample: see `GroupNorm`."""
        return self._result(GroupNorm(x=x, groups=groups, scale=scale, bias=bias, epsilon=epsilon))

    def local_response_norm(
        self, x: Tensor, size: int, *, alpha: float = 1e-4, beta: float = 0.75, bias: float = 1.0
    ) -> Tensor:
        """x normalised by the squares of the `size` channels around each: see `LocalResponseNorm`."""
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
        """The largest element of each window. The stride is the window's size unless given."""
        window = Window.symmetric(self._spatial_dims(x), size, pad, stride, dilation)
        return self._result(MaxPool(x=x, window=window), **_WINDOW)

    def avg_pool(
        self,
        x: Tensor,
        size: int | Sequence[int],
        *,
        pad: int | Sequence[int] = 0,
        stride: int | Sequence[int] | None = None,
        include_padding: bool = False,
    ) -> Tensor:
        """The mean of each window. The stride is the window's size unless given."""
        window = Window.symmetric(self._spatial_dims(x), size, pad, stride)
        return self._result(AvgPool(x=x, window=window, include_padding=include_padding), **_WINDOW)

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
        """The p-norm of each window. The stride is the window's size unless given."""
        window = Window.symmetric(self._spatial_dims(x), size, pad, stride, dilation)
        return self._result(LpPool(x=x, window=window, p=p), **_WINDOW)

    def resize(
        self,
        x: Tensor,
        *,
        sizes: Sequence[int] | None = None,
        scales: Sequence[float] | None = None,
        axes: Sequence[int] | None = None,
        mode: ResampleMode = ResampleMode.NEAREST,
        coordinates: Coordinates = Coordinates.HALF_PIXEL,
        rounding: NearestRounding = NearestRounding.ROUND_PREFER_FLOOR,
        cubic_coefficient: float = -0.75,
        exclude_outside: bool = False,
        antialias: bool = False,
        roi: Sequence[float] | None = None,
        extrapolation: float = 0.0,
    ) -> Tensor:
        """x resized to `sizes`, or by `scales`, along `axes` or along all dims: see `Resample`.

        Give `sizes` or `scales`: one number for each dim, or for each of `axes`. A size that follows from a
        scale is rounded down. `mode`, `coordinates` and `rounding` may be texts: `mode="linear"`.
        """
        self._own("x", x)
        along = range(x.rank) if axes is None else axes_of("axes", whole_numbers("axes", axes), x.rank)
        known: list[Any] = list(x.dims)
        factors = [1.0] * x.rank
        given: Any = scales if sizes is None else sizes
        if (sizes is None) == (scales is None) or given is None:
            raise InvalidRequest(
                field="sizes",
                value=sizes,
                problem="is left out, and so is scales" if given is None else "is given, and so is scales",
                fix="give either sizes or scales",
            )
        if not are_several(given) or len(given) != len(along):
            raise InvalidRequest(
                field="sizes" if scales is None else "scales",
                value=given,
                problem=f"must have one number for each dim to resize, {len(along)} in all",
                fix="name the dims to resize, as in sizes=(64, 64), axes=(2, 3)"
                if axes is None
                else "give one for each of axes",
            )
        for axis, value in zip(along, given, strict=True):
            known[axis] = value
            if scales is not None:
                if not is_finite(value) or value <= 0 or value * x.dims[axis] > 2**48:
                    raise InvalidRequest(
                        field="scales",
                        value=scales,
                        problem=f"must make at most 2**48 elements of the {x.dims[axis]} of dim {axis}, "
                        "and be above 0",
                        fix="use 1.0 for a dim that stays as it is",
                    )
                known[axis], factors[axis] = math.floor(value * x.dims[axis]), float(value)
        parts = [0.0] * x.rank + [1.0] * x.rank
        if roi is not None and len(roi) != 2 * len(along):
            raise InvalidRequest(
                field="roi",
                value=roi,
                problem="must be where a part starts along each dim, and then where it ends",
                fix=f"give {2 * len(along)} numbers",
            )
        for number, axis in enumerate(along if roi is not None else ()):
            parts[axis], parts[axis + x.rank] = roi[number], roi[number + len(along)]  # type: ignore[index]
        return self._result(
            Resample(
                x=x,
                sizes=tuple(known),
                scales=None if scales is None else tuple(factors),
                mode=mode,
                coordinates=coordinates,
                rounding=rounding,
                cubic_coefficient=cubic_coefficient,
                exclude_outside=exclude_outside,
                antialias=antialias,
                roi=None if roi is None else tuple(map(float, parts)),
                extrapolation=extrapolation,
            ),
            dims="sizes" if scales is None else "scales",
        )

    def grid_sample(
        self,
        x: Tensor,
        grid: Tensor,
        *,
        mode: ResampleMode = ResampleMode.LINEAR,
        padding: GridPadding = GridPadding.ZEROS,
        align_corners: bool = False,
    ) -> Tensor:
        """x at the places that a grid holds: see `GridSample`."""
        return self._result(
            GridSample(x=x, grid=grid, mode=mode, padding=padding, align_corners=align_corners)
        )

    def adaptive_max_pool(self, x: Tensor, output: int | Sequence[int]) -> Tensor:
        """The largest element of each of `output` windows that cover x: see `AdaptiveWindow`."""
        return self._result(MaxPool(x=x, window=self._adaptive(x, output)))

    def adaptive_avg_pool(self, x: Tensor, output: int | Sequence[int]) -> Tensor:
        """The mean of each of `output` windows that cover x: see `AdaptiveWindow`."""
        return self._result(AvgPool(x=x, window=self._adaptive(x, output)))

    def _adaptive(self, x: Tensor, output: int | Sequence[int]) -> AdaptiveWindow:
        return AdaptiveWindow(output=spread("output", output, self._spatial_dims(x)))

    def global_max_pool(self, x: Tensor) -> Tensor:
        """The largest element of each image and channel, with spatial dims of 1."""
        return self._over_space(ReductionMode.MAX, x)

    def global_avg_pool(self, x: Tensor) -> Tensor:
        """The mean of each image and channel, with spatial dims of 1."""
        return self._over_space(ReductionMode.MEAN, x)

    def global_lp_pool(self, x: Tensor, p: float = 2.0) -> Tensor:
        """The p-norm of each image and channel, with spatial dims of 1. For p of 1 and 2, a `Reduction`."""
        if is_finite(p) and p in (1, 2):
            return self._over_space(ReductionMode.L1 if p == 1 else ReductionMode.L2, x)
        return self._result(LpPool(x=x, window=self._adaptive(x, 1), p=p))

    def _over_space(self, mode: ReductionMode, x: Tensor) -> Tensor:
        axes = tuple(range(2, 2 + self._spatial_dims(x, MAX_RANK - 2)))
        return self._result(Reduction(x=x, mode=mode, axes=axes, keep_dims=True))
