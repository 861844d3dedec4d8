"""Holds that end with an object, on whatever thread that dies."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest

from cudnn_actor.memory import BufferOwner, Slot
from cudnn_actor.protocol import OutOfMemory

from .memory_fixtures import MIB, Grown, spec_of


class Array:
    """What holds on to a owner; in a cycle with itself where only the collector is to end it."""

    def __init__(self, owner: BufferOwner[Slot], *, cyclic: bool = False) -> None:
        self.owner = owner
        self.itself: Any = self if cyclic else None


def lent_and_freed(grown: Grown, nbytes: int = 2 * MIB) -> BufferOwner[Slot]:
    ref = grown.allocate(nbytes)
    owner = grown.table.lend(grown.table.resolve(ref))
    grown.table.free(ref)
    return owner


def test_lent_bytes_are_given_to_nobody_until_the_keeper_has_gone(grown: Grown) -> None:
    owner = lent_and_freed(grown)
    assert not grown.table.room_for(spec_of(1))
    assert grown.table.idle_arenas() == ()
    del owner
    assert grown.table.room_for(spec_of(2 * MIB))


LOOKS: dict[str, Callable[[Grown], object]] = {
    "room for a buffer": lambda grown: grown.table.room_for(spec_of(2 * MIB)),
    "a place for it": lambda grown: grown.table.allocate(spec_of(2 * MIB)),
    "the next arena": lambda grown: grown.table.next_arena(spec_of(2 * MIB)),
    "idle arenas": lambda grown: grown.table.idle_arenas(),
}


@pytest.mark.parametrize("look", LOOKS)
def test_every_look_for_room_sees_what_was_let_go(look: str) -> None:
    grown = Grown(limit=2 * MIB)
    owner = lent_and_freed(grown)
    with pytest.raises(OutOfMemory):
        grown.table.next_arena(spec_of(1))
    del owner
    assert LOOKS[look](grown)
    grown.table.close()


def test_two_keepers_are_two_holds(grown: Grown) -> None:
    ref = grown.allocate(2 * MIB)
    slot = grown.table.resolve(ref)
    owners = [grown.table.lend(slot), grown.table.lend(slot)]
    grown.table.free(ref)
    owners.pop()
    assert not grown.table.room_for(spec_of(1))
    owners.pop()
    assert grown.table.room_for(spec_of(1))


def test_a_keeper_may_die_on_any_thread(grown: Grown) -> None:
    kept = [lent_and_freed(grown)]
    thread = threading.Thread(target=kept.clear)
    thread.start()
    thread.join()
    assert grown.table.room_for(spec_of(2 * MIB))


def test_a_keeper_may_die_in_the_collector(grown: Grown) -> None:
    array = Array(lent_and_freed(grown), cyclic=True)
    del array
    assert not grown.table.room_for(spec_of(1))
    gc.collect()
    assert grown.table.room_for(spec_of(2 * MIB))


def test_keepers_that_die_while_others_are_taken_back_are_taken_back_too(grown: Grown) -> None:
    refs = [grown.allocate(1000) for _ in range(200)]
    arrays = [Array(grown.table.lend(grown.table.resolve(ref)), cyclic=True) for ref in refs]
    before = gc.get_threshold()
    gc.set_threshold(1)  # the collector runs in the midst of everything
    try:
        while arrays:
            arrays.pop()
            grown.table.room_for(spec_of(1))
    finally:
        gc.set_threshold(*before)
    gc.collect()
    grown.table.take_back()
    assert [grown.table.resolve(ref).users for ref in refs] == [0] * 200


def test_a_keeper_may_outlive_the_table() -> None:
    grown = Grown()
    owner = lent_and_freed(grown)
    slot = grown.table.resolve(grown.allocate(1))
    slot.binding = object()
    other = grown.table.lend(slot)
    grown.table.close()
    assert grown.descriptors.open_count() == 0
    assert slot.binding is None, "an engine's handle outlives the engine"
    del owner, other
    grown.table.take_back()


def test_a_loan_is_no_part_of_an_incarnations_work(grown: Grown) -> None:
    owner = lent_and_freed(grown)
    grown.table.forget_bindings()
    grown.table.lose_all()
    assert not grown.table.room_for(spec_of(1))
    del owner
    assert grown.table.room_for(spec_of(1))
