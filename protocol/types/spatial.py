"""Checks of parameters that have a value for each spatial dim: padding, stride, dilation, window sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import numpy as np

from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.types.checks import as_index, is_whole

__all__ = [
    "LARGEST",
    "Padding",
    "are_several",
    "check_spatial",
    "check_spatial_dims",
    "rearrangement",
    "sides",
    "spatial_dims_of",
    "spread",
]

Padding = int | Sequence[int | Sequence[int]]
"""One number for all sides of all spatial dims, or for each dim a number or a pair: before and after."""

LARGEST = (1 << 31) - 1


def check_spatial_dims(count: object) -> None:
    """Raise `InvalidRequest` unless this is a number of spatial dims."""
    if not is_whole(count) or not 1 <= count <= 3:
        raise InvalidRequest(
            field="spatial_dims", value=count, problem="must be 1, 2 or 3", fix="use 2 for images"
        )


def spatial_dims_of(name: str, dims: Sequence[int], most: int = 3) -> int:
    """How many spatial dims a tensor has. Raises `InvalidRequest` unless it has 1 to `most`."""
    if not 3 <= len(dims) <= most + 2:
        raise InvalidRequest(
            field=name,
            value=tuple(dims),
            problem=f"has {max(len(dims) - 2, 0) or 'no'} spatial dims",
            fix=f"give it dims N, C, spatial, with 1 to {most} spatial ones",
        )
    return len(dims) - 2


def check_spatial(name: str, values: object, least: int, rank: int | None = None) -> None:
    """Raise `InvalidRequest` unless a field has a whole number >= `least` for each of `rank` spatial dims.

    `rank`: None for any number of dims from 1 to 3.
    """
    if not isinstance(values, tuple) or not 1 <= len(values) <= 3 or not all(map(is_whole, values)):
        raise InvalidRequest(
            field=name,
            value=values,
            problem="must be a tuple of 1 to 3 whole numbers",
            fix=f"give one value per spatial dim, as in {name}={(values if is_whole(values) else 1,) * 2}",
        )
    for value in values:
        if not least <= value <= LARGEST:
            bound = f"at least {least}" if value < least else f"at most {LARGEST}"
            raise InvalidRequest(
                field=name,
                value=values,
                problem=f"has a value that is not from {least} to {LARGEST}",
                fix=f"make every value {bound}",
            )
    if rank is not None and len(values) != rank:
        raise InvalidRequest(
            field=name,
            value=values,
            problem=f"has {len(values)} values, but there are {rank} spatial dims",
            fix="give one value per spatial dim",
        )


def rearrangement(name: str, dims: Sequence[int], fits: Callable[[tuple[int, ...]], bool]) -> str:
    """How to rearrange an array that lacks its batch, or has its channels last: `x.transpose(2, 0, 1)[None]`.

    `fits` says whether the new dims fit. Empty if none do.
    """
    last = len(dims) - 1
    ways = {
        f"{name}[None]": (1, *dims),
        f"{name}.transpose{(last, *range(last))}[None]": (1, *dims[-1:], *dims[:-1]),
        f"{name}.transpose{(0, last, *range(1, last))}": (*dims[:1], *dims[-1:], *dims[1:-1]),
    }
    return next((way for way, made in ways.items() if last > 0 and made != tuple(dims) and fits(made)), "")


def are_several(value: object) -> TypeGuard[Sequence[Any]]:
    """Whether a value is a sequence, also one of NumPy's."""
    return isinstance(value, Sequence) or (isinstance(value, np.ndarray) and value.ndim > 0)


def spread(name: str, values: object, count: int) -> tuple[int, ...]:
    """One number for each spatial dim, from one for all or from one for each. Raises `InvalidRequest`."""
    each = values if are_several(values) else (values,) * count
    try:
        spread = tuple(map(as_index, each))
    except TypeError:
        spread = ()
    if len(spread) != count:
        raise InvalidRequest(
            field=name,
            value=values,
            problem=f"must be one whole number or {count} of them",
            fix="give one number, or one per spatial dim",
        )
    return spread


def sides(name: str, padding: object, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The padding before, and after, each of `count` spatial dims. Raises `InvalidRequest`; see `Padding`."""
    each = padding if are_several(padding) else (padding,) * count
    pairs = [tuple(one) if are_several(one) else (one, one) for one in each]
    try:
        made = [tuple(map(as_index, pair)) for pair in pairs]
    except TypeError:
        made = []
    if len(made) != count or any(len(pair) != 2 for pair in made):
        raise InvalidRequest(
            field=name,
            value=padding,
            problem=f"must be one whole number, or one or a pair of them for each of {count} spatial dims",
            fix=f"give one number for all sides, or pairs of before and after: {name}={((0, 1),) * count}",
        )
    before, after = (tuple(each) for each in zip(*made, strict=True))
    for side in (before, after):
        check_spatial(name, side, 0)
    return before, after
