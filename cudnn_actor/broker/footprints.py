"""The footprints of messages: the slot numbers of the buffers that they read and write."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

from cudnn_actor.protocol.messages.lowering import Lowered
from cudnn_actor.protocol.messages.messages import COMPUTE, Compute, Copy, Download, RunModel
from cudnn_actor.protocol.messages.operands import operands, operands_named

__all__ = [
    "NOTHING",
    "Footprint",
    "are_inputs_overwritten",
    "compute_footprint",
    "footprint",
    "memory_footprint",
]


class Footprint(NamedTuple):
    """The slot numbers of the buffers that a request only reads, and of those that it writes."""

    reads: Collection[int]
    writes: Collection[int]


NOTHING = Footprint((), ())

_READ: dict[type, tuple[str, ...]] = {Copy: ("src",), Download: ("src",)}


def compute_footprint(message: Compute, lowered: Lowered) -> Footprint:
    """The footprint of a request that runs a plan. An output that is also read counts as written."""
    writes = [ref.slot for ref in operands_named(message, lowered.outputs)]
    slots = {ref.slot for ref in operands_named(message, lowered.buffers)}
    return Footprint(slots.difference(writes), writes)


def memory_footprint(message: Any) -> Footprint:
    """The footprint of any other message. A buffer counts as written unless it is known to be only read.

    `Free` counts as writing, so that no waiting request loses its buffer. `View` counts as writing, because
    its caller may write to the array.
    """
    if isinstance(message, RunModel):  # only of the buffers that it names; its graph has more
        return Footprint(
            [ref.slot for ref in message.buffers.values()], [ref.slot for ref in message.into.values()]
        )
    refs = operands(message)
    if not refs:
        return NOTHING
    read = _READ.get(type(message), ())
    reads = [ref.slot for name, ref in refs.items() if name in read]
    return Footprint(reads, [ref.slot for name, ref in refs.items() if name not in read])


def footprint(message: Any, lowered: Callable[[Compute], Lowered]) -> Footprint:
    """The footprint of any valid message."""
    if type(message) in COMPUTE:
        return compute_footprint(message, lowered(message))
    return memory_footprint(message)


def are_inputs_overwritten(footprints: Iterable[Footprint]) -> list[bool]:
    """Whether each of the requests that were running at a crash reads a buffer that a later one writes.

    Such a request cannot run again, because its input may have been overwritten.
    """
    written: set[int] = set()
    answers = []
    for reads, writes in reversed(list(footprints)):
        answers.append(not written.isdisjoint(reads))
        written.update(writes)
    return answers[::-1]
