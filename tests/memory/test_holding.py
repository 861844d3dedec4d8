"""Buffers that unfinished work still uses; bindings; the end of everything."""

from __future__ import annotations

import pytest

from cudnn_actor.memory import MemoryTable
from cudnn_actor.protocol import StaleBufferError, StaleReason

from .memory_fixtures import MIB, Grown, spec_of


def test_a_held_buffer_keeps_its_bytes_after_free_until_the_last_release(grown: Grown) -> None:
    ref = grown.allocate(2 * MIB)
    slot = grown.table.resolve(ref)
    grown.table.hold(slot)
    grown.table.hold(slot)
    grown.table.free(ref)
    with pytest.raises(StaleBufferError):
        grown.table.resolve(ref)
    grown.table.release(slot)
    assert not grown.table.room_for(spec_of(1))
    assert grown.table.idle_arenas() == ()
    grown.table.release(slot)
    assert grown.table.room_for(spec_of(2 * MIB))


def test_a_held_seat_is_not_given_to_another_buffer(grown: Grown) -> None:
    ref = grown.allocate(100)
    slot = grown.table.resolve(ref)
    grown.table.hold(slot)
    grown.table.free(ref)
    assert grown.allocate(100).slot == 1
    assert (slot.spec, slot.offset) == (ref.spec, 0)
    grown.table.release(slot)
    assert grown.allocate(100).slot == 0


def test_a_release_without_a_hold_is_an_error(grown: Grown) -> None:
    slot = grown.table.resolve(grown.allocate(1))
    with pytest.raises(ValueError, match="is not held"):
        grown.table.release(slot)
    assert slot.users == 0


def test_a_torn_buffer_keeps_its_bytes_while_held(grown: Grown) -> None:
    slot = grown.table.resolve(grown.allocate(2 * MIB))
    grown.table.hold(slot)
    grown.table.tear(slot)
    assert not grown.table.room_for(spec_of(1))
    grown.table.release(slot)
    assert grown.table.room_for(spec_of(2 * MIB))


def test_tearing_a_freed_buffer_changes_nothing(grown: Grown) -> None:
    ref = grown.allocate(1)
    slot = grown.table.resolve(ref)
    grown.table.hold(slot)
    grown.table.free(ref)
    grown.table.tear(slot)
    with pytest.raises(StaleBufferError) as caught:
        grown.table.resolve(ref)
    assert caught.value.reason is StaleReason.FREED
    grown.table.release(slot)


@pytest.mark.parametrize("reason", [StaleReason.FREED, StaleReason.FOREIGN])
def test_a_tear_has_a_reason_that_is_a_tear(grown: Grown, reason: StaleReason) -> None:
    ref = grown.allocate(1)
    with pytest.raises(ValueError, match="must be TORN or CONTEXT_LOST"):
        grown.table.tear(grown.table.resolve(ref), reason)
    grown.table.resolve(ref)


def test_a_binding_lasts_for_one_buffer_and_one_incarnation(grown: Grown) -> None:
    first, second = grown.allocate(1), grown.allocate(1)
    for ref in (first, second):
        assert grown.table.resolve(ref).binding is None
        grown.table.resolve(ref).binding = object()
    grown.table.free(second)
    assert grown.table.resolve(grown.allocate(1)).binding is None
    assert grown.table.resolve(first).binding is not None
    grown.table.forget_bindings()
    assert grown.table.resolve(first).binding is None


def test_accounting_counts_live_buffers_and_their_own_bytes(grown: Grown) -> None:
    refs = [grown.allocate(n) for n in (1, 257, 1000)]
    assert (grown.table.live_buffers, grown.table.live_bytes, grown.table.arena_bytes) == (3, 1258, 2 * MIB)
    grown.table.free(refs[1])
    assert (grown.table.live_buffers, grown.table.live_bytes) == (2, 1001)
    grown.table.lose_all()
    assert (grown.table.live_buffers, grown.table.live_bytes, grown.table.arena_bytes) == (0, 0, 2 * MIB)
    assert grown.table.idle_arenas() == (0,)


def test_a_closed_table_holds_nothing_and_work_may_still_end() -> None:
    grown = Grown()
    ref = grown.allocate(1)
    slot = grown.table.resolve(ref)
    grown.table.hold(slot)
    grown.table.close()
    assert (grown.table.live_buffers, grown.table.arena_bytes, grown.table.arenas()) == (0, 0, ())
    assert grown.descriptors.open_count() == 0
    grown.table.release(slot)
    with pytest.raises(StaleBufferError):
        grown.table.resolve(ref)


def test_a_table_says_its_device() -> None:
    assert MemoryTable("cuda:1").device == "cuda:1"
