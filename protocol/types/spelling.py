"""Hints for unknown arguments: the name that a function or a record has for what was meant."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection
from types import FunctionType
from typing import Any, ParamSpec, TypeVar, cast

from cudnn_actor.protocol.types.checks import did_you_mean
from cudnn_actor.protocol.types.other_names import ARGUMENTS

__all__ = ["check_spelling", "own_name"]

P = ParamSpec("P")
R = TypeVar("R")


def own_name(given: str, known: Collection[str]) -> str:
    """The start of a fix for an argument that is none of the known ones: "use size; ", or what it resembles.

    Empty if it is no other library's name for a known argument, and resembles none.
    """
    for name, others in ARGUMENTS.items():
        if name in known and given in others:
            return f"use {name}; "
    return did_you_mean(given, known)


def check_spelling(function: Callable[P, R]) -> Callable[P, R]:
    """Decorate a method: its `TypeError` for an argument that it does not have names those that it has."""
    called: Callable[..., Any]
    if inspect.iscoroutinefunction(function):

        async def called_later(*args: Any, **kwargs: Any) -> Any:
            try:
                return await function(*args, **kwargs)
            except TypeError as error:
                problem = _problem(error, function, args, kwargs)
                if problem is None:
                    raise
                raise TypeError(problem) from None

        called = called_later
    else:

        def called_now(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except TypeError as error:
                problem = _problem(error, function, args, kwargs)
                if problem is None:
                    raise
                raise TypeError(problem) from None

        called = called_now
    return cast("Callable[P, R]", functools.wraps(function)(called))


def _problem(
    error: TypeError, method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> str | None:
    """The problem with arguments that a method does not have; None for any other error."""
    if error.__traceback__ is None or error.__traceback__.tb_next is not None:  # raised inside of it
        return None
    parameters = list(inspect.signature(method).parameters.values())[1:]
    names = [each.name for each in parameters]
    called = cast("FunctionType", method)
    # The class of the object that the caller has, which may inherit the method, or call another object's.
    shown_as = getattr(args[0], "shown_as", type(args[0]).__name__) if args else ""
    name = f"{shown_as}.{called.__name__}()" if args else f"{called.__qualname__}()"
    for given in kwargs:
        if given not in names:
            return f"{name} has no argument {given!r}; {own_name(given, names)}it has {', '.join(names)}"
    by_place = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    by_name = [each.name for each in parameters if each.kind is each.KEYWORD_ONLY]
    if len(args) - 1 > len(by_place) and by_name:
        return f"{name} takes {', '.join(by_place)} by position, and by name {', '.join(by_name)}"
    return None
