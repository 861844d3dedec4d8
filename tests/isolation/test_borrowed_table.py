"""A worker's view of the buffers: it finds what its parent has noted."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cudnn_actor.isolation.process.child.borrowed_table import BorrowedTable
from cudnn_actor.isolation.process.generations import GenerationTable, GenerationView
from cudnn_actor.memory import Buffers
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
        self.table = BorrowedTable("cpu", self.view)

    def seat(self, ref: BufferRef, offset: int = 256, arena: int = 1) -> BufferRef:
        self.parent.seat(ref.slot, ref.generation, arena, offset, ref.spec.nbytes)
        return ref

    def close(self) -> None:
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
    rig.table.hold_all([held])
    rig.parent.vacate(3)
    newcomer = rig.table.resolve(rig.seat(ref_of(200, generation=GENERATION + 1), offset=1024))
    assert newcomer is not held
    assert (held.generation, held.nbytes, held.offset, held.binding) == (GENERATION, 100, 256, binding)
    assert (newcomer.users, held.users) == (0, 1)
    rig.table.release_all([held])


@pytest.mark.parametrize("generation", [GENERATION - 1, GENERATION + 1, 0, 1 << 70, -1])
def test_another_generation_is_stale(rig: Rig, generation: int) -> None:
    rig.seat(ref_of())
    with pytest.raises(StaleBufferError) as caught:
        rig.table.resolve(ref_of(generation=generation), "x")
    assert (caught.value.reason, caught.value.field) == (StaleReason.FREED, "x")


@pytest.mark.parametrize("generation", [0, GENERATION])
def test_a_vacated_seat_is_nobodys(rig: Rig, generation: int) -> None:
    ref = rig.seat(ref_of())
    rig.table.resolve(ref)
    rig.parent.vacate(3)
    with pytest.raises(StaleBufferError):
        rig.table.resolve(ref_of(generation=generation))


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


def test_the_epoch_changes_with_every_end(rig: Rig) -> None:
    ref = rig.seat(ref_of())
    rig.table.resolve(ref)
    first = rig.table.epoch
    rig.parent.vacate(3)
    second = rig.table.epoch
    assert second != first
    rig.seat(ref_of(generation=GENERATION + 1))
    assert rig.table.epoch == second


def test_holds_are_counted(rig: Rig) -> None:
    slot = rig.table.resolve(rig.seat(ref_of()))
    rig.table.hold_all([slot, slot])
    assert slot.users == 2
    rig.table.release_all([slot, slot])
    assert slot.users == 0
    with pytest.raises(ValueError, match="held by nobody"):
        rig.table.release_all([slot])


def test_it_is_all_that_running_a_request_needs_of_the_memory(rig: Rig) -> None:
    buffers: Buffers = rig.table
    assert buffers.resolve(rig.seat(ref_of())).live
