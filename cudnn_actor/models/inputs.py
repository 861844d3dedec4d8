"""Checks of the inputs that a run of a model is given: their names, dtypes and dims."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import numpy as np

from cudnn_actor.models.source import Dims, Feature, Features, dims_text
from cudnn_actor.protocol.errors import InvalidRequest, Words
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.checks import did_you_mean, require_awaited, require_names
from cudnn_actor.protocol.types.device_array import DeviceArray
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.spatial import rearrangement
from cudnn_actor.protocol.types.tensor import Layout, TensorSpec

__all__ = ["Alike", "checked_inputs", "named_once", "spec_of"]

_OPTIONS = ("keep", "timeout")
"""The names of a run's other arguments. An input of such a name cannot be given as a keyword."""
Values = Callable[[Any], np.ndarray | DeviceArray]
"""A function that makes an array of a user's value. It raises `InvalidRequest`."""


def named_once(inputs: object, named: Mapping[str, Any]) -> Mapping[str, Any]:
    """A model's inputs, given in a mapping and as keywords. Raises `InvalidRequest` if one is in both."""
    if not named or not (inputs is None or isinstance(inputs, Mapping)):
        return {} if inputs is None else inputs  # type: ignore[return-value]  # another type is refused
    for name in named.keys() & (inputs or {}).keys():
        raise InvalidRequest(field=name, value=named[name], problem="is given twice", fix="give it once")
    return {**(inputs or {}), **named}


class Alike(NamedTuple):
    """The facts about an earlier run's inputs. Inputs with the same facts need no further checks.

    Parameters
    ----------
    kinds
        The name, dims and dtype of each input. All are arrays.
    specs
        The specs of the inputs, by name. All runs with such inputs get this same dict; nobody changes it.
    """

    kinds: tuple[tuple[str, tuple[int, ...], np.dtype[Any]], ...]
    specs: Mapping[str, TensorSpec]

    @classmethod
    def to(cls, given: Mapping[str, BufferRef | np.ndarray]) -> Alike | None:
        """The facts about inputs that `checked_inputs` has returned; None if some are no arrays."""
        arrays = [(name, each) for name, each in given.items() if not isinstance(each, BufferRef)]
        if len(arrays) < len(given):
            return None
        kinds = tuple((name, array.shape, array.dtype) for name, array in arrays)
        return cls(kinds, {name: spec_of(array) for name, array in arrays})

    def views(self, inputs: Mapping[str, Any]) -> dict[str, np.ndarray] | None:
        """The result of `checked_inputs` for inputs, if they are like these; else None."""
        if type(inputs) is not dict or len(inputs) != len(self.kinds):
            return None
        views: dict[str, np.ndarray] = {}
        for name, dims, dtype in self.kinds:
            array = inputs.get(name)
            if type(array) is not np.ndarray or array.shape != dims or array.dtype != dtype:
                return None
            views[name] = array[...]
        return views


def checked_inputs(
    source: Features, values: Values, inputs: Mapping[str, Any], keep: Collection[str] = ()
) -> dict[str, BufferRef | np.ndarray]:
    """The inputs of a run as references and arrays, by name. Raises `InvalidRequest` if they do not fit the
    model, or if a name in `keep` is no output of it.
    """
    _check_names(source, inputs)
    if keep:
        require_names("keep", keep, {each.name: each for each in source.outputs}, "the model")
    chosen = source.inputs
    if len(inputs) > len(chosen):
        chosen += tuple(each for each in source.defaults if each.name in inputs)
    given = {each.name: _input(each, inputs[each.name], values) for each in chosen}
    _check_dims(chosen, given)
    return given


def _check_names(source: Features, inputs: object) -> None:
    if type(inputs) is dict and [*inputs] == [each.name for each in source.inputs]:  # nearly always
        return
    if not isinstance(inputs, Mapping):
        require_awaited("inputs", inputs)
        raise InvalidRequest(
            field="inputs",
            value=Words(type(inputs).__name__),
            problem="is not a mapping of names to arrays",
            fix=f"name each: {', '.join(each.name for each in source.inputs)}",
        )
    wanted = [each.name for each in source.inputs]
    known = [*wanted, *(each.name for each in source.defaults)]
    for name in [*inputs, *wanted]:
        if name not in known or name not in inputs:
            missing = name in wanted
            hint = "" if missing else did_you_mean(name, known)
            if missing and name in _OPTIONS:
                hint = f'name it in a mapping, as in run(model, {{"{name}": array}}): '
            raise InvalidRequest(
                field="inputs",
                value=name,
                problem="is an input that is missing" if missing else "is no input of the model",
                fix=f"{hint}give {', '.join(wanted if missing else known[: max(len(wanted), 20)])}",
            )


def _input(feature: Feature, value: Any, values: Values) -> BufferRef | np.ndarray:
    """The value of an input: a reference, or an array of the input's dtype."""
    kind = ""  # the value has no dtype until it is an array
    if not isinstance(value, BufferRef):
        if type(value) is not np.ndarray:
            require_awaited(feature.name, value)
            kind = "" if hasattr(value, "dtype") else type(value).__name__
        try:
            value = values(value)
        except InvalidRequest as error:
            raise error.about(feature.name) from error
    if isinstance(value, DeviceArray):
        raise InvalidRequest(
            field=feature.name,
            value=Words("array"),
            problem="is on the device, where a model takes references only",
            fix="upload it first: await gpu.upload(array)",
        )
    dtype = value.spec.dtype if isinstance(value, BufferRef) else DType.of(value.dtype)
    if dtype is None or dtype is not feature.dtype:
        found, wanted = str(dtype or value.dtype), feature.dtype or feature.kind
        problem = f"is read as {found}, and the input is {wanted}"
        raise InvalidRequest(
            field=feature.name,
            value=Words(kind or found),
            problem=problem if kind else f"is not the dtype of the input, which is {wanted}",
            fix=_conversion(feature, uploaded=isinstance(value, BufferRef)),
        )
    if isinstance(value, BufferRef) and value.spec.layout is Layout.STRIDED:
        raise InvalidRequest(
            field=feature.name, value=value, problem="has gaps between its elements", fix="copy it"
        )
    # A view keeps its shape, even if the caller gives the array another one before the run begins.
    return value[...] if isinstance(value, np.ndarray) else value


def _check_dims(features: Sequence[Feature], given: Mapping[str, Any]) -> None:
    """Raise `InvalidRequest` unless the inputs' dims fit what the model says, and each other."""
    named: dict[str, int] = {}
    for feature in features:
        try:
            dims = spec_of(given[feature.name]).dims
        except InvalidRequest as error:  # the value has too many dims
            raise error.about(feature.name) from None
        if feature.dims is None or feature.dims == dims:
            continue
        bound = dict(named)
        problem = of_name = ""
        if len(dims) != len(feature.dims):
            problem = f"it has {len(dims)} dims, not {len(feature.dims)}"
        for place, (size, dim) in enumerate(zip(dims, feature.dims, strict=False)):
            wanted = named.setdefault(dim, size) if isinstance(dim, str) else dim
            if not problem and wanted is not None and size != wanted:
                of_name = "; dims with one name must be equal" if isinstance(dim, str) else ""
                as_it_is = f", as {dim} is in other dims" if of_name else ""
                problem = f"dim {place} is {size}, not {wanted}{as_it_is}"
        if problem:
            way = rearrangement("array", dims, partial(_fits, feature.dims, bound))
            raise InvalidRequest(
                field=feature.name,
                value=dims,
                problem=f"does not fit {dims_text(feature.dims)}: {problem}",
                fix=f"give {way or 'an array that fits'}{of_name}",
            )


def _fits(wanted: Dims, bound: Mapping[str, int], dims: Sequence[int]) -> bool:
    """Whether dims have the rank and the sizes that are wanted. `bound`: the sizes that names have so far."""
    named = dict(bound)
    return len(dims) == len(wanted) and all(
        dim is None or size == (named.setdefault(dim, size) if isinstance(dim, str) else dim)
        for size, dim in zip(dims, wanted, strict=True)
    )


def _conversion(feature: Feature, *, uploaded: bool) -> str:
    """The text that tells how a value gets an input's dtype. NumPy itself does not know bfloat16 by its
    name."""
    dtype = feature.dtype
    if dtype is None:
        return "models with such inputs cannot be run"
    given = feature.name if feature.name.isidentifier() else "array"
    name = "ml_dtypes.bfloat16" if dtype is DType.BFLOAT16 else repr(str(dtype))
    if uploaded:
        return f"upload it in that dtype: await gpu.upload((await gpu.download({given})).astype({name}))"
    return f"convert it: numpy.asarray({given}, {name})"


def spec_of(value: BufferRef | np.ndarray) -> TensorSpec:
    """The spec of an input's buffer, or of an array once it is uploaded. Raises `InvalidRequest` for too many
    dims."""
    return value.spec if isinstance(value, BufferRef) else _pack(value.shape, value.dtype)


@lru_cache(maxsize=256)
def _pack(dims: tuple[int, ...], dtype: np.dtype[Any]) -> TensorSpec:
    """The spec of an array of these dims and this dtype. It is cached, because each run asks for the same
    specs."""
    return TensorSpec.packed(dims, dtype)
