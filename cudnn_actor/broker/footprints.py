"""Which buffers a message reads and which it writes, by the numbers of their slots."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from cudnn_actor.broker.hazards import NOTHING, Footprint
from cudnn_actor.protocol.buffers import BufferRef
from cudnn_actor.protocol.lowering import Lowered
from cudnn_actor.protocol.messages import COMPUTE, Compute, Copy, Download

__all__ = ["compute_footprint", "footprint", "memory_footprint", "named_buffers", "overwritten"]

_READ: dict[type, tuple[str, ...]] = {Copy: ("src",), Download: ("src",)}


def compute_footprint(message: Compute, lowered: Lowered) -> Footprint:
    """Of a request that runs a plan: its output is written, whatever it reads besides."""
    output = getattr(message, lowered.output).slot
    slots = {getattr(message, name).slot for name in lowered.buffers}
    return Footprint(slots - {output}, (output,))


def named_buffers(message: Any) -> dict[str, BufferRef]:
    """The references that a message holds, by the names of their fields."""
    fields = getattr(type(message), "__struct_fields__", ())
    return {name: ref for name in fields if isinstance(ref := getattr(message, name), BufferRef)}


def memory_footprint(message: Any) -> Footprint:
    """Of any other message: a buffer that it names is written, unless it is known to be read only.

    `Free` counts as writing, so that nothing that waits loses its buffer; and `View`, since whoever has the
    array may write.
    """
    refs = named_buffers(message)
    if not refs:
        return NOTHING
    read = _READ.get(type(message), ())
    reads = [ref.slot for name, ref in refs.items() if name in read]
    return Footprint(reads, [ref.slot for name, ref in refs.items() if name not in read])


def footprint(message: Any, lowered: Callable[[Compute], Lowered]) -> Footprint:
    """Of any message that has been found valid."""
    return (
        compute_footprint(message, lowered(message))
        if type(message) in COMPUTE
        else memory_footprint(message)
    )


def overwritten(footprints: Iterable[Footprint]) -> list[bool]:
    """For each of a row of requests that were running at once, whether a later one writes what it reads.

    Such a one cannot be run again: nobody knows whether its input is still what it was.
    """
    written: set[int] = set()
    answers = []
    for reads, writes in reversed(list(footprints)):
        answers.append(not written.isdisjoint(reads))
        written.update(writes)
    return answers[::-1]
