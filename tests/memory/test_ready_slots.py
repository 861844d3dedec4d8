"""Slots that are ready for the next buffers of a shape."""

from __future__ import annotations

import pytest

from cudnn_actor.isolation.process.generations import GenerationTable
from cudnn_actor.memory import MemoryTable
from cudnn_actor.memory.ready_slots import MOST_READY, READY_BYTES
from cudnn_actor.protocol import BufferRef, OutOfMemory, StaleBufferError, StaleReason

from .memory_fixtures import MIB, NONCE, Descriptors, Grown, spec_of

SPEC = spec_of(MIB // 2)


def taken(table: MemoryTable) -> int:
    """Bytes that are taken in the arenas."""
    return sum(arena.nbytes - arena.free.free_bytes for arena in table.arenas())


def begin(table: MemoryTable) -> BufferRef:
    """Begin a buffer in a slot that is ready, as a step of the fast path does."""
    slot = table.ready(SPEC).pop()
    table._live[slot.index] = slot
    slot.live = True
    table.live_bytes += slot.nbytes
    return BufferRef(slot=slot.index, generation=slot.generation, spec=SPEC, device=table.device)


def test_a_slot_is_ready_once_its_shape_is_wanted(grown: Grown) -> None:
    table, ref = grown.table, grown.allocate(SPEC.nbytes)
    table.make_ready(SPEC)
    assert not table.ready(SPEC)
    table.free(ref)
    table.want_ready(SPEC)
    assert not table.ready(SPEC)
    table.make_ready(SPEC)
    (slot,) = table.ready(SPEC)
    assert (table.live_buffers, table.live_bytes, taken(table)) == (0, 0, SPEC.nbytes)
    assert not slot.live
    early = BufferRef(slot=slot.index, generation=slot.generation, spec=SPEC, device=table.device)
    with pytest.raises(StaleBufferError) as caught:
        table.resolve(early)
    assert caught.value.reason is StaleReason.FOREIGN
    with pytest.raises(StaleBufferError) as caught:
        table.resolve(ref)
    assert caught.value.reason is StaleReason.FREED


def test_a_buffer_that_began_in_a_ready_slot_is_as_any_other(grown: Grown) -> None:
    table = grown.table
    grown.allocate(10)
    table.want_ready(SPEC)
    table.make_ready(SPEC)
    ref = begin(table)
    other = grown.allocate(SPEC.nbytes)
    assert table.resolve(ref).offset != table.resolve(other).offset
    assert table.live() == (*table.live()[:1], ref, other)
    table.free(ref)
    table.free(other)
    assert (table.live_bytes, taken(table)) == (10, 256)


def test_ready_slots_give_way_to_whatever_needs_their_bytes(grown: Grown) -> None:
    table = grown.table
    small = grown.allocate(10)
    table.want_ready(SPEC)
    for _ in range(4):
        table.make_ready(SPEC)
    assert len(table.ready(SPEC)) == 3
    assert table.room_for(spec_of(MIB // 4))
    assert len(table.ready(SPEC)) == 3
    assert table.room_for(spec_of(MIB))
    assert not table.ready(SPEC)
    assert taken(table) == 256
    table.make_ready(SPEC)
    large = table.allocate(spec_of(2 * MIB - 256))
    assert not table.ready(SPEC)
    table.make_ready(SPEC)
    assert not table.ready(SPEC), "there is no room"
    table.free(small)
    table.free(large)
    with pytest.raises(OutOfMemory):
        table.allocate(spec_of(3 * MIB))


def test_arenas_with_nothing_but_ready_slots_count_as_empty() -> None:
    grown = Grown(limit=4 * MIB)
    first, second = grown.allocate(2 * MIB), grown.allocate(2 * MIB)
    table = grown.table
    table.free(first)
    table.want_ready(SPEC)
    table.make_ready(SPEC)
    assert table.idle_arenas() == ()
    assert table.ready(SPEC), "no other arena is empty"
    table.free(second)
    assert table.idle_arenas() == (0, 1)
    table.make_ready(SPEC)
    assert table.next_arena(spec_of(4 * MIB)) == (2, 4 * MIB)
    assert table.arenas_to_drop(4 * MIB) == (0, 1)
    table.close()
    assert not grown.descriptors.open_count()


def test_of_several_arenas_with_nothing_but_ready_slots_all_count_as_empty() -> None:
    grown = Grown()
    table, small = grown.table, spec_of(256)
    held, other = grown.allocate(2 * MIB - 256), grown.allocate(2 * MIB - 256)
    table.want_ready(small)
    table.make_ready(small)
    table.make_ready(small)
    table.free(held)
    assert table.idle_arenas() == ()
    assert len(table.ready(small)) == 2, "the other arena is in use"
    table.free(other)
    assert table.idle_arenas() == (0, 1)
    assert not table.ready(small)
    table.close()


def test_ready_slots_stay_where_an_arena_is_empty_and_they_are_in_another_that_is_used() -> None:
    grown = Grown()
    table, small = grown.table, spec_of(256)
    grown.allocate(256)
    other = grown.allocate(2 * MIB)
    table.want_ready(small)
    table.make_ready(small)
    table.free(other)
    assert table.idle_arenas() == (1,)
    assert len(table.ready(small)) == 1
    table.close()


def test_few_shapes_are_wanted_and_few_slots_ready_and_none_for_large_buffers() -> None:
    grown = Grown(arena_bytes=64 * MIB)
    table = grown.table
    grown.allocate(10)
    table.want_ready(spec_of(READY_BYTES + 1))
    table.make_ready(spec_of(READY_BYTES + 1))
    assert not table.ready(spec_of(READY_BYTES + 1))
    specs = [spec_of(READY_BYTES - number) for number in range(MOST_READY + 1)]
    for spec in specs[:-1]:
        table.want_ready(spec)
        for _ in range(MOST_READY + 1):
            table.make_ready(spec)
        assert len(table.ready(spec)) == MOST_READY
    table.want_ready(specs[0])
    before = taken(table)
    table.want_ready(specs[-1])
    assert before - taken(table) == MOST_READY * READY_BYTES
    assert [bool(table.ready(spec)) for spec in specs] == [True, False, *[True] * (MOST_READY - 2), False]
    table.close()


class Places:
    """A mirror that knows which slots are seated, and every generation that ever was."""

    def __init__(self) -> None:
        self.seated: dict[int, int] = {}
        self.generations: set[tuple[int, int]] = set()

    def seat(self, slot: int, generation: int, arena: int, offset: int, nbytes: int) -> None:
        assert slot not in self.seated
        assert (slot, generation) not in self.generations
        self.seated[slot] = generation
        self.generations.add((slot, generation))

    def vacate(self, slot: int) -> None:
        del self.seated[slot]


def test_ready_slots_give_way_to_buffers_for_which_the_mirror_has_no_room_beside_them() -> None:
    descriptors, generations = Descriptors(), GenerationTable(2)
    table = MemoryTable("cpu", nonce=NONCE, arena_bytes=2 * MIB, mirror=generations)
    table.add_arena(0, 2 * MIB, descriptors.make(2 * MIB))
    table.want_ready(SPEC)
    table.make_ready(SPEC)
    table.make_ready(SPEC)
    first = table.allocate(spec_of(10))
    table.make_ready(SPEC)
    second = table.seat_import(1, 2 * MIB, 512, spec_of(10))
    assert not table.ready(SPEC)
    assert table.live() == (first, second)
    with pytest.raises(OutOfMemory):
        table.allocate(spec_of(10))
    assert taken(table) == 256
    table.free(first)
    table.allocate(spec_of(10))
    table.close()
    generations.close()


def test_the_mirror_has_ready_slots_until_they_are_given_up() -> None:
    places, descriptors = Places(), Descriptors()
    table = MemoryTable("cpu", nonce=NONCE, arena_bytes=2 * MIB, mirror=places)
    table.add_arena(0, 2 * MIB, descriptors.make(2 * MIB))
    table.want_ready(SPEC)
    for end in (table.give_up_ready, table.lose_all, table.close):
        table.make_ready(SPEC)
        table.make_ready(SPEC)
        (slot, _) = table.ready(SPEC)
        assert places.seated[slot.index] == slot.generation
        table.free(begin(table))
        assert len(places.seated) == 1
        end()
        assert places.seated == {}
