"""The buffers that a message refers to, by name: `x`, `operands[0]` in a tuple, or a graph's port."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cudnn_actor.protocol.messages.messages import GraphRun, RunGraph, RunLoop, RunModel
from cudnn_actor.protocol.messages.run_loop import SCRATCH
from cudnn_actor.protocol.types.buffers import BufferRef

__all__ = ["operand", "operands", "operands_named"]


def operands(message: Any) -> dict[str, BufferRef]:
    """All references of a message, by name. Empty for an object that is no message."""
    if isinstance(message, GraphRun):
        ports = dict(zip(message.graph.places, message.buffers, strict=True))
        return {**ports, SCRATCH: message.scratch} if isinstance(message, RunLoop) else ports
    if isinstance(message, RunModel):
        into = {f"into[{name!r}]": ref for name, ref in message.into.items()}
        return {**message.buffers, **into}
    found: dict[str, BufferRef] = {}
    for field in getattr(type(message), "__struct_fields__", ()):
        value = getattr(message, field)
        if isinstance(value, BufferRef):
            found[field] = value
        elif isinstance(value, tuple):
            for number, one in enumerate(value):
                if isinstance(one, BufferRef):
                    found[f"{field}[{number}]"] = one
    return found


def operand(message: Any, name: str) -> Any:
    """The reference of that name."""
    if isinstance(message, GraphRun):
        place = message.graph.places.get(name)
        return getattr(message, name) if place is None else message.buffers[place]
    if name[-1] != "]":
        return getattr(message, name)
    field, _, number = name[:-1].partition("[")
    return getattr(message, field)[int(number)]


def operands_named(message: Any, names: Sequence[str]) -> list[Any]:
    """The references of these names, in their order."""
    if type(message) is RunGraph:  # it may have hundreds
        places, buffers = message.graph.places, message.buffers
        return [buffers[places[name]] for name in names]
    return [operand(message, name) for name in names]
