"""Keeps what a slow oracle gave: each engine and each layout of a tensor asks it the same question again."""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Callable, Hashable
from typing import Any, ParamSpec, TypeVar

import numpy as np

__all__ = ["MOST_ANSWERS", "MOST_BYTES", "read_only", "remembered"]

P = ParamSpec("P")
T = TypeVar("T")

MOST_ANSWERS = 1000
"""The most answers of an oracle that are kept. The one that was asked for longest ago is forgotten first."""
MOST_BYTES = 1 << 16
"""The most bytes of an array whose content is compared. Answers about larger ones are not kept."""


def remembered(oracle: Callable[P, T]) -> Callable[P, T]:
    """Decorate a function of arrays and of values with a hash, which has no other input.

    Equal arguments get the same answer again. Its arrays cannot be written, and are no views of arguments,
    which tests may write.
    """
    answers: collections.OrderedDict[Hashable, T] = collections.OrderedDict()

    @functools.wraps(oracle)
    def ask(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            question = _key(args), _key(tuple(sorted(kwargs.items())))
        except _TooLarge:
            return oracle(*args, **kwargs)
        if question not in answers:
            answers[question] = read_only(oracle(*args, **kwargs))
            if len(answers) > MOST_ANSWERS:
                answers.popitem(last=False)
        answers.move_to_end(question)
        return answers[question]

    return ask


class _TooLarge(Exception):
    """An argument's content is not compared."""


def _key(value: Any) -> Hashable:
    """Equal for equal arguments: 1 is not True, and 0.0 is not -0.0."""
    if isinstance(value, np.ndarray):
        if value.nbytes > MOST_BYTES or value.dtype.hasobject:
            raise _TooLarge
        return value.dtype, value.shape, value.tobytes()
    if isinstance(value, tuple | list):
        return type(value), *map(_key, value)
    if isinstance(value, float):
        return type(value), value.hex()
    return type(value), value, repr(value)  # equal values may have parts that are not: a 0.0, and a -0.0


def read_only(answer: T) -> T:
    """A copy of an array, which cannot be written. Of a tuple or a list: a tuple of such copies. Of a dict: a
    mapping of them. Any other value as it is."""
    found: Any = answer
    if isinstance(answer, np.ndarray):
        found = answer.copy(order="K")
        found.setflags(write=False)
    elif isinstance(answer, tuple | list):
        found = tuple(map(read_only, answer))
    elif isinstance(answer, dict):
        found = types.MappingProxyType({name: read_only(each) for name, each in answer.items()})
    return found  # type: ignore[no-any-return]
