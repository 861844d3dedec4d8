"""The weights of a model that may be overwritten: their names and specs, and checks of new values."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from cudnn_actor.models.inputs import Values
from cudnn_actor.models.source import Origin, dims_text
from cudnn_actor.protocol.errors import InvalidRequest, Words
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.checks import did_you_mean, require_awaited
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["checked_weights", "derive", "specs_of"]

_SHOWN = 20


def specs_of(tensors: Mapping[str, np.ndarray], decided: Collection[str]) -> dict[str, TensorSpec]:
    """The initialisers that may be overwritten: name → spec. `decided`: the names of those whose values are
    part of a graph."""
    found = {}
    for name, array in tensors.items():
        dtype = DType.of(array.dtype)
        if dtype is not None and array.size and name not in decided:
            found[name] = TensorSpec.packed(array.shape, dtype)
    return found


def checked_weights(
    tensors: Mapping[str, np.ndarray], decided: Collection[str], values: Values, given: object
) -> dict[str, np.ndarray | BufferRef]:
    """The new values of weights, by name: copies of arrays, and references as they are.

    Raises `InvalidRequest` if a name or a value does not fit.
    """
    if not isinstance(given, Mapping):
        require_awaited("weights", given)
        raise InvalidRequest(
            field="weights",
            value=Words(type(given).__name__),
            problem="is not a mapping of names to arrays",
            fix='name each: {"layer1.weight": array}; model.weights lists the names',
        )
    known = specs_of(tensors, ())
    return {name: _check(name, known, decided, values, value) for name, value in given.items()}


def _check(
    name: Any, known: Mapping[str, TensorSpec], decided: Collection[str], values: Values, value: Any
) -> np.ndarray | BufferRef:
    if name in decided:
        raise InvalidRequest(
            field="weights",
            value=name,
            problem="decides over the model's graph: shapes, axes or factors follow from its values",
            fix="load the new file in the model's place: await gpu.load(new, replace=model)",
        )
    if name not in known:
        some = ", ".join([each for each in known if each not in decided][:_SHOWN])
        raise InvalidRequest(
            field="weights",
            value=name,
            problem="is no weight of the model",
            fix=f"{did_you_mean(name, known) if isinstance(name, str) else ''}use {some}",
        )
    require_awaited(name, value)
    if isinstance(value, BufferRef):
        _check_fits(name, (value.spec.dims, value.spec.dtype), value.spec.dtype, known[name])
        return value
    try:
        array = values(value)
    except InvalidRequest as error:
        raise error.about(name) from error
    if not isinstance(array, np.ndarray):
        raise InvalidRequest(
            field=name,
            value=Words(type(value).__name__),
            problem="is on a device, and what follows from weights is computed on the host",
            fix="move it to the host first (x.cpu().numpy() in PyTorch, cupy.asnumpy(x)), or give a buffer "
            "that has its values: await gpu.upload(x)",
        )
    _check_fits(name, (array.shape, DType.of(array.dtype)), array.dtype, known[name])
    return np.array(array)


def _check_fits(
    name: str, given: tuple[tuple[int, ...], DType | None], dtype: object, spec: TensorSpec
) -> None:
    """Raise `InvalidRequest` unless a value has a weight's dims and dtype. `dtype`: the value's dtype, for
    people."""
    if given != (spec.dims, spec.dtype):
        raise InvalidRequest(
            field=name,
            value=Words(f"{dtype} {dims_text(given[0])}"),
            problem=f"is not of the weight's dtype and dims, {spec.dtype} {dims_text(spec.dims)}",
            fix="give it as in the file: model.weights has the specs",
        )


def derive(origin: Origin, spec: TensorSpec, tensors: Mapping[str, np.ndarray], known: dict[str, Any]) -> Any:
    """A weight's values for these values of the initialisers. Raises `InvalidRequest` if they do not have the
    weight's dims."""
    names = ", ".join(sorted(origin.names))
    try:
        array = origin.derive(tensors, known)
        problem = "" if array.shape == spec.dims else f"of dims {array.shape}, not {spec.dims}"
    except Exception as error:  # noqa: BLE001 - whatever an operator says of values that it does not take
        problem = str(error)
    if problem:
        raise InvalidRequest(
            field="weights",
            value=names,
            problem=f"has values from which a constant of the model cannot be computed: {problem}",
            fix="load the new file in the model's place: await gpu.load(new, replace=model)",
        )
    return array
