"""Sets of dims that a model is warmed or explained for, given as sizes of its named dims."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cudnn_actor.models.source import Feature, shown
from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.types.checks import did_you_mean, is_whole, require_mapping
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["Sizes", "one_set_of_specs", "sets_of_specs"]

Sizes = int | Sequence[int]
"""A size of a named dim, or several."""


def sets_of_specs(
    features: Sequence[Feature], sizes: Mapping[str, Any], most: int
) -> list[dict[str, TensorSpec]]:
    """The specs of a model's inputs, by name, for every combination of the sizes of its named dims.

    Raises `InvalidRequest` if a name is missing, unknown or has no whole sizes from 0 on, if an input has a
    dim without a name, and for more than `most` combinations.
    """
    _check_known(features)
    names = list(dict.fromkeys(dim for each in features for dim in each.dims or () if isinstance(dim, str)))
    require_mapping("sizes", sizes, "names of dims to sizes", 'name each: {"N": 8}')
    count = math.prod(_length(value) for value in sizes.values() if isinstance(value, Sequence) and value)
    if count > most:  # before any of them is looked at: a range may be long
        raise InvalidRequest(
            field="sizes",
            value=dict(sizes),
            problem=f"are {count} sets of dims, and a model keeps {most}",
            fix="give fewer sizes",
        )
    choices = {name: _choices(name, value, names) for name, value in sizes.items()}
    missing = [name for name in names if name not in choices]
    if missing:
        raise InvalidRequest(
            field=missing[0],
            value=None,
            problem=f"is a dim of {_where(missing[0], features)} and has no size",
            fix=f"give it: {missing[0]}=1",
        )
    return [
        {each.name: _spec(each, dict(zip(choices, chosen, strict=True))) for each in features}
        for chosen in itertools.product(*choices.values())
    ]


def _length(several: Sequence[Any]) -> int:
    try:
        return len(several)
    except OverflowError:  # of a range that is longer than any list
        return sys.maxsize


def one_set_of_specs(features: Sequence[Feature], sizes: Mapping[str, Any]) -> dict[str, TensorSpec]:
    """The specs of a model's inputs for one size of each of its named dims. Raises `InvalidRequest`."""
    for name, size in sizes.items():
        if not is_whole(size):
            raise InvalidRequest(
                field=name, value=size, problem="must be one whole number", fix=f"use {name}=8"
            )
    (specs,) = sets_of_specs(features, sizes, 1)
    return specs


def _check_known(features: Iterable[Feature]) -> None:
    """Raise `InvalidRequest` if an input's spec does not follow from sizes of named dims."""
    for each in features:
        if each.dtype is None or each.dims is None or None in each.dims:
            raise InvalidRequest(
                field=each.name,
                value=None if each.dims is None else shown(each.dims),
                problem="has dims without a name" if each.dtype is not None else f"is a {each.kind}",
                fix="pass inputs with the dims that you want: await model.run(inputs)",
            )


def _choices(name: str, value: Any, names: Sequence[str]) -> tuple[int, ...]:
    """The sizes that are given for a dim, each once."""
    if name not in names:
        raise InvalidRequest(
            field=name,
            value=value,
            problem="is no named dim of the model's inputs",
            fix=f"{did_you_mean(name, names)}use one of {', '.join(names)}" if names else "leave it out",
        )
    several = (value,) if is_whole(value) else value
    fits = isinstance(several, Sequence) and all(is_whole(one) and one >= 0 for one in several)
    if not fits or not several:
        raise InvalidRequest(
            field=name,
            value=value,
            problem="must be a whole number from 0 on, or a sequence of them",
            fix=f"use {name}=8, or {name}=(1, 8)",
        )
    return tuple(dict.fromkeys(map(int, several)))


def _where(name: str, features: Iterable[Feature]) -> str:
    return " and ".join(each.name for each in features if each.dims and name in each.dims)


def _spec(feature: Feature, sizes: Mapping[str, int]) -> TensorSpec:
    """An input's spec. Raises `InvalidRequest`, about the input, if it is too large."""
    assert feature.dims is not None
    assert feature.dtype is not None
    dims = tuple(sizes[dim] if isinstance(dim, str) else int(dim or 0) for dim in feature.dims)
    try:
        return TensorSpec.packed(dims, feature.dtype)
    except InvalidRequest as error:
        raise error.about(feature.name) from None
