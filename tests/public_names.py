"""What users and their editors see of the package: names, signatures and members, one a line.

`tests/test_public_names.py` compares them with `tests/public_names.txt`. After a change that is meant, run
`python -m tests.public_names` and look at `git diff tests/public_names.txt`.
"""

from __future__ import annotations

import enum
import functools
import importlib
import inspect
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import cudnn_actor
import cudnn_actor.blocking
import cudnn_actor.pool
import cudnn_actor.protocol
import cudnn_actor.ray
from cudnn_actor.moved_names import HOMES

__all__ = ["PACKAGES", "PUBLIC", "SNAPSHOT", "listing"]

SNAPSHOT = Path(__file__).with_name("public_names.txt")
_HOMES = tuple(importlib.import_module(home) for home in dict.fromkeys(HOMES.values()))
PACKAGES = (
    cudnn_actor,
    *_HOMES,
    cudnn_actor.pool,
    cudnn_actor.ray,
    cudnn_actor.protocol,
    cudnn_actor.blocking,
)
"""The top, where most programs import from; the homes of the other names; and the rest of what is public."""

PUBLIC = {name: getattr(package, name) for package in (cudnn_actor, *_HOMES) for name in package.__all__}
"""The names of the top and of the homes, and what they are."""


def listing() -> str:
    """The names in each package, then what each public one is. Needs a process that imported nothing else."""
    found: dict[str, Any] = {}
    lines: list[str] = []
    for package in PACKAGES:
        lines.append(package.__name__)
        for name in dir(package):
            value = getattr(package, name)
            if name.startswith("__") and name not in ("__all__", "__version__"):
                continue  # what Python gives every module
            kind = " (module)" if isinstance(value, types.ModuleType) else ""
            lines.append(f"    {name}{kind}{'' if name in package.__all__ or kind else ' (not in __all__)'}")
            if name in package.__all__:
                found[name if name not in found or found[name] is value else f"{package.__name__}.{name}"] = (
                    value
                )
    public = {value for value in found.values() if isinstance(value, type)}
    for name, value in sorted(found.items()):
        lines += ["", *_described(name, value, public)]
    return "\n".join(lines) + "\n"


def _described(name: str, value: Any, public: set[type]) -> Iterator[str]:
    if isinstance(value, type):
        yield from _class(name, value, public)
    elif callable(value) and not get_args(value):
        yield f"{name}{_signature(value)}"
    else:
        yield f"{name}: one of"
        yield from sorted(f"    {getattr(one, '__name__', one)}" for one in get_args(value))


def _class(name: str, cls: type, public: set[type]) -> Iterator[str]:
    """A class and its members, but those that it has from a class that is listed too."""
    bases = ", ".join(base.__name__ for base in cls.__mro__[1:] if base in public)
    head = f"class {name}({bases})" if bases else f"class {name}"
    if issubclass(cls, enum.Enum):
        yield head
        yield from (f"    {member.name} = {member.value!r}" for member in cls)
    else:
        yield f"{head}: {_signature(cls)}"
    members: dict[str, Any] = {}
    annotations: dict[str, Any] = {}
    for owner in cls.__mro__:
        if owner is not cls and owner in public:
            break
        if owner.__module__.startswith("cudnn_actor"):
            annotations = inspect.get_annotations(owner) | annotations
            members = dict(vars(owner)) | members
    for member in sorted({*members, *annotations}):
        if not member.startswith("_") and not (issubclass(cls, enum.Enum) and member in cls.__members__):
            yield f"    {_member(member, members.get(member), annotations.get(member))}"


def _member(name: str, value: Any, annotation: Any) -> str:
    match value:
        case _ if annotation is not None:
            return f"{name}: {annotation}"
        case staticmethod() | classmethod():
            return f"{type(value).__name__} {name}{_signature(value.__func__)}"
        case property():
            return f"property {name} -> {_returned(value.fget)}"
        case functools.cached_property():
            return f"property {name} -> {_returned(value.func)}"
        case _ if inspect.isfunction(value):
            return f"{'async ' * inspect.iscoroutinefunction(value)}{name}{_signature(value)}"
        case _:
            return name


def _signature(value: Any) -> str:
    """The signature, with the annotations as they are written; those of fields stand at the members."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return "(...)"
    written = [
        one if isinstance(one.annotation, str) else one.replace(annotation=one.empty)
        for one in signature.parameters.values()
    ]
    return str(signature.replace(parameters=written)).replace("'", "")


def _returned(getter: Any) -> str:
    return str(inspect.get_annotations(getter).get("return", "?"))


if __name__ == "__main__":
    SNAPSHOT.write_text(listing())
