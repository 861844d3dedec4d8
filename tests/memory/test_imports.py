"""Buffers of other services: seated in arenas that were imported, of which nothing else is given away."""

from __future__ import annotations

import pytest

from cudnn_actor.errors import StaleBufferError
from cudnn_actor.memory import MemoryTable
from cudnn_actor.protocol.errors import StaleReason
from cudnn_actor.protocol.types.tensor import TensorSpec

SPEC = TensorSpec.packed((100,))


@pytest.fixture
def table() -> MemoryTable:
    return MemoryTable("cpu", nonce=1, limit=4 << 20)


def test_an_import_counts_towards_no_limit_and_has_room_for_nothing_else(table: MemoryTable) -> None:
    ref = table.seat_import(table.next_number, 1 << 30, 4096, SPEC)
    slot = table.resolve(ref)
    assert (slot.arena.number, slot.offset, slot.arena.nbytes) == (0, 4096, 1 << 30)
    assert table.arena_bytes == 0
    assert not table.room_for(SPEC)
    assert not table.arenas()
    assert not table.idle_arenas()
    assert table.next_number == 1
    assert table.next_arena(SPEC)[0] == 1


def test_an_import_is_unmapped_once_it_was_freed_and_no_work_uses_it(table: MemoryTable) -> None:
    ref = table.seat_import(0, 1 << 21, 0, SPEC)
    slot = table.resolve(ref)
    table.hold(slot)
    table.free(ref)
    assert table.take_idle_imports() == ()
    table.release(slot)
    assert table.take_idle_imports() == (0,)
    assert table.take_idle_imports() == ()


def test_imports_end_with_the_engine_that_has_mapped_them(table: MemoryTable) -> None:
    ref, held, freed = (table.seat_import(number, 1 << 21, 256, SPEC) for number in (0, 1, 2))
    slots = [table.resolve(held), table.resolve(freed)]
    table.hold_all(slots)
    table.free(freed)
    table.lose_imports()
    for each in (ref, held, freed):
        with pytest.raises(StaleBufferError) as stale:
            table.resolve(each)
        assert stale.value.reason is StaleReason.CONTEXT_LOST
    table.release_all(slots)
    assert table.take_idle_imports() == ()  # nobody has them mapped
    assert table.live_bytes == 0
    with pytest.raises(ValueError, match="used before"):
        table.seat_import(1, 1 << 21, 0, SPEC)
