"""The functions of a `GraphBuilder` for convolutions, and their transposes."""

from __future__ import annotations

from collections.abc import Sequence

from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.graphs.expressions import Tensor
from cudnn_actor.protocol.graphs.movement_functions import MovementFunctions
from cudnn_actor.protocol.operations import ConvolutionBackwardData, ConvolutionForward
from cudnn_actor.protocol.types.checks import require_flag
from cudnn_actor.protocol.types.conv import ConvSpec
from cudnn_actor.protocol.types.dtypes import DTypeLike
from cudnn_actor.protocol.types.spatial import Padding, check_spatial, sides, spatial_dims_of, spread

__all__ = ["ConvolutionFunctions", "transpose_convolution"]


class ConvolutionFunctions(MovementFunctions):
    """Each function adds operations to the graph. Raises `InvalidRequest` if operands do not fit together."""

    def conv(
        self,
        x: Tensor,
        w: Tensor,
        *,
        pad: Padding = 0,
        stride: int | Sequence[int] = 1,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        bias: Tensor | None = None,
        flipped: bool = False,
        compute_dtype: DTypeLike | None = None,
    ) -> Tensor:
        """Convolution forward, plus one bias per filter, of dims (K,). See `ConvFwd`.

        A padding may be a pair, before and after: `pad=((0, 1), (0, 1))`. `flipped`: whether the filter is
        read backwards along each spatial dim, as in mathematics and in SciPy, and by cuDNN's
        `CUDNN_CONVOLUTION`; not so in cross-correlation. `compute_dtype`: the type that floats are summed up
        in, as in `pointwise`: "float64" of float32 and half types. The result has the dtype that it has
        without.
        """
        if compute_dtype is not None:
            made: Tensor = self._computed_in(
                compute_dtype,
                {"x": x, "w": w, "bias": bias},
                lambda of: self.conv(
                    **of, pad=pad, stride=stride, dilation=dilation, groups=groups, flipped=flipped
                ),
            )
            return made
        spatial = self._spatial_dims(x)
        conv = ConvSpec.spread(spatial, pad, stride, dilation, groups)
        self._check_filter(x, w, "K, C / groups, spatial")
        w = self._flip_filter(w, flipped)
        y = self._result(ConvolutionForward(x=x, w=w, conv=conv))
        return self._with_bias(y, bias)

    def conv_transpose(
        self,
        x: Tensor,
        w: Tensor,
        *,
        pad: Padding = 0,
        stride: int | Sequence[int] = 1,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        output_pad: int | Sequence[int] = 0,
        bias: Tensor | None = None,
        flipped: bool = False,
        compute_dtype: DTypeLike | None = None,
    ) -> Tensor:
        """The transpose of a convolution with these parameters, as PyTorch's `conv_transpose2d`.

        Parameters
        ----------
        x, w
            Dims (N, C, spatial) and (C, K / groups, filter): the filter of the convolution from K channels to
            C.
        pad, stride, dilation, groups
            The convolution's. So a result is `(size - 1) * stride + dilation * (taps - 1) + 1` long, less the
            padding before and after, plus `output_pad`.
        output_pad
            How many elements longer the result is, at its end.
        bias
            One for each channel of the result, of dims (K,).
        flipped
            The convolution's: it is the transpose of `conv(..., flipped=True)`.
        compute_dtype
            As in `conv`.
        """
        if compute_dtype is not None:
            made: Tensor = self._computed_in(
                compute_dtype,
                {"x": x, "w": w, "bias": bias},
                lambda of: self.conv_transpose(
                    **of,
                    pad=pad,
                    stride=stride,
                    dilation=dilation,
                    groups=groups,
                    output_pad=output_pad,
                    flipped=flipped,
                ),
            )
            return made
        spatial = self._spatial_dims(x)
        before, after = sides("pad", pad, spatial)
        extra = spread("output_pad", output_pad, spatial)
        check_spatial("output_pad", extra, 0)
        self._check_filter(x, w, "C, K / groups, spatial")
        conv = ConvSpec.spread(spatial, 0, stride, dilation, groups)
        if x.dims[1] != w.dims[0]:
            raise InvalidRequest(
                field="w",
                value=w.dims,
                problem=f"has {w.dims[0]} filters, but x has {x.dims[1]} channels",
                fix="give it dims C, K / groups, spatial: its first dim is that of x's channels",
            )
        w = self._flip_filter(w, flipped)
        y = transpose_convolution(self, x, w, conv, before=before, after=after, extra=extra)
        return self._with_bias(y, bias)

    def _spatial_dims(self, x: Tensor, most: int = 3) -> int:
        """How many spatial dims x has. Raises `InvalidRequest` unless it has 1 to `most`."""
        self._own("x", x)
        return spatial_dims_of("x", x.dims, most)

    def _check_filter(self, x: Tensor, w: Tensor, dims: str) -> None:
        self._own("w", w)
        if w.rank != x.rank:
            raise InvalidRequest(
                field="w",
                value=w.dims,
                problem=f"has another rank than x, of dims {x.dims}",
                fix=f"give it dims {dims}",
            )

    def _flip_filter(self, w: Tensor, flipped: bool) -> Tensor:
        """A filter, backwards along each spatial dim if it is flipped."""
        require_flag("flipped", flipped)
        return self.slice(w, (..., *[slice(None, None, -1)] * (w.rank - 2))) if flipped else w

    def _with_bias(self, y: Tensor, bias: Tensor | None) -> Tensor:
        """y plus one number for each channel, of dims (K,) or (1, K, 1, ...)."""
        if bias is None:
            return y
        self._own("bias", bias)
        of_channels = (1, y.dims[1], *(1 for _ in y.dims[2:]))
        if bias.dims not in (of_channels, of_channels[1:2]):
            raise InvalidRequest(
                field="bias",
                value=bias.dims,
                problem=f"must have one value for each of the {y.dims[1]} filters",
                fix=f"give it dims {of_channels[1:2]}",
            )
        return self.pointwise("add", y, bias if bias.rank > 1 else self.reshape(bias, of_channels))


def transpose_convolution(
    g: MovementFunctions,
    x: Tensor,
    w: Tensor,
    conv: ConvSpec,
    *,
    before: Sequence[int],
    after: Sequence[int],
    extra: Sequence[int],
) -> Tensor:
    """The transpose of a convolution. `conv` has no padding: it is `before` and `after`, and may be negative,
    which lengthens the result. `extra` is the `output_pad`. Raises `InvalidRequest`."""
    along = zip(x.dims[2:], w.dims[2:], conv.stride, conv.dilation, strict=True)
    full = [(size - 1) * stride + dilation * (taps - 1) + 1 for size, taps, stride, dilation in along]
    sizes = [f + e - b - a for f, e, b, a in zip(full, extra, before, after, strict=True)]
    if min(sizes) < 0:
        raise InvalidRequest(
            field="pad",
            value=tuple(zip(before, after, strict=True)),
            problem=f"is more than the {tuple(full)} elements along the spatial dims",
            fix="pad less",
        )
    # What is cropped at the front is padding of the convolution; the end follows from the dims.
    front = tuple(max(0, b) for b in before)
    most = [min(size - max(0, -b), f - max(0, b)) for size, f, b in zip(sizes, full, before, strict=True)]
    back = tuple(f - b - m for f, b, m in zip(full, front, most, strict=True))
    spec = ConvSpec(
        pre_padding=front,
        post_padding=back,
        stride=conv.stride,
        dilation=conv.dilation,
        groups=conv.groups,
    )
    dims = (x.dims[0], w.dims[1] * conv.groups, *most)
    y: Tensor = g.apply(
        ConvolutionBackwardData(dy=x, w=w, conv=spec), like={"dx": g.full(dims, 0.0, x.dtype)}
    )
    missing = [(max(0, -b), size - m - max(0, -b)) for b, size, m in zip(before, sizes, most, strict=True)]
    return y if not any(map(any, missing)) else g.pad(y, [(0, 0), (0, 0), *missing])
