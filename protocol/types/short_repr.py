"""Reprs of records: one line of bounded length, however much a record holds."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec

from cudnn_actor.protocol.errors import described_array

__all__ = ["LONGEST", "listing", "one_line", "short_repr", "shown_value"]

LONGEST: Final = 100
"""The most characters of a record's repr."""
_LONGEST_FIELD, _MOST_ITEMS = 48, 8
"""The most characters of a field's value, and the most items of a collection whose items are shown."""
_READABLE = 100_000
"""Numbers from here on are shown without an exponent."""


def short_repr(record: msgspec.Struct) -> str:
    """`Name(field=value, ...)`: first the fields that every record of the class is given, then those that
    differ from their defaults, as many as there is room for.

    To be a record's `__repr__`. Values of arrays are not read.
    """
    name = type(record).__name__
    texts: list[str] = []
    told = list(_fields_to_tell(record))
    room = LONGEST - len(f"{name}()")
    for number, (field, value) in enumerate(told, 1):
        text = f"{field}={shown_value(value)}"
        room -= len(text) + len(", ") * bool(texts)
        if room < len(", ...") * (number < len(told)):
            texts.append("...")
            break
        texts.append(text)
    return f"{name}({', '.join(texts)})"


def one_line(text: str, longest: int = LONGEST) -> str:
    """A text with a question mark for what cannot be printed, and three dots for what is too long."""
    cut = text if len(text) <= longest else f"{text[: longest - 3]}..."
    return cut if cut.isprintable() else "".join(each if each.isprintable() else "?" for each in cut)


def listing(texts: Iterable[str], count: int, room: int) -> str:
    """The first of `count` texts, as many as fit into `room` characters but at least one, and how many more
    there are."""
    shown: list[str] = []
    for text in texts:
        room -= len(text) + len(", ") * bool(shown)
        if shown and room < 0:
            break
        shown.append(text)
    return ", ".join(shown) + (f" and {count - len(shown)} more" if len(shown) < count else "")


def _fields_to_tell(record: msgspec.Struct) -> Iterator[tuple[str, Any]]:
    fields = msgspec.structs.fields(type(record))
    for field in fields:
        if field.required:
            yield field.name, getattr(record, field.name)
    for field in fields:
        value = getattr(record, field.name)
        if not (field.required or _is_default(field, value)):
            yield field.name, value


def _is_default(field: msgspec.structs.FieldInfo, value: Any) -> bool:
    factory = field.default_factory
    default = field.default if factory is msgspec.NODEFAULT else factory()
    # Of one type: an array would be compared element by element.
    return value is default or (type(value) is type(default) and bool(value == default))


def shown_value(value: Any) -> str:
    """A field's value, on one line of bounded length. Values of arrays are not read."""
    if isinstance(value, enum.Enum):
        value = value.value
    if isinstance(value, float):
        text = repr(value)
        return text if len(text) <= _MOST_ITEMS else f"{value:{'.6g' if abs(value) < _READABLE else '.1f'}}"
    if isinstance(value, str | bytes):  # cut before it is quoted, which may make it longer
        return one_line(repr(value[: _LONGEST_FIELD + 1]), _LONGEST_FIELD)
    if isinstance(value, tuple | list | set | frozenset | dict):
        return _collection(value)
    array = described_array(value)
    if array is not None:
        return array
    text = repr(value)
    if len(text) > _LONGEST_FIELD and text.endswith((">", ")")):
        return f"{one_line(text, _LONGEST_FIELD - 1)}{text[-1]}"
    return one_line(text, _LONGEST_FIELD)


def _collection(values: Any) -> str:
    """The items of a collection if there is room for them, else how many it has."""
    counted = f"<{type(values).__name__} of {len(values)}>"
    if len(values) > _MOST_ITEMS:
        return counted
    if isinstance(values, dict):
        items = (f"{shown_value(key)}: {shown_value(value)}" for key, value in values.items())
        text = f"{{{', '.join(items)}}}"
    else:
        first, last = "()" if isinstance(values, tuple) else "[]" if isinstance(values, list) else "{}"
        comma = "," if isinstance(values, tuple) and len(values) == 1 else ""
        text = f"{first}{', '.join(map(shown_value, values))}{comma}{last}"
    return text if len(text) <= _LONGEST_FIELD else counted
