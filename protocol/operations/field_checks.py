"""Checks that fields have their declared types: those of operations, and references to buffers."""

from __future__ import annotations

import enum
import functools
from types import UnionType
from typing import Any, Union, get_args, get_origin

import msgspec
import numpy as np

from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.operations import Operation, Window
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.checks import (
    fits_message,
    require_awaited,
    require_fits_message,
    require_member,
)
from cudnn_actor.protocol.types.conv import ConvSpec
from cudnn_actor.protocol.types.epilogue import Epilogue
from cudnn_actor.protocol.types.numerics import Numerics
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["check_inputs", "check_operation", "check_parameters", "require_field"]

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


def check_operation(message: Operation[BufferRef]) -> Operation[BufferRef]:
    """The operation, with each parameter exactly of its declared type: 1.0 for 1, a mode for its name.

    Raises `InvalidRequest` unless the fields have their types, and the operands fit together.
    """
    checked = check_inputs(message)
    for name in message.outputs:
        value = getattr(message, name)
        if value is not None or name not in message.optional:
            require_field(message, name, value, BufferRef)
    operands = message.named()
    checked.check({name: ref.spec for name, ref in operands})
    return checked


def check_inputs(message: Operation[BufferRef]) -> Operation[BufferRef]:
    """The operation, with parameters of their declared types, as by `check_operation`. Its outputs are not
    checked."""
    for name, kind in _field_types(type(message)).items():
        value = getattr(message, name)
        if name in message.inputs:
            several = get_origin(kind) is tuple
            if several or value is not None or name not in message.optional:
                require_field(message, name, value, tuple if several else BufferRef)
    for name, ref in message.named(message.inputs):
        require_field(message, name, ref, BufferRef)
    return check_parameters(message)


def check_parameters(operation: Operation[Any]) -> Operation[Any]:
    """The operation, with each parameter exactly of its declared type. Raises `InvalidRequest`."""
    changes: dict[str, Any] = {}
    for name, kind, exact in _parameters(type(operation)):
        value = getattr(operation, name)
        if type(value) not in exact:
            changes[name] = _parameter(operation, name, value, kind)
    return msgspec.structs.replace(operation, **changes)


@functools.cache
def _parameters(of: type[Operation[Any]]) -> list[tuple[str, Any, frozenset[Any]]]:
    """The parameters of an operation: the name, the declared type, and the types of values that fit as they
    are: the type itself, or those of a union whose values nothing converts."""
    operands = {*of.inputs, *of.outputs}
    return [
        (name, kind, frozenset({kind} | ({*get_args(kind)} & _UNCHANGED if _is_union(kind) else set())))
        for name, kind in _field_types(of).items()
        if name not in operands
    ]


_UNCHANGED = {float, bool, str, type(None)}


def _is_union(kind: Any) -> bool:
    return get_origin(kind) in (Union, UnionType)


def require_field(message: object, name: str, value: object, expected: type) -> None:
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
    """The fix for an operand that is left out."""
    if isinstance(message, Operation):
        if name in message.outputs:
            return "allocate it: await gpu.empty(dims), or use await gpu.apply(operation)"
    elif name in _RESULTS:
        return "allocate it: await gpu.empty(dims)"
    return "give a buffer: the output of another request, or await gpu.upload(array)"


@functools.cache
def _field_types(kind: type[Operation[Any]]) -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(kind)}


def _parameter(message: Operation[Any], name: str, value: object, kind: Any) -> Any:
    """A parameter as its declared type. Raises `InvalidRequest` for a value of another type."""
    kinds = get_args(kind) or (kind,)
    if all(isinstance(one, type) and issubclass(one, msgspec.Struct) for one in kinds):
        if not isinstance(value, kinds):
            require_field(message, name, value, kinds[0])
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
        return f"a tuple of {_words(get_args(kind)[0]).removeprefix('a ')}s"
    if get_args(kind):
        return " or ".join(map(_words, get_args(kind)))
    return _WORDS.get(kind) or f"a {kind.__name__}"


def _plain(value: Any) -> Any:
    """One of NumPy's numbers as Python's."""
    return value.item() if isinstance(value, np.number) else value
