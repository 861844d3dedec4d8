"""The copy of which slot has which bytes: true of every buffer, from its birth until nobody may use it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant

from cudnn_actor.isolation.process.generations import GenerationTable, GenerationView
from cudnn_actor.memory import Buffers, MemoryTable, Slot
from cudnn_actor.protocol import BufferRef, OutOfMemory, StaleBufferError, StaleReason

from ..whole import more
from .memory_fixtures import MIB, NONCE, Descriptors, Grown
from .test_memory_machine import MemoryMachine

CAPACITY = 4


class Mirrored(Grown):
    """A table with a mirror of a few slots, and a look into that."""

    def __init__(self) -> None:
        super().__init__()
        self.generations = GenerationTable(CAPACITY)
        self.view = GenerationView(self.generations.fd)
        self.table = MemoryTable("cpu", nonce=NONCE, arena_bytes=2 * MIB, mirror=self.generations)

    def held(self, nbytes: int = 100) -> tuple[BufferRef, Slot]:
        """A buffer that a piece of unfinished work uses."""
        ref = self.allocate(nbytes)
        slot = self.table.resolve(ref)
        self.table.hold(slot)
        return ref, slot

    def shows(self, ref: BufferRef) -> bool:
        """Whether the record is this buffer's."""
        generation, _, _, nbytes = self.view.at(ref.slot)
        assert generation in (0, ref.generation)
        return generation == ref.generation and nbytes == ref.spec.nbytes

    def close(self) -> None:
        self.table.close()
        self.view.close()
        self.generations.close()
        assert self.descriptors.open_count() == 0


@pytest.fixture
def mirrored() -> Iterator[Mirrored]:
    service = Mirrored()
    yield service
    service.close()


def test_a_buffer_is_shown_where_it_lies(mirrored: Mirrored) -> None:
    mirrored.allocate(1)
    ref = mirrored.allocate(300)
    slot = mirrored.table.resolve(ref)
    assert mirrored.view.at(1) == (ref.generation, slot.arena.number, 256, 300)


def test_a_freed_buffer_that_nobody_holds_is_gone_at_once(mirrored: Mirrored) -> None:
    ref = mirrored.allocate(100)
    mirrored.table.free(ref)
    assert not mirrored.shows(ref)
    assert mirrored.view.epoch == 1


def test_a_freed_buffer_that_is_held_is_shown_until_the_last_release(mirrored: Mirrored) -> None:
    ref, slot = mirrored.held()
    mirrored.table.free(ref)
    assert mirrored.shows(ref)
    assert mirrored.view.epoch == 0
    mirrored.table.release(slot)
    assert not mirrored.shows(ref)
    assert mirrored.view.epoch == 1


@pytest.mark.parametrize("reason", [StaleReason.TORN, StaleReason.CONTEXT_LOST])
def test_a_torn_buffer_is_gone_at_once_and_once(mirrored: Mirrored, reason: StaleReason) -> None:
    ref, slot = mirrored.held()
    mirrored.table.tear(slot, reason)
    assert not mirrored.shows(ref)
    assert mirrored.view.epoch == 1
    mirrored.table.release(slot)
    assert mirrored.view.epoch == 1


def test_a_lost_context_takes_every_buffer_once(mirrored: Mirrored) -> None:
    held, slot = mirrored.held()
    idle = mirrored.allocate(100)
    mirrored.table.lose_all()
    assert not mirrored.shows(held)
    assert not mirrored.shows(idle)
    mirrored.table.release(slot)
    assert mirrored.view.epoch == 2


def test_a_revived_buffer_is_shown_as_ever(mirrored: Mirrored) -> None:
    ref, slot = mirrored.held()
    mirrored.table.free(ref)
    assert mirrored.table.revive(ref)
    assert mirrored.shows(ref)
    mirrored.table.release(slot)
    assert mirrored.shows(ref)
    mirrored.table.free(ref)
    assert not mirrored.shows(ref)
    assert mirrored.view.epoch == 1


def test_what_was_lent_is_shown_until_it_is_taken_back(mirrored: Mirrored) -> None:
    ref = mirrored.allocate(100)
    owner = mirrored.table.lend(mirrored.table.resolve(ref))
    mirrored.table.free(ref)
    assert mirrored.shows(ref)
    del owner
    mirrored.table.take_back()
    assert not mirrored.shows(ref)


def test_the_next_buffer_of_a_seat_is_shown_in_its_place(mirrored: Mirrored) -> None:
    first = mirrored.allocate(100)
    mirrored.table.free(first)
    second = mirrored.allocate(200)
    assert second.slot == first.slot
    assert mirrored.shows(second)


def test_a_closed_table_shows_nothing_and_work_may_still_end() -> None:
    mirrored = Mirrored()
    freed, freed_slot = mirrored.held()
    torn, torn_slot = mirrored.held()
    live, live_slot = mirrored.held()
    idle = mirrored.allocate(100)
    mirrored.table.free(freed)
    mirrored.table.tear(torn_slot)
    mirrored.table.close()
    assert not any(mirrored.shows(ref) for ref in (freed, torn, live, idle))
    assert mirrored.view.epoch == 4
    mirrored.table.close()
    assert mirrored.view.epoch == 4
    mirrored.close()
    for slot in (freed_slot, torn_slot, live_slot):
        mirrored.table.release(slot)


def test_a_mirror_without_room_refuses_the_buffer_and_nothing_changes(mirrored: Mirrored) -> None:
    refs = [mirrored.allocate(100) for _ in range(CAPACITY)]
    before = mirrored.table.live_bytes, mirrored.table.arenas()[0].free.free_bytes
    for _ in range(3):
        with pytest.raises(OutOfMemory):
            mirrored.allocate(100)
    assert (mirrored.table.live_bytes, mirrored.table.arenas()[0].free.free_bytes) == before
    for ref in refs:
        assert mirrored.shows(ref)
        mirrored.table.free(ref)
    assert mirrored.table.idle_arenas() == (0,)
    again = [mirrored.allocate(100) for _ in range(CAPACITY)]
    assert sorted(ref.slot for ref in again) == list(range(CAPACITY))
    assert all(mirrored.shows(ref) for ref in again)


def test_a_refused_buffer_leaves_no_reference_that_resolves(mirrored: Mirrored) -> None:
    ref, *_ = (mirrored.allocate(100) for _ in range(CAPACITY))
    with pytest.raises(OutOfMemory):
        mirrored.allocate(100)
    forged = BufferRef(slot=CAPACITY, generation=ref.generation, spec=ref.spec, device="cpu")
    with pytest.raises(StaleBufferError):
        mirrored.table.resolve(forged)


def test_a_table_is_all_that_running_a_request_needs_of_the_memory(mirrored: Mirrored) -> None:
    ref = mirrored.allocate(100)
    buffers: Buffers = mirrored.table
    assert buffers.resolve(ref).spec == ref.spec


class MirroredMachine(MemoryMachine):
    """The table's machine, with a mirror that is compared after every step."""

    @initialize(limit=st.sampled_from([None, 6 * MIB, 10 * MIB]))
    def start(self, limit: int | None) -> None:
        super().start(limit)
        self.descriptors = Descriptors()
        self.generations = GenerationTable(1 << 10)
        self.view = GenerationView(self.generations.fd)
        self.table = MemoryTable(
            "cpu", nonce=NONCE, arena_bytes=2 * MIB, limit=limit, mirror=self.generations
        )

    def teardown(self) -> None:
        if not hasattr(self, "table"):
            return
        super().teardown()
        assert self.view.epoch == len(self.known)
        self.view.close()
        self.generations.close()

    @invariant()
    def the_mirror_shows_what_may_still_be_used(self) -> None:
        shown = {}
        gone = 0
        for buffer in self.known:
            freed_and_held = buffer.ended is StaleReason.FREED and buffer.holds > 0
            if buffer.ended is None or freed_and_held:
                arena, start, _ = buffer.place
                shown[buffer.ref.slot] = (buffer.ref.generation, arena, start, buffer.ref.spec.nbytes)
            else:
                gone += 1
        for index in {buffer.ref.slot for buffer in self.known}:
            assert self.view.at(index) == shown.get(index, (0, 0, 0, 0))
        assert self.view.epoch == gone


TestMirroredMachine = MirroredMachine.TestCase
TestMirroredMachine.settings = settings(max_examples=more(100), stateful_step_count=40)
