"""Which references mean a buffer, and why the others do not."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from cudnn_actor.memory import GRANULARITY, REMEMBERED_ENDS, MemoryTable
from cudnn_actor.protocol import (
    BufferRef,
    InvalidRequest,
    OutOfMemory,
    StaleBufferError,
    StaleReason,
    TensorSpec,
)

from .memory_fixtures import MIB, NONCE, Grown, spec_of


def reason_of(table: MemoryTable, ref: BufferRef) -> StaleReason:
    with pytest.raises(StaleBufferError) as caught:
        table.resolve(ref)
    assert (caught.value.slot, caught.value.generation) == (ref.slot, ref.generation)
    return caught.value.reason


def test_a_live_reference_resolves_to_its_place(grown: Grown) -> None:
    spec = TensorSpec.packed((2, 3, 5, 7), "float32", "NHWC")
    grown.allocate(300)
    ref = grown.table.allocate(spec)
    slot = grown.table.resolve(ref)
    assert (slot.index, slot.spec, slot.offset, slot.nbytes) == (ref.slot, spec, 2 * GRANULARITY, 840)
    assert slot.arena is grown.table.arenas()[0]
    assert ref.device == "cpu"


def test_a_reference_is_shown_alike_alone_and_in_a_list(grown: Grown) -> None:
    grown.allocate(1)
    ref = grown.table.allocate(TensorSpec.packed((1, 3, 8, 8), "float32"))
    assert repr(ref) == str(ref) == "<buffer 1.1 float32[1x3x8x8] NCHW on cpu>"
    assert repr([ref]) == f"[{ref}]"


def test_a_foreign_reference_says_what_makes_one_foreign(grown: Grown) -> None:
    ref = msgspec.structs.replace(grown.allocate(1), generation=(NONCE + 1) << 32 | 1)
    with pytest.raises(StaleBufferError) as caught:
        grown.table.resolve(ref)
    assert str(caught.value).endswith(
        "is stale (foreign): another service created it (was spawn called again?), or this one did before "
        "its supervisor started it anew; upload it here"
    )


def test_a_generation_is_the_nonce_over_a_count(grown: Grown) -> None:
    assert grown.allocate(1).generation == NONCE << 32 | 1


def test_an_equal_reference_from_the_wire_resolves(grown: Grown) -> None:
    ref = grown.allocate(1)
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(ref), type=BufferRef)
    assert again.spec is not ref.spec
    assert grown.table.resolve(again) is grown.table.resolve(ref)


def test_a_freed_buffer_is_stale(grown: Grown) -> None:
    ref = grown.allocate(1)
    grown.table.free(ref)
    assert reason_of(grown.table, ref) is StaleReason.FREED


def test_freeing_twice_is_an_error_and_frees_nobody_elses_buffer(grown: Grown) -> None:
    ref = grown.allocate(1)
    grown.table.free(ref)
    successor = grown.allocate(1)
    assert successor.slot == ref.slot
    with pytest.raises(StaleBufferError) as caught:
        grown.table.free(ref)
    assert caught.value.reason is StaleReason.FREED
    grown.table.resolve(successor)


def test_another_services_reference_is_foreign(grown: Grown) -> None:
    other = Grown()
    other.table = MemoryTable("cpu", nonce=NONCE + 1, arena_bytes=2 * MIB)
    grown.allocate(1)
    assert reason_of(grown.table, other.allocate(1)) is StaleReason.FOREIGN
    other.table.close()


def test_services_do_not_share_nonces() -> None:
    services = [Grown() for _ in range(2)]
    for service in services:
        service.table = MemoryTable("cpu", arena_bytes=2 * MIB)
    first, second = (service.allocate(1) for service in services)
    assert first.generation != second.generation
    assert reason_of(services[1].table, first) is StaleReason.FOREIGN
    for service in services:
        service.table.close()


@pytest.mark.parametrize("slot", [-1, 1, 1 << 40])
def test_a_slot_that_does_not_exist_is_foreign(grown: Grown, slot: int) -> None:
    ref = grown.allocate(1)
    assert reason_of(grown.table, msgspec.structs.replace(ref, slot=slot)) is StaleReason.FOREIGN


@pytest.mark.parametrize("count", [0, 3, 0xFFFFFFFF])
def test_a_generation_that_was_never_given_out_is_foreign(grown: Grown, count: int) -> None:
    grown.table.free(grown.allocate(1))
    ref = grown.allocate(1)
    assert ref.generation & 0xFFFFFFFF == 2
    forged = msgspec.structs.replace(ref, generation=NONCE << 32 | count)
    assert reason_of(grown.table, forged) is StaleReason.FOREIGN


def test_the_next_generation_of_an_empty_slot_is_foreign(grown: Grown) -> None:
    ref = grown.allocate(1)
    grown.table.free(ref)
    forged = msgspec.structs.replace(ref, generation=ref.generation + 1)
    assert reason_of(grown.table, forged) is StaleReason.FOREIGN


@pytest.mark.parametrize(
    ("field", "change"), [("x.spec", {"spec": spec_of(2)}), ("x.device", {"device": "cuda:0"})]
)
def test_a_forged_reference_is_refused_by_field(grown: Grown, field: str, change: dict[str, object]) -> None:
    ref = grown.allocate(1)
    with pytest.raises(InvalidRequest, match="pass the reference unchanged") as caught:
        grown.table.resolve(msgspec.structs.replace(ref, **change), "x")
    assert caught.value.field == field
    grown.table.resolve(ref)


@pytest.mark.parametrize(
    "thing",
    [None, 7, "buffer", np.zeros(3), BufferRef(slot=[], generation=1, spec=spec_of(1), device="cpu")],  # type: ignore[arg-type]
)
def test_what_is_no_reference_is_refused_by_field(grown: Grown, thing: BufferRef) -> None:
    with pytest.raises(InvalidRequest, match=r"upload\(array\)") as caught:
        grown.table.resolve(thing, "w")
    assert caught.value.field == "w"


def test_a_torn_buffer_says_so_even_when_its_slot_is_reused(grown: Grown) -> None:
    torn = grown.allocate(1)
    grown.table.tear(grown.table.resolve(torn))
    freed = grown.allocate(1)
    grown.table.free(freed)
    lost = grown.allocate(1)
    grown.table.lose_all()
    live = grown.allocate(1)
    assert {ref.slot for ref in (torn, freed, lost, live)} == {0}
    assert reason_of(grown.table, torn) is StaleReason.TORN
    assert reason_of(grown.table, freed) is StaleReason.FREED
    assert reason_of(grown.table, lost) is StaleReason.CONTEXT_LOST
    grown.table.resolve(live)


def test_a_slot_remembers_its_last_torn_generations_and_no_more(grown: Grown) -> None:
    refs = [grown.allocate(1) for _ in range(1)]
    while len(refs) <= REMEMBERED_ENDS:
        grown.table.tear(grown.table.resolve(refs[-1]))
        refs.append(grown.allocate(1))
    grown.table.tear(grown.table.resolve(refs[-1]))
    assert {ref.slot for ref in refs} == {0}
    reasons = [reason_of(grown.table, ref) for ref in refs]
    assert reasons == [StaleReason.FREED] + [StaleReason.TORN] * REMEMBERED_ENDS


def test_a_slot_whose_count_runs_out_is_retired(grown: Grown) -> None:
    first = grown.allocate(1)
    slot = grown.table.resolve(first)
    grown.table.free(first)
    slot.generation = NONCE << 32 | 0xFFFFFFFF
    last = grown.allocate(1)
    assert (last.slot, last.generation) == (0, NONCE << 32 | 0xFFFFFFFF)
    grown.table.free(last)
    assert grown.allocate(1).slot == 1
    assert reason_of(grown.table, last) is StaleReason.FREED
    assert reason_of(grown.table, first) is StaleReason.FREED
    assert (
        reason_of(grown.table, msgspec.structs.replace(last, generation=last.generation + 1))
        is StaleReason.FOREIGN
    )


def test_allocating_without_an_arena_is_out_of_memory() -> None:
    table = MemoryTable("cpu", limit=0)
    with pytest.raises(OutOfMemory):
        table.allocate(spec_of(1))
    with pytest.raises(OutOfMemory):
        table.next_arena(spec_of(1))
    assert (table.live_buffers, table.live_bytes) == (0, 0)
