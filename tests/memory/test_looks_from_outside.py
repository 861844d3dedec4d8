"""A sender's thread looks a reference up in the middle of the owner's step: it is live, or it is stale.

Each step of the one is made between every two instructions of the other, on one thread.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from types import CodeType
from typing import Any

import pytest

from cudnn_actor.broker.request_checks import slots_of
from cudnn_actor.memory import Slot
from cudnn_actor.protocol import BufferRef, Copy, StaleBufferError, StaleReason

from ..in_one_test import cases_in_one_test
from ..instructions import functions_in, instructions
from .memory_fixtures import Grown


@functools.cache
def ours() -> list[CodeType]:
    """Looked for among all objects: by the first test, not by each process that collects the tests."""
    return functions_in("memory/memory_table.py", "memory/slot.py", "broker/request_checks.py")


def interrupted(step: Callable[[], Any], at: int, other: Callable[[], Any]) -> bool:
    """Make a step, and the other before its `at`-th instruction; whether there was one."""
    count = itertools.count()
    happened = False

    def hear(_code: CodeType, _offset: int) -> None:
        nonlocal happened
        if next(count) == at:
            happened = True
            other()

    with instructions(ours(), hear):
        step()
    return happened


def freed(grown: Grown, ref: BufferRef) -> None:
    grown.table.free(ref)


def torn(grown: Grown, ref: BufferRef) -> None:
    grown.table.tear(grown.table.resolve(ref))


def freed_and_revived(grown: Grown, ref: BufferRef) -> None:
    grown.table.free(ref)
    assert grown.table.revive(ref)


def freed_revived_and_torn(grown: Grown, ref: BufferRef) -> None:
    freed_and_revived(grown, ref)
    torn(grown, ref)


def revived(grown: Grown, ref: BufferRef) -> None:
    assert grown.table.revive(ref)


steps = pytest.mark.parametrize("step", [freed, torn, freed_and_revived, freed_revived_and_torn, revived])


@cases_in_one_test
@steps
@pytest.mark.parametrize("who", ["the owner is interrupted", "the sender is interrupted"])
def test_a_look_in_the_middle_of_an_end_finds_a_live_buffer_or_a_stale_reference(
    step: Callable[[Grown, BufferRef], None], who: str, grown: Grown
) -> None:
    for at in itertools.count():
        ref = grown.allocate(100)
        slot = grown.table.resolve(ref)
        grown.table.hold(slot)
        if step is revived:
            grown.table.free(ref)
        seen: list[Slot | StaleReason] = []

        def look(ref: BufferRef = ref, seen: list[Slot | StaleReason] = seen) -> None:
            try:
                seen.append(grown.table.resolve(ref, "dst"))
            except StaleBufferError as error:
                seen.append(error.reason)

        def end(ref: BufferRef = ref) -> None:
            step(grown, ref)

        one, other = (end, look) if who.startswith("the owner") else (look, end)
        if not interrupted(one, at, other):
            break
        assert seen[0] in (slot, StaleReason.FREED, StaleReason.TORN)
        if grown.table.is_live(ref):
            grown.table.free(ref)
        grown.table.release(slot)
    assert at > 20, "it was not interrupted"


@pytest.mark.parametrize("which", ["src", "dst"])
def test_a_senders_check_never_speaks_of_a_strangers_buffer(which: str, grown: Grown) -> None:
    """Another thread frees a buffer of the copy, and its slot becomes that of a buffer with other dims."""
    for at in itertools.count():
        refs = {"src": grown.allocate(100), "dst": grown.allocate(100)}
        strangers: list[BufferRef] = []

        def check(refs: dict[str, BufferRef] = refs) -> None:
            try:
                slots_of(grown.table, Copy(**refs))
            except StaleBufferError as error:
                assert error.field == which  # noqa: PT017

        def exchange(refs: dict[str, BufferRef] = refs, strangers: list[BufferRef] = strangers) -> None:
            grown.table.free(refs[which])
            strangers.append(grown.allocate(50))
            assert strangers[0].slot == refs[which].slot

        if not interrupted(check, at, exchange):
            break
        for ref in (*refs.values(), *strangers):
            if grown.table.is_live(ref):
                grown.table.free(ref)
    assert at > 20, "it was not interrupted"
