"""A worker's table: it finds what its parent has noted, and owns nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from cudnn_actor.isolation.process.child.borrowed_table import BorrowedTable
from cudnn_actor.isolation.process.generations import GenerationTable, GenerationView
from cudnn_actor.memory.base import Memory
from cudnn_actor.protocol import BufferRef, InvalidRequest, StaleBufferError, StaleReason, TensorSpec

GENERATION = 0xC0DA << 32 | 1


def spec_of(nbytes: int) -> TensorSpec:
    return TensorSpec.packed((nbytes,), "int8")


def ref_of(
    nbytes: int = 100, *, slot: int = 3, generation: int = GENERATION, device: str = "cpu"
) -> BufferRef:
    return BufferRef(slot=slot, generation=generation, spec=spec_of(nbytes), device=device)


class Rig:
    """A parent's records and a worker's table over them."""

    def __init__(self) -> None:
        self.parent = GenerationTable(16)
        self.view = GenerationView(self.parent.fd)
        self.table = BorrowedTable("cpu", self.view, limit=1 << 20)

    def seat(self, ref: BufferRef, offset: int = 256, arena: int = 1) -> BufferRef:
        self.parent.seat(ref.slot, ref.generation, arena, offset, ref.spec.nbytes)
        return ref

    def close(self) -> None:
        self.table.close()
        self.table.close()
        self.view.close()
        self.parent.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.close()


def test_a_reference_resolves_to_where_the_parent_put_it(rig: Rig) -> None:
    ref = rig.seat(ref_of(), offset=512, arena=5)
    slot = rig.table.resolve(ref)
    assert (slot.index, slot.generation, slot.spec) == (3, GENERATION, ref.spec)
    assert (slot.arena.number, slot.offset, slot.nbytes) == (5, 512, 100)
    assert slot.live
    assert slot.binding is None


def test_the_same_buffer_has_the_same_slot_and_keeps_its_binding(rig: Rig) -> None:
    ref = rig.seat(ref_of())
    slot = rig.table.resolve(ref)
    slot.binding = object()
    again = BufferRef(slot=3, generation=GENERATION, spec=spec_of(100), device="cpu")
    assert rig.table.resolve(again) is slot
    assert slot.binding is not None


def test_the_next_buffer_of_a_seat_gets_the_slot_anew(rig: Rig) -> None:
    first = rig.seat(ref_of())
    slot = rig.table.resolve(first)
    slot.binding = object()
    rig.parent.vacate(3)
    second = rig.seat(ref_of(200, generation=GENERATION + 1), offset=1024, arena=2)
    assert rig.table.resolve(second) is slot
    assert (slot.generation, slot.nbytes, slot.offset, slot.arena.number) == (GENERATION + 1, 200, 1024, 2)
    assert slot.binding is None
    with pytest.raises(StaleBufferError):
        rig.table.resolve(first)


def test_a_slot_that_is_held_is_left_to_those_who_hold_it(rig: Rig) -> None:
    held = rig.table.resolve(rig.seat(ref_of(), offset=256))
    held.binding = binding = object()
    rig.table.hold(held)
    rig.parent.vacate(3)
    newcomer = rig.table.resolve(rig.seat(ref_of(200, generation=GENERATION + 1), offset=1024))
    assert newcomer is not held
    assert (held.generation, held.nbytes, held.offset, held.binding) == (GENERATION, 100, 256, binding)
    assert (newcomer.users, held.users) == (0, 1)
    rig.table.release(held)


@pytest.mark.parametrize("generation", [GENERATION - 1, GENERATION + 1, 0, 1 << 70, -1])
def test_another_generation_is_stale(rig: Rig, generation: int) -> None:
    rig.seat(ref_of())
    with pytest.raises(StaleBufferError) as caught:
        rig.table.resolve(ref_of(generation=generation), "x")
    assert (caught.value.reason, caught.value.field) == (StaleReason.FREED, "x")
    assert not rig.table.is_live(ref_of(generation=generation))


@pytest.mark.parametrize("generation", [0, GENERATION])
def test_a_vacated_seat_is_nobodys(rig: Rig, generation: int) -> None:
    ref = rig.seat(ref_of())
    rig.table.resolve(ref)
    assert rig.table.is_live(ref)
    rig.parent.vacate(3)
    with pytest.raises(StaleBufferError):
        rig.table.resolve(ref_of(generation=generation))
    assert not rig.table.is_live(ref_of(generation=generation))


@pytest.mark.parametrize("slot", [-1, 16, 1 << 70])
def test_a_slot_that_there_is_not_is_foreign(rig: Rig, slot: int) -> None:
    rig.seat(ref_of(slot=15))
    with pytest.raises(StaleBufferError) as caught:
        rig.table.resolve(ref_of(slot=slot))
    assert caught.value.reason is StaleReason.FOREIGN


@pytest.mark.parametrize("known", [False, True], ids=["first seen", "seen before"])
def test_another_device_is_refused(rig: Rig, known: bool) -> None:
    ref = rig.seat(ref_of())
    if known:
        rig.table.resolve(ref)
    with pytest.raises(InvalidRequest) as caught:
        rig.table.resolve(ref_of(device="cuda:0"), "x")
    assert caught.value.field == "x.device"


@pytest.mark.parametrize("known", [False, True], ids=["first seen", "seen before"])
def test_a_spec_past_the_buffers_bytes_is_refused(rig: Rig, known: bool) -> None:
    ref = rig.seat(ref_of(100))
    if known:
        rig.table.resolve(ref)
    with pytest.raises(InvalidRequest) as caught:
        rig.table.resolve(ref_of(101), "x")
    assert caught.value.field == "x.spec"


def test_another_spec_than_the_buffer_was_seen_with_is_refused(rig: Rig) -> None:
    ref = rig.seat(ref_of(100))
    slot = rig.table.resolve(ref)
    with pytest.raises(InvalidRequest):
        rig.table.resolve(ref_of(99))
    assert slot.spec == ref.spec


@pytest.mark.parametrize("given", [None, 7, "buffer", object()])
def test_what_is_no_reference_is_refused(rig: Rig, given: object) -> None:
    with pytest.raises(InvalidRequest, match="is not a buffer reference"):
        rig.table.resolve(given, "x")  # type: ignore[arg-type]


def test_ends_changes_with_every_end_on_either_side(rig: Rig) -> None:
    ref = rig.seat(ref_of())
    slot = rig.table.resolve(ref)
    seen = [rig.table.epoch]
    ends: list[Callable[[], None]] = [
        lambda: rig.parent.vacate(3),
        rig.table.forget_bindings,
        lambda: rig.table.tear(slot),
        rig.table.lose_all,
    ]
    for end in ends:
        end()
        seen.append(rig.table.epoch)
    assert len(set(seen)) == 5
    rig.seat(ref_of(generation=GENERATION + 1))
    assert rig.table.epoch == seen[-1]


def test_forgotten_bindings_are_gone_and_the_slots_stay(rig: Rig) -> None:
    ref = rig.seat(ref_of())
    slot = rig.table.resolve(ref)
    slot.binding = object()
    rig.table.forget_bindings()
    assert slot.binding is None
    assert rig.table.resolve(ref) is slot


def test_a_torn_slot_is_forgotten_and_the_parents_word_counts(rig: Rig) -> None:
    ref = rig.seat(ref_of())
    slot = rig.table.resolve(ref)
    rig.table.tear(slot)
    assert rig.table.resolve(ref) is not slot
    rig.parent.vacate(3)
    with pytest.raises(StaleBufferError):
        rig.table.resolve(ref)


def test_holds_are_counted(rig: Rig) -> None:
    slot = rig.table.resolve(rig.seat(ref_of()))
    rig.table.hold_all([slot, slot])
    rig.table.hold(slot)
    assert slot.users == 3
    rig.table.release(slot)
    rig.table.release_all([slot, slot])
    assert slot.users == 0
    with pytest.raises(ValueError, match="held by nobody"):
        rig.table.release(slot)
    with pytest.raises(ValueError, match="held by nobody"):
        rig.table.release_all([slot])


def test_nothing_is_owned(rig: Rig) -> None:
    memory: Memory = rig.table
    ref = rig.seat(ref_of())
    assert (len(memory.arenas()), memory.idle_arenas(), memory.arenas_to_drop(1)) == (0, (), ())
    assert (memory.live_buffers, memory.live_bytes, memory.arena_bytes) == (0, 0, 0)
    assert (memory.device, memory.limit) == ("cpu", 1 << 20)
    memory.take_back()
    assert not memory.revive(ref)
    assert not memory.is_withheld(ref)


PARENTS: dict[str, Callable[[Rig], object]] = {
    "lend": lambda rig: rig.table.lend(rig.table.resolve(rig.seat(ref_of()))),
    "room": lambda rig: rig.table.room_for(spec_of(1)),
    "next": lambda rig: rig.table.next_arena(spec_of(1)),
    "add": lambda rig: rig.table.add_arena(1, 1, -1),
    "drop": lambda rig: rig.table.drop_arena(1),
    "allocate": lambda rig: rig.table.allocate(spec_of(1)),
    "free": lambda rig: rig.table.free(rig.seat(ref_of())),
}


@pytest.mark.parametrize("what", sorted(PARENTS))
def test_what_is_the_parents_to_do_is_refused(rig: Rig, what: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        PARENTS[what](rig)
    assert caught.value.field == "message"


def test_a_loan_says_what_to_do_instead(rig: Rig) -> None:
    with pytest.raises(InvalidRequest, match='isolation="thread"'):
        rig.table.lend(rig.table.resolve(rig.seat(ref_of())))
