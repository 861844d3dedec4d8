"""What is said when a record of parameters is made with arguments that it does not have.

msgspec's own errors do not name the class. A metaclass can, at the cost of a microsecond for each record: so
records of parameters have it, and messages, of which there is one for each request, do not.
"""

from __future__ import annotations

import inspect
from typing import Any

import msgspec

from cudnn_actor.protocol.checks import did_you_mean

__all__ = ["RecordMeta"]


class RecordMeta(msgspec.StructMeta):
    """Makes records whose constructor raises a `TypeError` that names the class, its fields, and a fix.

    A class attribute `example` is the fix: how such a record is made.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make a record."""
        try:
            return super().__call__(*args, **kwargs)
        except TypeError as error:
            problem = _problem(self, args, kwargs)
            if problem is None:
                raise
            raise TypeError(problem) from error.__cause__


def _problem(cls: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
    """What is wrong with the arguments, and how to mend it; None if they are the fields'."""
    name, parameters = cls.__name__, inspect.signature(cls).parameters
    example = getattr(cls, "example", f"{name}({next(iter(parameters))}=...)")
    if args:
        return f"{name} takes its fields by name, not by position: write {example}"
    for given in kwargs:
        if given not in parameters:
            hint = did_you_mean(given, parameters)
            return f"{name} has no field {given!r}; {hint}its fields are {', '.join(parameters)}: {example}"
    missing = [each for each, one in parameters.items() if one.default is one.empty and each not in kwargs]
    return f"{name} needs {', '.join(missing)}: {example}" if missing else None
