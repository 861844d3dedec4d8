"""A convolution's parameters (padding, stride, dilation, groups), and the shapes that follow from them.

"Convolution" is cross-correlation, as in cuDNN and every deep-learning library.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.types.checks import as_plain, is_whole
from cudnn_actor.protocol.types.records import Parameters
from cudnn_actor.protocol.types.spatial import (
    LARGEST,
    Padding,
    check_spatial,
    check_spatial_dims,
    rearrangement,
    sides,
    spread,
)

__all__ = ["ConvSpec", "Padding"]


class ConvSpec(Parameters):
    """A convolution's parameters, one value per spatial dim (1 to 3 of them).

    Parameters
    ----------
    pre_padding, post_padding
        Zeros before and after, in elements, at least 0.
    stride, dilation
        In elements, at least 1.
    groups
        Channels are split into this many independent groups; the filter has C / groups channels.

    Raises
    ------
    InvalidRequest
        A value is out of its range, or the fields' lengths differ.
    """

    example: ClassVar[str] = "ConvSpec.symmetric(2, pad=1), of one number for all spatial dims"
    pre_padding: tuple[int, ...]
    post_padding: tuple[int, ...]
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1

    def __post_init__(self) -> None:
        check_spatial("pre_padding", self.pre_padding, 0)
        rank = len(self.pre_padding)
        for name, least in (("post_padding", 0), ("stride", 1), ("dilation", 1)):
            check_spatial(name, getattr(self, name), least, rank)
        if not is_whole(self.groups) or not 1 <= self.groups <= LARGEST:
            raise InvalidRequest(
                field="groups",
                value=self.groups,
                problem=f"must be a whole number from 1 to {LARGEST}",
                fix="use groups=1",
            )

    @classmethod
    def symmetric(
        cls,
        spatial_dims: int,
        pad: int | Sequence[int] = 0,
        stride: int | Sequence[int] = 1,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
    ) -> ConvSpec:
        """A convolution with equal padding before and after. A single number applies to every spatial dim."""
        check_spatial_dims(spatial_dims)
        padding = spread("pad", pad, spatial_dims)
        check_spatial("pad", padding, 0)
        return cls(
            pre_padding=padding,
            post_padding=padding,
            stride=spread("stride", stride, spatial_dims),
            dilation=spread("dilation", dilation, spatial_dims),
            groups=as_plain(groups),
        )

    @classmethod
    def spread(
        cls,
        spatial_dims: int,
        pad: Padding = 0,
        stride: int | Sequence[int] = 1,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
    ) -> ConvSpec:
        """A convolution, from one number for all spatial dims or for each. Padding may be (before, after)."""
        check_spatial_dims(spatial_dims)
        before, after = sides("pad", pad, spatial_dims)
        return cls(
            pre_padding=before,
            post_padding=after,
            stride=spread("stride", stride, spatial_dims),
            dilation=spread("dilation", dilation, spatial_dims),
            groups=as_plain(groups),
        )

    @property
    def spatial_dims(self) -> int:
        """The number of spatial dims: 1, 2 or 3."""
        return len(self.stride)

    def output_dims(self, x: Sequence[int], w: Sequence[int]) -> tuple[int, ...]:
        """Dims of y for an input `x` (N, C, spatial) and a filter `w` (K, C / groups, spatial).

        Per spatial dim: 1 + (pre + in + post - (dilation * (filter - 1) + 1)) // stride.
        https://docs.nvidia.com/deeplearning/cudnn/latest/api/cudnn-cnn-library.html

        Raises `InvalidRequest` if ranks or channels do not match, or the filter has no taps or is larger than
        the padded input.
        """
        self._check_operands(x, w)
        spatial = []
        for axis, (size, taps) in enumerate(zip(x[2:], w[2:], strict=True)):
            padded = self.pre_padding[axis] + size + self.post_padding[axis]
            window = self.dilation[axis] * (taps - 1) + 1
            if window > padded:
                raise InvalidRequest(
                    field="w",
                    value=tuple(w),
                    problem=f"spans {window} inputs, but the padded input has {padded} in spatial dim {axis}",
                    fix="pad more, dilate less, or use a smaller filter",
                )
            spatial.append(1 + (padded - window) // self.stride[axis])
        return (x[0], w[0], *spatial)

    def input_dims(self, dy: Sequence[int], w: Sequence[int]) -> tuple[int, ...]:
        """Dims of the smallest x whose output has dims `dy`: what backward data computes by default.

        If a stride is over 1, inputs that are up to stride - 1 larger give the same output. To get one of
        those, pass `dx` with the dims that you want.

        Raises `InvalidRequest` if ranks or channels do not match, or the padding leaves no input.
        """
        self._check_ranks(dy=dy, w=w)
        if w[0] % self.groups:
            raise InvalidRequest(
                field="groups",
                value=self.groups,
                problem=f"does not divide {w[0]} filters",
                fix="choose a divisor of the number of filters",
            )
        if w[0] != dy[1]:
            raise InvalidRequest(
                field="dy",
                value=tuple(dy),
                problem=f"has {dy[1]} channels, but w has {w[0]} filters",
                fix="make dy.dims[1] equal to w.dims[0]",
            )
        spatial = []
        for axis, (size, taps) in enumerate(zip(dy[2:], w[2:], strict=True)):
            window = self.dilation[axis] * (taps - 1) + 1
            padding = self.pre_padding[axis] + self.post_padding[axis]
            least = (size - 1) * self.stride[axis] + window - padding
            most = least + self.stride[axis] - 1
            if most < 0:
                raise InvalidRequest(
                    field="dy",
                    value=tuple(dy),
                    problem=f"leaves no input in spatial dim {axis} with a padding of {padding}",
                    fix="use less padding",
                )
            spatial.append(max(least, min(most, 1)))
        return (dy[0], w[1] * self.groups, *spatial)

    def _check_ranks(self, **operands: Sequence[int]) -> None:
        (name, dims), (other, filters) = operands.items()
        if len(dims) != len(filters):
            raise _other_rank(name, dims, other, filters, self.groups)
        for name, dims in operands.items():
            if len(dims) != self.spatial_dims + 2:
                raise _rank_error(name, dims, self.spatial_dims)
            if name == "w" and 0 in dims[2:]:
                raise InvalidRequest(
                    field=name,
                    value=tuple(dims),
                    problem="has no taps",
                    fix="make its spatial dims at least 1; channels, filters and the batch may be none",
                )

    def _check_operands(self, x: Sequence[int], w: Sequence[int]) -> None:
        self._check_ranks(x=x, w=w)
        if x[1] % self.groups or w[0] % self.groups:
            raise InvalidRequest(
                field="groups",
                value=self.groups,
                problem=f"does not divide {x[1]} input channels and {w[0]} filters",
                fix="choose a common divisor of both",
            )
        if w[1] * self.groups != x[1]:
            raise InvalidRequest(
                field="w",
                value=tuple(w),
                problem=f"has {w[1]} channels, but x has {x[1]} in {self.groups} groups",
                fix=_channels_first(x, w, self.groups) or f"give w {x[1] // self.groups} channels",
            )


def _channels_first(x: Sequence[int], w: Sequence[int], groups: int) -> str:
    """A fix for an input that seems to have its channels last; empty for any other."""
    if x[-1] != w[1] * groups or x[1] == w[1]:  # the latter: w should have one group's channels
        return ""
    way = rearrangement("x", x, lambda dims: len(dims) == len(w) and dims[1] == x[-1])
    return (
        f"x seems to have its channels last: pass {way}, since dims are N, C, spatial "
        'whatever the layout (layout="NHWC" is only the order in memory)'
    )


def _other_rank(
    name: str, dims: Sequence[int], other: str, filters: Sequence[int], groups: int
) -> InvalidRequest:
    """The error about operands of different ranks. It names the one with fewer dims."""
    if len(dims) > len(filters):
        return InvalidRequest(
            field=other,
            value=tuple(filters),
            problem=f"has {len(filters)} dims, and {name} has {len(dims)}",
            fix="give both dims N, C, spatial: a filter (K, C / groups, spatial)",
        )
    channels = filters[1] * groups if name == "x" else filters[0]
    way = rearrangement(name, dims, lambda made: len(made) == len(filters) and made[1] == channels)
    fix = f"dims are N, C, spatial: pass {way}"
    if not way:
        fix = "give both dims N, C, spatial"
        if len(dims) == 3:
            fix += f": an image (H, W, C) becomes (1, C, H, W) by {name}.transpose(2, 0, 1)[None]"
    return InvalidRequest(
        field=name,
        value=tuple(dims),
        problem=f"has {len(dims)} dims, and {other} has {len(filters)}",
        fix=fix,
    )


def _rank_error(name: str, dims: Sequence[int], spatial: int) -> InvalidRequest:
    return InvalidRequest(
        field=name,
        value=tuple(dims),
        problem=f"has rank {len(dims)}, but a convolution with {spatial} spatial dims needs {spatial + 2}",
        fix="dims are N, C, spatial; give the ConvSpec as many spatial dims, as in ConvSpec.symmetric(2)",
    )
