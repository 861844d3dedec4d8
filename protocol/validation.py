"""Checks of a compute message before it is lowered: types, shapes, dtypes."""

from __future__ import annotations

import enum
import functools
import math
from typing import Any, get_args, get_origin

import msgspec
import numpy as np

from cudnn_actor.protocol.buffers import BufferRef
from cudnn_actor.protocol.checks import (
    fits_message,
    is_finite,
    require_awaited,
    require_fits_message,
    require_member,
)
from cudnn_actor.protocol.conv import ConvSpec
from cudnn_actor.protocol.dtypes import DType
from cudnn_actor.protocol.epilogue import Epilogue
from cudnn_actor.protocol.errors import InvalidRequest, Words
from cudnn_actor.protocol.messages import ConvBwdData, ConvBwdFilter, ConvFwd
from cudnn_actor.protocol.numerics import Numerics
from cudnn_actor.protocol.operations import Operation, Window
from cudnn_actor.protocol.operations.convolution import Convolution
from cudnn_actor.protocol.tensor import TensorSpec

__all__ = [
    "check_bias",
    "check_dtypes",
    "check_inputs",
    "check_operation",
    "check_parameters",
    "check_scalars",
    "check_types",
]

_FIELD_TYPES: dict[str, type] = {
    "conv": ConvSpec,
    "epilogue": Epilogue,
    "numerics": Numerics,
}
_FIXES: dict[type, str] = {
    BufferRef: "upload arrays first: await gpu.upload(array)",
    ConvSpec: "pass one, as in ConvSpec.symmetric(2)",
    Epilogue: 'pass one, as in Epilogue(activation="relu")',
    Numerics: "pass one, as in Numerics(tf32=True)",
    Window: "pass one, as in Window.symmetric(2, size=3)",
    tuple: "pass a tuple of buffers, as in operands=(a, b)",
}
_WORDS = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    type(None): "None",
}
_RESULTS = ("y", "dx", "dw")
"""The fields of the convolutions' messages that are written."""
_RESULT_DTYPES = {
    DType.FLOAT64: (DType.FLOAT64,),
    DType.FLOAT32: (DType.FLOAT32,),
    DType.FLOAT16: (DType.FLOAT16, DType.FLOAT32),
    DType.BFLOAT16: (DType.BFLOAT16, DType.FLOAT32),
    DType.INT8: (DType.INT32, DType.INT8, DType.FLOAT32),
    DType.UINT8: (DType.INT32, DType.UINT8, DType.FLOAT32),
}
"""What can hold the results of a convolution of these."""


def check_types(message: ConvFwd | ConvBwdData | ConvBwdFilter) -> None:
    """Raise `InvalidRequest` unless every field of a message has its declared type."""
    for name in message.__struct_fields__:
        value = getattr(message, name)
        expected = _FIELD_TYPES.get(name, BufferRef)
        if name in ("alpha", "beta") or (name == "bias" and value is None):
            continue
        _require(message, name, value, expected)


def _require(message: object, name: str, value: object, expected: type) -> None:
    """Raise `InvalidRequest` unless a field's value has the type that the message takes."""
    if value is None and expected is BufferRef:
        raise InvalidRequest(field=name, value=None, problem="is left out", fix=_missing(message, name))
    if not isinstance(value, expected) or isinstance(value, bool):
        require_awaited(name, value)
        given, wanted = type(value).__name__, expected.__name__
        raise InvalidRequest(
            field=name,
            value=value,
            problem=f"has type {given}, but {type(message).__name__} takes {wanted}",
            fix=_FIXES.get(expected, f"pass a {wanted}"),
        )
    if isinstance(value, BufferRef) and not isinstance(value.spec, TensorSpec):
        raise InvalidRequest(
            field=name,
            value=value.spec,
            problem="is not a TensorSpec",
            fix="pass references unchanged, as the service returned them",
        )


def _missing(message: object, name: str) -> str:
    """What to do about an operand that is left out."""
    if isinstance(message, Operation):
        if name in message.outputs:
            return "allocate it: await gpu.empty(dims), or use await gpu.apply(operation)"
    elif name in _RESULTS:
        return "allocate it: await gpu.empty(dims)"
    return "give a buffer: the output of another request, or await gpu.upload(array)"


def check_operation(message: Operation[BufferRef]) -> Operation[BufferRef]:
    """The operation, with each parameter exactly of its declared type: 1.0 for 1, a mode for its name.

    Raises `InvalidRequest` unless the fields have their types, and the operands fit together.
    """
    checked = check_inputs(message)
    for name in message.outputs:
        value = getattr(message, name)
        if value is not None or name not in message.optional:
            _require(message, name, value, BufferRef)
    operands = message.named()
    checked.check({name: ref.spec for name, ref in operands})
    return checked


def check_inputs(message: Operation[BufferRef]) -> Operation[BufferRef]:
    """The same without the outputs."""
    for name, kind in _field_types(type(message)).items():
        value = getattr(message, name)
        if name in message.inputs:
            several = get_origin(kind) is tuple
            if several or value is not None or name not in message.optional:
                _require(message, name, value, tuple if several else BufferRef)
    for name, ref in message.named(message.inputs):
        _require(message, name, ref, BufferRef)
    return check_parameters(message)


def check_parameters(operation: Operation[Any]) -> Operation[Any]:
    """The operation, with each parameter exactly of its declared type. Raises `InvalidRequest`."""
    changes: dict[str, Any] = {}
    for name, kind in _field_types(type(operation)).items():
        if name in operation.inputs or name in operation.outputs:
            continue
        value = getattr(operation, name)
        if type(value) is not kind:
            changes[name] = _parameter(operation, name, value, kind)
    return msgspec.structs.replace(operation, **changes)


@functools.cache
def _field_types(kind: type[Operation[Any]]) -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(kind)}


def _parameter(message: Operation[Any], name: str, value: object, kind: Any) -> Any:
    """A parameter as its declared type. Raises `InvalidRequest` for a value of another type."""
    kinds = get_args(kind) or (kind,)
    if all(isinstance(one, type) and issubclass(one, msgspec.Struct) for one in kinds):
        if not isinstance(value, kinds):
            _require(message, name, value, kinds[0])
        return value
    if kind is int and not fits_message(value):
        return value  # out of the operation's own range, which its check names
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        try:
            return kind(value)
        except ValueError:
            require_member(name, value, kind)
    given = tuple(map(_plain, value)) if isinstance(value, tuple) else _plain(value)
    try:
        converted = msgspec.convert(given, kind)
        wrong = isinstance(converted, msgspec.Struct) and converted is not value  # made from a dict
    except msgspec.ValidationError:
        wrong = True
    if wrong:
        raise InvalidRequest(
            field=name,
            value=value,
            problem="has the wrong type",
            fix=f"pass {_words(kind)}",
        )
    require_fits_message(name, value)
    return converted


def _words(kind: Any) -> str:
    """The type of a parameter, for people."""
    if get_origin(kind) is tuple:
        return f"a tuple of {_WORDS[get_args(kind)[0]].removeprefix('a ')}s"
    if get_args(kind):
        return " or ".join(map(_words, get_args(kind)))
    return _WORDS.get(kind) or f"a {kind.__name__}"


def _plain(value: Any) -> Any:
    """One of NumPy's numbers as Python's."""
    return value.item() if isinstance(value, np.number) else value


def check_scalars(message: ConvFwd | ConvBwdData | ConvBwdFilter) -> None:
    """Raise `InvalidRequest` unless alpha and beta are finite: `signature` does not cover their values."""
    for name in ("alpha", "beta"):
        value = getattr(message, name)
        if type(value) is float and math.isfinite(value):
            continue  # the common case, checked first for speed
        if not is_finite(value):
            fix = f"pass a float, as in {name}=1.0"
            raise InvalidRequest(field=name, value=value, problem="must be a finite number", fix=fix)


def check_dtypes(specs: dict[str, TensorSpec], operation: type[Convolution[Any]]) -> None:
    """Raise `InvalidRequest` unless both operands have one dtype, which a convolution takes, and the result's
    dtype is allowed for it.

    Integers that only the forward one takes are refused by the others with their graph, as the engine does.
    """
    (first, a), (second, b), (result, out) = specs.items()
    if a.dtype is not b.dtype:
        raise InvalidRequest(
            field=second,
            value=Words(b.dtype),
            problem=f"differs from the dtype of {first}, {a.dtype.value}",
            fix="convert one of them when you upload: upload(array, dtype=...)",
        )
    allowed = _RESULT_DTYPES.get(a.dtype)
    if allowed is None:
        raise InvalidRequest(
            field=first,
            value=Words(a.dtype),
            problem=f"is not a dtype that {operation.kind} takes",
            fix=f"convert both operands to one of {', '.join(operation.dtypes)}, "
            'as in upload(array, dtype="float32")',
        )
    if out.dtype not in allowed:
        raise InvalidRequest(
            field=result,
            value=Words(out.dtype),
            problem=f"cannot hold the result of {a.dtype.value} operands",
            fix=f"use {' or '.join(allowed)}",
        )


def check_bias(spec: TensorSpec, broadcast: tuple[int, ...], dtypes: tuple[DType, ...]) -> None:
    """Raise `InvalidRequest` unless a bias has one value per filter, of one of `dtypes`."""
    filters = broadcast[1]
    if spec.dims not in ((filters,), broadcast):
        raise InvalidRequest(
            field="bias",
            value=spec.dims,
            problem=f"must have one value for each of the {filters} filters",
            fix=f"give it dims {(filters,)} or {broadcast}",
        )
    if spec.dtype not in dtypes:
        raise InvalidRequest(
            field="bias",
            value=Words(spec.dtype),
            problem=f"cannot be added to {dtypes[0]}",
            fix=f"use {' or '.join(dict.fromkeys(dtypes))}",
        )
