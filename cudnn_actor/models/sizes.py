"""Sets of dims that a model is warmed or explained for, given as sizes of its named dims."""

from __future__ import annotations

import itertools
import keyword
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from cudnn_actor.models.source import Feature, dims_text
from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.types.checks import as_index, as_indices, did_you_mean
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["Sizes", "one_set_of_specs", "require_sizes_or_inputs", "sets_of_specs", "sizes_in"]

_OPTIONS = ("inputs", "measure", "timeout")
"""The other arguments of the methods that take sizes as keywords."""
Sizes = int | Sequence[int]
"""A size of a named dim, or several."""


def sets_of_specs(
    features: Sequence[Feature], sizes: Mapping[str, Any], most: int, field: str = "sizes"
) -> list[dict[str, TensorSpec]]:
    """The specs of a model's inputs, by name, for every combination of the sizes of its named dims.

    Raises `InvalidRequest` if a name is missing, unknown or has no whole sizes from 0 on, if an input has a
    dim without a name, and for more than `most` combinations. `field`: the name of the argument.
    """
    _check_known(features)
    names = _names(features)
    _require_sizes(field, sizes)
    count = math.prod(_length(value) for value in sizes.values() if isinstance(value, Sequence | np.ndarray))
    if count > most:  # before any size is looked at: a range may be long
        raise InvalidRequest(
            field=field,
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
            fix=f"give it: {_spell_size(missing[0], '1')}",
        )
    return [
        {each.name: _spec(each, dict(zip(choices, chosen, strict=True))) for each in features}
        for chosen in itertools.product(*choices.values())
    ]


def _length(several: Sequence[Any] | np.ndarray) -> int:
    """How many sizes are given for a dim; 1 for a value that is refused later."""
    try:
        return several.size or 1 if isinstance(several, np.ndarray) else len(several) or 1
    except OverflowError:  # a range may be longer than any list
        return sys.maxsize


def one_set_of_specs(features: Sequence[Feature], sizes: Mapping[str, Any]) -> dict[str, TensorSpec]:
    """The specs of a model's inputs for one size of each of its named dims. Raises `InvalidRequest`."""
    _require_sizes("sizes", sizes)
    for name, size in sizes.items():
        try:
            as_index(size)
        except TypeError:
            raise InvalidRequest(
                field=name,
                value=size,
                problem="must be one whole number",
                fix=f"use {_spell_size(name, '8')}",
            ) from None
    (specs,) = sets_of_specs(features, sizes, 1)
    return specs


def sizes_in(features: Iterable[Feature], inputs: Mapping[str, np.ndarray]) -> dict[str, int]:
    """The sizes that named dims have in the inputs of a run, which fit the model."""
    named = (
        pair for each in features for pair in zip(each.dims or (), inputs[each.name].shape, strict=False)
    )
    return {dim: size for dim, size in named if isinstance(dim, str)}


def require_sizes_or_inputs(features: Sequence[Feature], method: str) -> None:
    """Raise `InvalidRequest` if sizes of named dims are needed and none is given. `method`: the call that
    takes them."""
    names = _names(features)
    if not names or any(each.dims is None or None in each.dims for each in features):
        return
    keywords = [name for name in names if _is_keyword(name)]
    quoted = [name for name in names if name not in keywords]
    sizes = ", ".join(f"{name}=8" for name in keywords)
    mapping = ", ".join(f'"{name}": 8' for name in quoted)
    given = ", ".join([*filter(None, [sizes]), *([f"**{{{mapping}}}"] if quoted else [])])
    raise InvalidRequest(
        field=names[0],
        value=None,
        problem=f"is a dim of {_where(names[0], features)} and has no size",
        fix=f"give the size of {', '.join(names)}: {method}({given}), or inputs",
    )


def _names(features: Iterable[Feature]) -> list[str]:
    """The named dims of a model's inputs, in their order."""
    return list(dict.fromkeys(dim for each in features for dim in each.dims or () if isinstance(dim, str)))


def _check_known(features: Iterable[Feature]) -> None:
    """Raise `InvalidRequest` if an input's spec does not follow from sizes of named dims."""
    for each in features:
        if each.dtype is None or each.dims is None or None in each.dims:
            raise InvalidRequest(
                field=each.name,
                value=None if each.dims is None else dims_text(each.dims),
                problem="has dims without a name" if each.dtype is not None else f"is of type {each.kind}",
                fix="pass inputs with the dims that you want: await model.run(inputs)",
            )


def _choices(name: str, value: Any, names: Sequence[str]) -> tuple[int, ...]:
    """The sizes that are given for a dim, without repetitions."""
    if name not in names:
        raise InvalidRequest(
            field=name,
            value=value,
            problem="is no named dim of the model's inputs",
            fix=f"{did_you_mean(name, names)}use one of {', '.join(names)}" if names else "leave it out",
        )
    try:
        several = () if isinstance(value, str | bytes) else as_indices(value)
    except TypeError:
        several = ()
    if not several or min(several) < 0:
        raise InvalidRequest(
            field=name,
            value=value,
            problem="must be a whole number from 0 on, or a sequence of them",
            fix=f"use {_spell_size(name, '8')}, or {_spell_size(name, '(1, 8)')}",
        )
    return tuple(dict.fromkeys(several))


def _require_sizes(field: str, sizes: object) -> None:
    if not isinstance(sizes, Mapping):
        raise InvalidRequest(
            field=field,
            value=sizes,
            problem="is not a mapping of names of dims to sizes",
            fix='name each: {"N": 8}',
        )


def _spell_size(name: str, size: str) -> str:
    """How a caller gives a dim's size: as a keyword if that is possible, else in a mapping."""
    return f"{name}={size}" if _is_keyword(name) else f'{{"{name}": {size}}}'


def _is_keyword(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name) and name not in _OPTIONS


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
