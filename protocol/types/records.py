"""The base classes of records: of parameters, operations and messages.

Records are frozen, their fields are given by name, and unknown fields are refused. msgspec's own errors about
arguments do not name the class, so a metaclass raises errors that do. This makes a call of the class from
Python code up to a microsecond longer; decoding and `msgspec.structs.replace` do not call it.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, dataclass_transform

import msgspec

from cudnn_actor.protocol.types.short_repr import short_repr
from cudnn_actor.protocol.types.spelling import own_name

__all__ = ["Parameters", "Record"]

_OPTIONS = {"frozen": True, "kw_only": True, "forbid_unknown_fields": True}


class _RecordMeta(msgspec.StructMeta):
    """Makes classes of records: their options, and the errors about arguments that are not their fields."""

    def __new__(
        cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any], **options: Any
    ) -> _RecordMeta:
        return super().__new__(cls, name, bases, namespace, **(_OPTIONS | options))

    if not TYPE_CHECKING:  # else pyright takes its result, Any, for that of every constructor

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            """Make a record."""
            try:
                return super().__call__(*args, **kwargs)
            except TypeError as error:
                problem = _problem(cls, args, kwargs)
                if problem is None:
                    raise
                raise TypeError(problem) from error.__cause__


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(msgspec.field,))
class Record(msgspec.Struct, frozen=True, metaclass=_RecordMeta):
    """The base of records. The constructor's `TypeError` names the class, its fields, and a fix.

    A class attribute `example` is the fix: how such a record is made.
    """

    __repr__ = short_repr


class Parameters(Record, cache_hash=True, gc=False):
    """The base of records that hold no other records, and are hashed often."""


def _problem(cls: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str | None:
    """The problem with the arguments, and its fix; None if they fit the fields."""
    name, parameters = cls.__name__, inspect.signature(cls).parameters
    if not parameters:
        return f"{name} has no fields: write {name}()"
    needed = [each for each, one in parameters.items() if one.default is one.empty]
    inputs = getattr(cls, "inputs", ())  # an operation's come first; other records have a field of that name
    operands = inputs if isinstance(inputs, tuple) else ()
    first = sorted(needed, key=lambda each: each not in operands) or [next(iter(parameters))]
    example = getattr(cls, "example", f"{name}({', '.join(f'{each}=...' for each in first)})")
    if args:
        return f"{name} takes its fields by name, not by position: write {example}"
    for given in kwargs:
        if given not in parameters:
            hint = own_name(given, parameters)
            return f"{name} has no field {given!r}; {hint}its fields are {', '.join(parameters)}: {example}"
    missing = [each for each in needed if each not in kwargs]
    return f"{name} needs {', '.join(missing)}: {example}" if missing else None
