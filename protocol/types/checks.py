"""Checks of single values; errors name the field, the value and the fix."""

from __future__ import annotations

import difflib
import enum
import inspect
import math
import numbers
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeGuard

from cudnn_actor.protocol.errors import InvalidRequest, Words

__all__ = [
    "are_ints",
    "as_index",
    "as_indices",
    "as_number",
    "as_plain",
    "check_result",
    "did_you_mean",
    "is_finite",
    "is_whole",
    "require_awaited",
    "require_choice",
    "require_fits_message",
    "require_flag",
    "require_fraction",
    "require_mapping",
    "require_member",
    "require_name",
    "require_names",
    "require_seconds",
    "require_type",
    "require_whole",
]

_LARGEST, _MOST_LISTED = (1 << 63) - 1, 20


def is_whole(value: object) -> TypeGuard[int]:
    """Whether a value is an int. Bools do not count."""
    return isinstance(value, int) and not isinstance(value, bool)


def are_ints(numbers: object) -> TypeGuard[tuple[int, ...]]:
    """Whether numbers are a tuple of ints and nothing else: no bools, and no subclass. It takes 0.3 us."""
    return type(numbers) is tuple and _INT.issuperset(map(type, numbers))


_INT = frozenset((int,))


def is_finite(value: object) -> TypeGuard[float]:
    """Whether a value is a finite number. Bools do not count, nor do ints that need more than 64 bits."""
    if isinstance(value, int):
        return not isinstance(value, bool) and -_LARGEST <= value <= _LARGEST
    try:
        return isinstance(value, numbers.Real) and math.isfinite(value)
    except OverflowError:  # a fraction larger than the largest float
        return False


def fits_message(value: object) -> bool:
    """Whether a number can be encoded in a message: an int only if it has at most 64 bits."""
    return not isinstance(value, int) or -(1 << 63) <= value < 1 << 64


def require_fits_message(field: str, value: object) -> None:
    """Raise `InvalidRequest` for an int that cannot be encoded, where a float can take its place."""
    if not fits_message(value):
        raise InvalidRequest(
            field=field, value=value, problem="has more than 64 bits", fix="pass a float, as in 1e30"
        )


def as_index(value: object) -> int:
    """A whole number, also one of NumPy's, as an int. Raises `TypeError` for anything else, and for bools."""
    if isinstance(value, bool):
        raise TypeError
    return operator.index(value)  # type: ignore[arg-type]


def as_plain(value: Any) -> Any:
    """A whole number of NumPy's as an int; anything else as it is."""
    try:
        return as_index(value)
    except TypeError:
        return value


def as_indices(value: object) -> tuple[int, ...]:
    """One whole number or several, also NumPy's, as ints. Raises `TypeError` for anything else, and bools."""
    several = value if isinstance(value, Sequence) or getattr(value, "ndim", 0) == 1 else (value,)
    return tuple(map(as_index, several))  # type: ignore[call-overload]


def as_number(field: str, value: object, *, unsigned: bool = False) -> float | int:
    """A number, also one of NumPy's, as an int or a float. Raises `InvalidRequest` for anything else.

    `unsigned`: whether it may be as large as a uint64.
    """
    problem = "is neither a tensor nor a number"
    fix = "pass an int or a float, or declare an array as an input: g.input(name, dims)"
    if isinstance(value, bool):
        problem, fix = "is a truth value, not a number", "use 1 or 0"
    elif isinstance(value, numbers.Real):
        try:
            if not isinstance(value, numbers.Integral):
                return float(value)
            number = int(value)
            if -(1 << 63) <= number < 1 << (64 if unsigned else 63):
                return number
        except OverflowError:
            pass
        problem, fix = "is beyond the range of numbers in graphs", "use a float, at most 1.8e308"
    elif isinstance(value, complex):
        fix = "compute its real and imaginary parts apart"
    elif isinstance(value, numbers.Number):  # a Decimal: not to be taken for a float
        fix = "convert it: float(value)"
        value = Words(repr(value))
    elif getattr(value, "shape", None) == () and hasattr(value, "item"):  # an array of one number
        fix = "take the number out of it: value.item()"
    raise InvalidRequest(field=field, value=value, problem=problem, fix=fix)


def did_you_mean(given: object, known: Iterable[str]) -> str:
    """The start of a fix for a misspelt name, such as `did you mean "NHWC"? `; empty if no name is similar.

    Ignores case.
    """
    near = _nearest(given, {word: str(word) for word in known})
    return f'did you mean "{near}"? ' if near else ""


def _nearest(given: object, known: Mapping[str, str]) -> str:
    """The value in `known` of the key most similar to a string; empty if no key is similar."""
    if not isinstance(given, str):
        return ""
    folded = {word.casefold(): meant for word, meant in known.items()}
    near = difflib.get_close_matches(given.casefold(), folded, n=1, cutoff=0.6)
    return folded[near[0]] if near else ""


def require_flag(field: str, value: object) -> None:
    """Raise `InvalidRequest` unless `value` is True or False: "no" would count as true."""
    if not isinstance(value, bool):
        raise InvalidRequest(
            field=field, value=value, problem="is neither True nor False", fix="pass one of them"
        )


def require_whole(
    field: str, value: object, least: int, most: int | None = None, *, of_bytes: bool = False
) -> int:
    """A whole number, also one of NumPy's, from `least` to `most`, as an int; of bytes if `of_bytes`.

    `most` is 2**63 - 1 unless given.
    Raises `InvalidRequest` for anything else.
    """
    try:
        number = as_index(value)
    except TypeError:
        number = least - 1
    if not least <= number <= (most or _LARGEST):
        raise InvalidRequest(
            field=field,
            value=value,
            problem=f"must be a whole number{' of bytes' * of_bytes} from {least} to {most or '2**63 - 1'}",
            fix=f"use a number in that range{', as in 1 << 30' * of_bytes}",
        )
    return number


def check_result(
    name: str, got: tuple[int, ...], wanted: tuple[int, ...], what: str, *, gradient: str = ""
) -> None:
    """Raise `InvalidRequest` unless a result has the dims that follow from its operands.

    `gradient` names the operand whose dims the caller chose: they may be wrong instead.
    """
    if got != wanted:
        fix = f"give it dims {wanted}" + (f", or give {gradient} other dims" if gradient else "")
        raise InvalidRequest(field=name, value=got, problem=f"is not the shape {what}", fix=fix)


def require_seconds(field: str, value: object, *, positive: bool = False) -> None:
    """Raise `InvalidRequest` unless `value` is a finite number of seconds, >= 0, or > 0 if `positive`."""
    if not is_finite(value) or value < 0 or (positive and value == 0):
        least = "> 0" if positive else "≥ 0"
        raise InvalidRequest(
            field=field,
            value=value,
            problem=f"must be a finite number of seconds {least}",
            fix="give seconds, as in 0.5",
        )


def require_mapping(field: str, value: object, of: str, fix: str) -> None:
    """Raise `InvalidRequest` unless `value` is a mapping, of names to what `of` says, or None."""
    if not (value is None or isinstance(value, Mapping)):
        raise InvalidRequest(field=field, value=value, problem=f"is not a mapping of {of}", fix=fix)


def require_fraction(field: str, value: object) -> None:
    """Raise `InvalidRequest` unless `value` is a number from 0 to 1."""
    if not is_finite(value) or not 0 <= value <= 1:
        raise InvalidRequest(
            field=field, value=value, problem="must be a number from 0 to 1", fix="use 0.01 for one percent"
        )


def require_name(field: str, value: object) -> None:
    """Raise `InvalidRequest` unless `value` is a non-empty string that UTF-8 can encode."""
    if not isinstance(value, str) or not value:
        raise InvalidRequest(
            field=field,
            value=value,
            problem="must be a non-empty string",
            fix="give a name, as in 'left'",
        )
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(
            field=field,
            value=value,
            problem="has half of a surrogate pair, which UTF-8 cannot encode",
            fix="leave it out",
        ) from None


def require_names(field: str, value: object, known: Collection[str], what: str) -> None:
    """Raise `InvalidRequest` unless `value` is a collection of some of these names of `what`."""
    if isinstance(value, str) or not isinstance(value, Collection):
        raise InvalidRequest(
            field=field,
            value=value,
            problem="is not a sequence of names",
            fix=f'give a tuple, as in {field}=("index",)',
        )
    for name in value:
        if name not in known:
            raise InvalidRequest(
                field=field,
                value=name,
                problem=f"is not an output of {what}",
                fix=f"{did_you_mean(name, known)}use one of {', '.join(known)}",
            )


def require_choice(field: str, value: object, choices: Sequence[str]) -> None:
    """Raise `InvalidRequest` unless `value` is one of these texts."""
    if not isinstance(value, str) or value not in choices:
        raise InvalidRequest(
            field=field,
            value=value,
            problem="is none of its values",
            fix=f"{did_you_mean(value, choices)}use one of {', '.join(choices)}",
        )


def require_awaited(field: str, value: object) -> None:
    """Raise `InvalidRequest` for a coroutine or a future in the place of its result."""
    if inspect.isawaitable(value):
        raise InvalidRequest(
            field=field,
            value=Words(type(value).__name__),
            problem="was never awaited",
            fix=f"write {field} = await ...",
        )


def _article(word: str) -> str:
    return "an" if word[0] in "AEIO" else "a"


def require_type(field: str, value: object, kind: type, fix: str = "") -> None:
    """Raise `InvalidRequest` unless a value is of a type. A bool is always refused."""
    if not isinstance(value, kind) or isinstance(value, bool):
        require_awaited(field, value)
        wanted = "real number" if kind is numbers.Real else kind.__name__
        raise InvalidRequest(
            field=field,
            value=value,
            problem=f"is of type {type(value).__name__} where {_article(wanted)} {wanted} belongs",
            fix=fix or f"pass a {wanted}",
        )


def require_member(field: str, value: object, choices: type[enum.Enum]) -> None:
    """Raise `InvalidRequest` unless `value` is a member of this enum; an equal plain string is not."""
    if not isinstance(value, choices):
        names = [f"{choices.__name__}.{member.name}" for member in choices]
        known = {str(member.value): name for member, name in zip(choices, names, strict=True)}
        near = _nearest(
            value, known | {member.name: name for member, name in zip(choices, names, strict=True)}
        )
        hint = f"did you mean {near}? " if near else ""
        which = f"one of: {', '.join(names)}" if len(names) <= _MOST_LISTED else f"a {choices.__name__}"
        raise InvalidRequest(
            field=field,
            value=value,
            problem=f"is not a member of {choices.__name__}",
            fix=f"{hint}use {which}",
        )
