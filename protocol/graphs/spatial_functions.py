"""The functions of a `GraphBuilder` for blocks of images, places in them, and norms of neighbourhoods.

All are compositions: each has the gradients of its parts.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from cudnn_actor.protocol.errors import InvalidRequest, Words
from cudnn_actor.protocol.graphs.arrangement_functions import ArrangementFunctions
from cudnn_actor.protocol.graphs.convolution_functions import ConvolutionFunctions
from cudnn_actor.protocol.graphs.expressions import Tensor
from cudnn_actor.protocol.graphs.movement_functions import MovementFunctions
from cudnn_actor.protocol.graphs.range_functions import RangeFunctions
from cudnn_actor.protocol.operations import AvgPool, Pad, Window
from cudnn_actor.protocol.types.checks import is_finite, require_flag
from cudnn_actor.protocol.types.conv import ConvSpec
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.spatial import Padding, are_several, check_spatial, spread
from cudnn_actor.protocol.types.tensor import whole_numbers

__all__ = ["SpatialFunctions", "affine_map", "affine_places"]


class SpatialFunctions(ArrangementFunctions, RangeFunctions, ConvolutionFunctions):
    """Each function adds operations to the graph, and raises `InvalidRequest` if its arguments do not fit."""

    # Blocks as columns.

    def unfold(
        self,
        x: Tensor,
        size: int | Sequence[int],
        *,
        pad: Padding = 0,
        stride: int | Sequence[int] = 1,
        dilation: int | Sequence[int] = 1,
    ) -> Tensor:
        """The blocks of x as columns, as PyTorch's `unfold`; also called im2col. Of any dtype.

        Parameters
        ----------
        x
            Dims (N, C, spatial), with 1 to 3 spatial dims.
        size
            Elements that a block has along each spatial dim, at least 1.
        pad
            Zeros around x. A pair for a dim is before and after: `pad=((0, 1), (0, 1))`.
        stride, dilation
            Elements from one block to the next, and from one element of a block to the next, at least 1.

        Returns
        -------
        Tensor
            Dims (N, C * elements of a block, number of blocks), of x's dtype. Elements and blocks are in
            row-major order. A filter of dims (K, C * elements) times it is the convolution.
        """
        rank = self._spatial_dims(x)
        blocks = _blocks(x.dims[2:], size, pad, stride, dilation)
        widths = [(0, 0), (0, 0), *((along.before, along.after) for along in blocks)]
        made = self.pad(x, widths) if any(map(any, widths)) else x
        for n in reversed(range(rank)):  # the elements of blocks lie behind the channels, the last dim's last
            made = self._cut(made, 1 + rank, blocks[n])
        columns = (x.dims[1] * math.prod(along.taps for along in blocks), _count(blocks))
        return self.reshape(made, (x.dims[0], *columns))

    def _cut(self, x: Tensor, axis: int, blocks: _Blocks) -> Tensor:
        """x with a dim in two: the block in its place, and the element of a block as the third dim."""
        every = (slice(None),) * axis
        if blocks.are_cut_by_element:
            reach = (blocks.number - 1) * blocks.stride + 1
            starts = [tap * blocks.dilation for tap in range(blocks.taps)]
            parts = [slice(start, start + reach, blocks.stride) for start in starts]
            return self.stack([self.slice(x, (*every, part)) for part in parts], 2)
        # Strips of as many elements as the stride lie side by side, and a block consists of some in a row.
        strips = blocks.number + blocks.strips - 1
        x = self.slice(x, (*every, slice(0, strips * blocks.stride)))
        x = self._place_apart(x, axis, strips * blocks.stride)
        x = self.reshape(x, (*x.dims[:axis], strips, blocks.stride, *x.dims[axis + 1 :]))
        parts = [slice(first, first + blocks.number) for first in range(blocks.strips)]
        cut = [self.moveaxis(self.slice(x, (*every, part)), axis + 1, 2) for part in parts]
        made = cut[0] if len(cut) == 1 else self.concatenate(cut, 2)
        return self.slice(made, (slice(None), slice(None), slice(0, blocks.taps)))

    def fold(
        self,
        x: Tensor,
        output: int | Sequence[int],
        size: int | Sequence[int],
        *,
        pad: Padding = 0,
        stride: int | Sequence[int] = 1,
        dilation: int | Sequence[int] = 1,
    ) -> Tensor:
        """The image whose elements are the sums of the columns' elements there, as PyTorch's `fold`.

        It is the transpose of `unfold`, also called col2im. Sums of half types are rounded once.

        Parameters
        ----------
        x
            Columns as `unfold` gives them: dims (N, C * elements of a block, number of blocks), any dtype.
        output
            The spatial dims of the image: one number for each, or one if `size` says how many there are.
        size, pad, stride, dilation
            As `unfold` takes them.

        Returns
        -------
        Tensor
            Dims (N, C, spatial), of x's dtype.
        """
        self._own("x", x)
        image = _image(output, size)
        blocks = _blocks(image, size, pad, stride, dilation)
        rank, taps = len(image), tuple(along.taps for along in blocks)
        if x.rank != 3 or x.dims[1] % math.prod(taps) or x.dims[2] != _count(blocks):
            raise InvalidRequest(
                field="x",
                value=x.dims,
                problem=f"has no columns of blocks of {taps} in an image of {image}",
                fix=f"give it dims (N, a multiple of {math.prod(taps)}, {_count(blocks)})",
            )
        dims = (x.dims[0], x.dims[1] // math.prod(taps), *taps, *(along.number for along in blocks))
        made = self.reshape(x, dims)
        for along in blocks:  # the elements of blocks lie before the places, of which the first are whole
            inside = slice(along.before, along.before + along.pixels)
            made = self.slice(self._join(made, 2 + rank, along), (*(slice(None),) * (1 + rank), inside))
        return made

    def _join(self, x: Tensor, axis: int, blocks: _Blocks) -> Tensor:
        """x without its third dim, the elements of blocks, and along `axis` the padded image for the blocks.

        An element of that is the sum of what lies on it.
        """
        before, step = (slice(None), slice(None)), blocks.stride
        if blocks.are_cut_by_element:
            parts = [
                self._place_apart(
                    self.slice(x, (*before, tap)), axis - 1, blocks.padded_size, tap * blocks.dilation, step
                )
                for tap in range(blocks.taps)
            ]
            return functools.reduce(operator.add, parts)
        x = self._place_apart(x, 2, blocks.strips * step)  # as in `_cut`
        size = max((blocks.number + blocks.strips - 1) * step, blocks.padded_size)
        parts = []
        for first in range(0, blocks.strips * step, step):
            strip = self.moveaxis(self.slice(x, (*before, slice(first, first + step))), 2, axis)
            whole = (*strip.dims[: axis - 1], blocks.number * step, *strip.dims[axis + 1 :])
            parts.append(self._place_apart(self.reshape(strip, whole), axis - 1, size, first))
        return functools.reduce(operator.add, parts)

    def _place_apart(self, x: Tensor, axis: int, size: int, start: int = 0, step: int = 1) -> Tensor:
        """x with a dim of that size, in which its elements are `step` apart, and 0 elsewhere."""
        if x.dims[axis] == size:
            return x
        behind = size - start - ((x.dims[axis] - 1) * step + 1)
        before, after, steps = (
            tuple(one if n == axis else other for n in range(x.rank))
            for one, other in ((start, 0), (behind, 0), (step, 1))
        )
        return self._result(Pad(x=x, before=before, after=after, steps=steps))

    # Places.

    def affine_grid(self, theta: Tensor, dims: Sequence[int], *, align_corners: bool = False) -> Tensor:
        """The places that an affine map takes an image's elements to, for `grid_sample`: as PyTorch's.

        Parameters
        ----------
        theta
            A matrix for each sample, floats, dims (N, D, D + 1), for D spatial dims: a place times its first
            columns, plus the last one. Places are (x, y) or (x, y, z): along the last dim first.
        dims
            Those of the result of `grid_sample`: (N, C, spatial), with 1 to 3 spatial dims.
        align_corners
            As in `grid_sample`: whether -1 and 1 are the middles of the first and the last element.

        Returns
        -------
        Tensor
            Dims (N, spatial, D), of theta's dtype. The middle of a dim of 1 is at 0 in either case.
        """
        self._own("theta", theta)
        count, _, *sizes = _image_dims(dims)
        rank = len(sizes)
        if theta.dims != (count, rank, rank + 1) or not theta.dtype.is_floating:
            raise InvalidRequest(
                field="theta",
                value=Words(f"{theta.dtype} {theta.dims}"),
                problem=f"does not fit dims {tuple(dims)}",
                fix=f"give floats of dims {(count, rank, rank + 1)}",
            )
        require_flag("align_corners", align_corners)
        places = []
        for size in sizes:
            numbers = self.astype(self._places(size, "dims", dims), DType.FLOAT64)
            places.append(self.astype(affine_places(numbers, align_corners=align_corners), theta.dtype))
        return affine_map(self, theta, places)

    # Neighbourhoods.

    def divisive_norm(
        self,
        x: Tensor,
        size: int | Sequence[int],
        *,
        means: Tensor | None = None,
        alpha: float = 1e-4,
        beta: float = 0.75,
        bias: float = 1.0,
    ) -> Tensor:
        """x / (bias + alpha / n * the sum of squares around each element) ** beta, within each channel.

        The n elements around one are a block of `size` along each spatial dim, in whose middle it is, or one
        before it; those that x does not have count as 0. It is Caffe's LRN within channels, and cuDNN's
        divisive normalisation.

        Parameters
        ----------
        x
            Floats, dims (N, C, spatial), with 1 to 3 spatial dims.
        size
            Elements that a block has along each spatial dim, at least 1.
        means
            Where it is given, the squares are those of the differences between the elements of a block and
            the mean of the element in its middle. Floats of x's dims, or of dims that are broadcast to them.
            Any numbers may be given; `g.grad` takes them for independent of x, as cuDNN does. x itself is
            divided, not its difference: for that, write `g.divisive_norm(x - means, size)`.
        alpha, beta, bias
            As in the formula.

        Returns
        -------
        Tensor
            Of x's dims and dtype. The sums are float32, of float64 float64; with means, always float64.

        Raises
        ------
        InvalidRequest
            An argument does not fit.
        """
        rank = self._spatial_dims(x)
        if means is not None:
            self._check_means(x, means)
        for name, value in (("alpha", alpha), ("beta", beta), ("bias", bias)):
            if not is_finite(value):
                raise InvalidRequest(field=name, value=value, problem="must be finite", fix="use 1")
        sizes = spread("size", size, rank)
        check_spatial("size", sizes, 1)
        squares = self._mean_squares(x, means, _around(sizes))
        made = x / (squares * float(alpha) + float(bias)) ** float(beta)
        return made if made.dtype is x.dtype else self._convert(made, x.dtype, kept=False)

    def _check_means(self, x: Tensor, means: Tensor) -> None:
        self._own("means", means)
        if not means.dtype.is_floating:
            raise InvalidRequest(
                field="means",
                value=Words(means.dtype),
                problem="is not a floating-point dtype",
                fix="give floats, as in g.astype(means, x.dtype)",
            )
        broadcast = zip(means.dims, x.dims, strict=False)
        if means.rank != x.rank or any(own not in (1, size) for own, size in broadcast):
            raise InvalidRequest(
                field="means",
                value=means.dims,
                problem="does not have a number for each element of x",
                fix=f"give it dims {x.dims}, or 1 for those that are broadcast",
            )

    def _mean_squares(self, x: Tensor, means: Tensor | None, window: Window) -> Tensor:
        """The sum of the squares in the window of each element, divided by the elements of a window."""
        if means is None:
            return self._mean_of(
                self._squares(self.astype(x, DType.FLOAT32) if x.dtype.is_half else x), window
            )
        # Most of the square of x cancels where x is close to its means: float64 has digits to spare.
        x, means = (self.astype(each, DType.FLOAT64) for each in (x, means))
        ones = self.full((1, 1, *x.dims[2:]), 1.0, DType.FLOAT64)
        inside = self._squares(means) * self._mean_of(ones, window)
        found = self._mean_of(self._squares(x), window) - means * self._mean_of(x, window) * 2.0 + inside
        return self.pointwise("max", found, 0.0)

    def _squares(self, x: Tensor) -> Tensor:
        return self.pointwise("square", x)

    def _mean_of(self, x: Tensor, window: Window) -> Tensor:
        """The mean of each window, in which 0 counts as an element where x ends."""
        pool = AvgPool(x=x, window=window, include_padding=True)
        return self._result(pool, **{f"window.{side}_padding": "size" for side in ("pre", "post")})


def _around(sizes: tuple[int, ...]) -> Window:
    """The window around each element: it is in the middle, or one before it."""
    ones = (1,) * len(sizes)
    return Window(
        size=sizes,
        pre_padding=tuple((n - 1) // 2 for n in sizes),
        post_padding=tuple(n // 2 for n in sizes),
        stride=ones,
        dilation=ones,
    )


def affine_places(numbers: Any, *, align_corners: bool) -> Any:
    """The places of a dim's elements, from -1 to 1. `numbers`: the elements' numbers from 0, an array or a
    tensor."""
    (size,) = numbers.shape
    return (numbers * 2.0 - (size - 1)) / max(1, size - 1 if align_corners else size)


def affine_map(g: MovementFunctions, theta: Tensor, places: Sequence[Tensor]) -> Tensor:
    """The places of an image's elements, transformed by matrices. `places` has a tensor for each dim."""
    rank = len(places)
    matrix = g.reshape(theta, (theta.dims[0], *[1] * rank, rank, rank + 1))
    grid = matrix[..., rank]
    for axis, along in enumerate(places):
        dims = [-1 if n == axis else 1 for n in range(rank + 1)]
        grid = grid + g.reshape(along, dims) * matrix[..., rank - 1 - axis]
    return grid


class _Blocks(NamedTuple):
    """How blocks lie along one spatial dim: their elements, and how many blocks there are."""

    taps: int
    number: int
    stride: int
    dilation: int
    before: int
    pixels: int
    after: int

    @property
    def padded_size(self) -> int:
        """How many elements the dim has with its padding."""
        return self.before + self.pixels + self.after

    @property
    def are_cut_by_element(self) -> bool:
        """Whether an operation is added for each element of a block. Each strip, see `_cut`, needs two."""
        return self.dilation > 1 or 2 * self.strips > self.taps

    @property
    def strips(self) -> int:
        """How many strips of as many elements as the stride it takes to hold a block."""
        return -(-self.taps // self.stride)


def _blocks(
    image: Sequence[int],
    size: int | Sequence[int],
    pad: Padding,
    stride: int | Sequence[int],
    dilation: int | Sequence[int],
) -> list[_Blocks]:
    """How blocks lie in an image of these spatial dims, for each of them. Raises `InvalidRequest`."""
    rank = len(image)
    taps = spread("size", size, rank)
    check_spatial("size", taps, 1)
    spec = ConvSpec.spread(rank, pad, stride, dilation)
    try:
        counts = spec.output_dims((1, 1, *image), (1, 1, *taps))[2:]
    except InvalidRequest as error:
        fix = "pad more, dilate less, or use smaller blocks"
        raise InvalidRequest(field="size", value=taps, problem=error.problem, fix=fix) from None
    fields = (taps, counts, spec.stride, spec.dilation, spec.pre_padding, image, spec.post_padding)
    return [_Blocks(*along) for along in zip(*fields, strict=True)]


def _count(blocks: Sequence[_Blocks]) -> int:
    """How many blocks there are in all."""
    return math.prod(along.number for along in blocks)


def _image(output: object, size: object) -> tuple[int, ...]:
    """The spatial dims of an image, of which `output` or `size` says how many there are."""
    ranks = [len(given) for given in (output, size) if are_several(given)]
    if not ranks:
        raise InvalidRequest(
            field="output",
            value=output,
            problem="does not say how many spatial dims there are",
            fix="give one number for each of them",
        )
    image = spread("output", output, ranks[0])
    check_spatial("output", image, 0)
    return image


def _image_dims(dims: Sequence[int]) -> tuple[int, ...]:
    """The dims of an image. Raises `InvalidRequest`."""
    found = tuple(whole_numbers("dims", dims))
    if not 3 <= len(found) <= 5 or min(found) < 0:
        raise InvalidRequest(
            field="dims",
            value=found,
            problem="are not those of an image",
            fix="give (N, C, spatial), with 1 to 3 spatial dims",
        )
    return found
