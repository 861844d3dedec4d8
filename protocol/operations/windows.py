"""The windows of a pooling: of one size, at regular steps, or as many as the result has elements.

Adaptive windows are PyTorch's.
https://docs.pytorch.org/docs/stable/generated/torch.nn.AdaptiveAvgPool2d.html
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import msgspec

from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.operations.base import Array
from cudnn_actor.protocol.types.conv import ConvSpec
from cudnn_actor.protocol.types.records import Parameters
from cudnn_actor.protocol.types.spatial import check_spatial, check_spatial_dims, spread

__all__ = ["AdaptiveWindow", "Window", "sums_in_windows", "taps"]

_MOST_PADDING = 1 << 16
"""The most padding before or after a spatial dim. It costs work, and no tensor has to be as large."""


class Window(Parameters, tag=True):
    """The windows of a pooling, with one value per spatial dim (1 to 3 of them).

    Parameters
    ----------
    size
        Elements that a window has, at least 1.
    pre_padding, post_padding
        Elements before and after the tensor that windows may reach, at least 0.
    stride, dilation
        Elements from one window to the next, and from one element of a window to the next, at least 1.

    Raises
    ------
    InvalidRequest
        A value is out of its range, or the fields' lengths differ.
    """

    example: ClassVar[str] = "Window.symmetric(2, size=2)"
    size: tuple[int, ...]
    pre_padding: tuple[int, ...]
    post_padding: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]

    def __post_init__(self) -> None:
        check_spatial("size", self.size, 1)
        rank = len(self.size)
        for name, least in (("pre_padding", 0), ("post_padding", 0), ("stride", 1), ("dilation", 1)):
            check_spatial(name, getattr(self, name), least, rank)

    @classmethod
    def symmetric(
        cls,
        spatial_dims: int,
        size: int | Sequence[int],
        pad: int | Sequence[int] = 0,
        stride: int | Sequence[int] | None = None,
        dilation: int | Sequence[int] = 1,
    ) -> Window:
        """Windows with equal padding before and after. `stride`: None for that of windows side by side.

        A single number applies to every spatial dim.
        """
        check_spatial_dims(spatial_dims)
        padding = spread("pad", pad, spatial_dims)
        check_spatial("pad", padding, 0)
        return cls(
            size=spread("size", size, spatial_dims),
            pre_padding=padding,
            post_padding=padding,
            stride=spread("stride", size if stride is None else stride, spatial_dims),
            dilation=spread("dilation", dilation, spatial_dims),
        )

    @property
    def spatial_dims(self) -> int:
        """The number of spatial dims: 1, 2 or 3."""
        return len(self.size)

    def output_dims(self, x: Sequence[int]) -> tuple[int, ...]:
        """Dims of the result for an input of dims `x` (N, C, spatial).

        Per spatial dim: 1 + (pre + in + post - (dilation * (size - 1) + 1)) // stride. Raises
        `InvalidRequest` if ranks do not match, or a window has no element of the input.
        """
        _check_rank(x, self.spatial_dims)
        return (*x[:2], *(self._count(axis, size) for axis, size in enumerate(x[2:])))

    def _count(self, axis: int, size: int) -> int:
        extent = self.dilation[axis] * (self.size[axis] - 1) + 1
        padded = self.pre_padding[axis] + size + self.post_padding[axis]
        if extent > padded:
            raise InvalidRequest(
                field="window.size",
                value=self.size,
                problem=f"extends over {extent} elements in spatial dim {axis}, "
                f"but the padded input has {padded}",
                fix="pad more, dilate less, or use smaller windows",
            )
        count = 1 + (padded - extent) // self.stride[axis]
        for name in ("pre_padding", "post_padding"):
            if getattr(self, name)[axis] > _MOST_PADDING:
                raise InvalidRequest(
                    field=f"window.{name}",
                    value=getattr(self, name),
                    problem=f"has more than {_MOST_PADDING:,} elements in spatial dim {axis}",
                    fix="use less padding",
                )
        early = -(-self.pre_padding[axis] // self.stride[axis])  # the windows that start before the input
        for place in {*range(min(early, count)), count - 1}:
            start = place * self.stride[axis] - self.pre_padding[axis]
            first = -(min(start, 0) // self.dilation[axis])  # the first element that is not before the input
            if first >= self.size[axis] or start + first * self.dilation[axis] >= size:
                raise InvalidRequest(
                    field="window.pre_padding" if start < 0 else "window.post_padding",
                    value=self.pre_padding if start < 0 else self.post_padding,
                    problem=f"is so large that window {place} in spatial dim {axis} covers only padding",
                    fix="use less padding",
                )
        return count

    def at(self, x: Sequence[int], places: Sequence[slice]) -> tuple[Window, tuple[slice, ...]]:
        """Some of the windows over an input of these spatial dims, and the part of it that they reach over.

        The window is that for the part by itself: its windows have the same elements.
        """
        part, before, behind = [], [], []
        for axis, (size, of) in enumerate(zip(x, places, strict=True)):
            start = of.start * self.stride[axis] - self.pre_padding[axis]
            last = (of.stop - 1) * self.stride[axis] - self.pre_padding[axis]
            end = last + self.dilation[axis] * (self.size[axis] - 1) + 1
            part.append(slice(max(start, 0), min(end, size)))
            before.append(max(-start, 0))
            behind.append(max(end - size, 0))
        return msgspec.structs.replace(self, pre_padding=tuple(before), post_padding=tuple(behind)), tuple(
            part
        )

    def reaching(self, x: Sequence[slice], counts: Sequence[int]) -> list[slice]:
        """The windows that have an element in a part `x` of the input, as a slice for each spatial dim.

        `counts`: how many windows there are. The slice also has a window that does not begin behind the
        part's start.
        """
        found = []
        for axis, (part, count) in enumerate(zip(x, counts, strict=True)):
            stride, pre = self.stride[axis], self.pre_padding[axis]
            extent = self.dilation[axis] * (self.size[axis] - 1) + 1
            first = max(0, (part.start + pre - extent) // stride + 1)
            first = min(first, (part.start + pre) // stride, count - 1)
            found.append(slice(first, max(first + 1, min(count, (part.stop - 1 + pre) // stride + 1))))
        return found

    def elements_by_place(self, xp: Any, axis: int, x: Array, value: float, count: int) -> Iterator[Array]:
        """For each place in a window along one spatial dim, the elements there of all `count` windows.

        Padding has that value.
        """
        widths = [(0, 0)] * x.ndim
        widths[2 + axis] = (self.pre_padding[axis], self.post_padding[axis])
        padded = xp.pad(x, widths, constant_values=value)
        return (padded[places] for places in self._along(axis, count))

    def spread(self, xp: Any, y: Array, dims: Sequence[int]) -> Array:
        """The sum of y over the windows that an element is in, for each element of an input of these dims."""
        for axis, size in enumerate(dims[2:]):
            count, reached, first = y.shape[2 + axis], [*y.shape], self.pre_padding[axis]
            reached[2 + axis] = first + size + self.post_padding[axis]
            total = xp.zeros(reached, y.dtype)
            for places in self._along(axis, count):
                total[places] += y
            y = total[(*[slice(None)] * (2 + axis), slice(first, first + size))]
        return y

    def collect(self, xp: Any, term: Callable[..., Array], of_x: _Arrays, of_y: _Arrays) -> Array:
        """The sum of `term` over the windows that an element is in, for each element of the input.

        `term` takes values of the element, from `of_x`, and of the window, from `of_y`.
        """
        dims, places = of_x[0].shape, of_y[0].shape[2:]
        widths = ((0, 0), (0, 0), *zip(self.pre_padding, self.post_padding, strict=True))
        padded = [xp.pad(x, widths) for x in of_x]
        total = xp.zeros(padded[0].shape, of_y[0].dtype)
        for _, seen in taps(self, self.size, places):
            total[seen] += term(*(x[seen] for x in padded), *of_y)
        # What has been added to the padding is left out.
        parts = (slice(pre, pre + size) for pre, size in zip(self.pre_padding, dims[2:], strict=True))
        return total[(slice(None), slice(None), *parts)]

    def _along(self, axis: int, count: int) -> Iterator[tuple[slice, ...]]:
        """The place in an input padded along one spatial dim, for each place in a window along it."""
        for tap in range(self.size[axis]):
            start = tap * self.dilation[axis]
            places = slice(start, start + (count - 1) * self.stride[axis] + 1, self.stride[axis])
            yield (*[slice(None)] * (2 + axis), places)


class AdaptiveWindow(Parameters, tag=True):
    """The windows of a pooling that has a result of given dims: they cover the input, without padding.

    Of `out` windows over `in` elements, number i has those from floor(i * in / out) to before
    ceil((i + 1) * in / out). So they may differ in size by 1, or overlap by 1; where there are more windows
    than elements, several have the same element.

    Parameters
    ----------
    output
        How many windows there are, one value per spatial dim (1 to 3 of them), at least 1.

    Raises
    ------
    InvalidRequest
        A value is out of its range.
    """

    example: ClassVar[str] = "AdaptiveWindow(output=(1, 1))"
    output: tuple[int, ...]

    def __post_init__(self) -> None:
        check_spatial("output", self.output, 1)

    @property
    def spatial_dims(self) -> int:
        """The number of spatial dims: 1, 2 or 3."""
        return len(self.output)

    def output_dims(self, x: Sequence[int]) -> tuple[int, ...]:
        """Dims of the result for an input of dims `x` (N, C, spatial). Raises `InvalidRequest`."""
        _check_rank(x, self.spatial_dims)
        if 0 in x[2:]:
            raise InvalidRequest(
                field="x",
                value=tuple(x),
                problem="has no elements that windows could cover",
                fix="make its spatial dims at least 1; the batch may be empty",
            )
        return (*x[:2], *self.output)

    def elements_by_place(self, xp: Any, axis: int, x: Array, value: float, count: int) -> Iterator[Array]:
        """Yields, for each place in a window along one spatial dim, the elements there of all windows.

        Those of shorter windows have that value there.
        """
        rank = x.ndim - 2
        for places, there in _members(count, x.shape[2 + axis]):
            found = xp.take(x, xp.asarray(places), axis=2 + axis)
            yield xp.where(_along_axis(xp, there, axis, rank), found, value)

    def spread(self, xp: Any, y: Array, dims: Sequence[int]) -> Array:
        """The sum of y over the windows that an element is in, for each element of an input of these dims.

        The windows that an element is in are those that it would have if it were a window over windows.
        """
        return sums_in_windows(xp, AdaptiveWindow(output=tuple(dims[2:])), y, dims[2:])

    def collect(self, xp: Any, term: Callable[..., Array], of_x: _Arrays, of_y: _Arrays) -> Array:
        """The sum of `term` over the windows that each element of the input is in: see `Window`."""
        dims, windows = of_x[0].shape, of_y[0].shape
        total = xp.zeros(dims, of_y[0].dtype)
        each = (_members(*sizes) for sizes in zip(dims[2:], windows[2:], strict=True))
        for members in itertools.product(*each):
            places, there = (
                [_along_axis(xp, of[which], axis, len(members)) for axis, of in enumerate(members)]
                for which in (0, 1)
            )
            at = (slice(None), slice(None), *places)
            total += xp.where(functools.reduce(operator.and_, there), term(*of_x, *(y[at] for y in of_y)), 0)
        return total


_Arrays = Sequence[Array]


def taps(
    window: Window | ConvSpec, size: Sequence[int], places: Sequence[int]
) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """Each element of a window, or a filter, of that size, and the part of the padded input that it meets."""
    for tap in itertools.product(*map(range, size)):
        starts = [t * d for t, d in zip(tap, window.dilation, strict=True)]
        ends = [
            first + (count - 1) * step + 1
            for first, count, step in zip(starts, places, window.stride, strict=True)
        ]
        yield tap, (slice(None), slice(None), *map(slice, starts, ends, window.stride))


def _check_rank(x: Sequence[int], spatial_dims: int) -> None:
    if len(x) != spatial_dims + 2:
        raise InvalidRequest(
            field="x",
            value=tuple(x),
            problem=f"has rank {len(x)}, but windows of {spatial_dims} spatial dims need {spatial_dims + 2}",
            fix="dims are N, C, spatial; give the window as many spatial dims",
        )


def _members(count: int, size: int) -> Iterator[tuple[list[int], list[bool]]]:
    """For each place in a window: the element there of each of `count` adaptive windows, and if there is one.

    `size`: how many elements they cover.
    """
    starts = [number * size // count for number in range(count)]
    ends = [-(-(number + 1) * size // count) for number in range(count)]
    for tap in range(max(end - start for start, end in zip(starts, ends, strict=True))):
        places = [start + tap for start in starts]
        there = [place < end for place, end in zip(places, ends, strict=True)]
        yield [min(place, size - 1) for place in places], there


def _along_axis(xp: Any, values: Sequence[int], axis: int, rank: int) -> Array:
    """Values as an array with dims of 1 beside the given one of the spatial dims."""
    return xp.asarray(values).reshape([-1 if other == axis else 1 for other in range(rank)])


def sums_in_windows(xp: Any, window: Window | AdaptiveWindow, x: Array, places: Sequence[int]) -> Array:
    """The sum of each window, one dim after the other."""
    for axis, count in enumerate(places):
        x = sum(window.elements_by_place(xp, axis, x, 0, count))
    return x
