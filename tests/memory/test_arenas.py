"""Arenas: which to add, which to drop, who owns the descriptor."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable
from types import CodeType
from typing import Any

import pytest

from cudnn_actor.memory import MemoryTable
from cudnn_actor.protocol import InvalidRequest, OutOfMemory, ServiceStopped

from ..instructions import functions_in, instructions
from .memory_fixtures import MIB, Descriptors, Grown, spec_of


def test_an_arena_has_the_usual_size() -> None:
    assert MemoryTable("cpu").next_arena(spec_of(1)) == (0, 64 * MIB)


@pytest.mark.parametrize(
    ("nbytes", "arena"), [(64 * MIB, 64), (64 * MIB + 1, 66), (70 * MIB, 70), (71 * MIB, 72)]
)
def test_a_larger_buffer_gets_an_arena_of_its_own_size_in_steps_of_2_mib(nbytes: int, arena: int) -> None:
    assert MemoryTable("cpu").next_arena(spec_of(nbytes)) == (0, arena * MIB)


def test_the_last_arena_is_as_small_as_the_limit_leaves() -> None:
    table = MemoryTable("cpu", limit=7 * MIB)
    assert table.next_arena(spec_of(1)) == (0, 6 * MIB)


def test_numbers_are_never_used_again(grown: Grown) -> None:
    first = grown.allocate(10)
    grown.table.free(first)
    grown.table.drop_arena(0)
    assert grown.table.next_arena(spec_of(1))[0] == 1
    with pytest.raises(ValueError, match="used before"):
        grown.table.add_arena(0, 2 * MIB, -1)


def test_passing_the_limit_is_an_error_that_changes_nothing() -> None:
    grown = Grown(limit=4 * MIB)
    kept = grown.allocate(2 * MIB)
    with pytest.raises(OutOfMemory) as caught:
        grown.allocate(2 * MIB + 1)
    assert (caught.value.requested, caught.value.in_use, caught.value.limit) == (
        2 * MIB + 1,
        2 * MIB,
        4 * MIB,
    )
    assert grown.table.resolve(kept).nbytes == 2 * MIB
    assert grown.allocate(2 * MIB).slot == 1
    grown.table.close()


def test_a_buffer_of_no_bytes_finds_no_room_where_there_is_none() -> None:
    grown = Grown(limit=2 * MIB)
    assert grown.table.next_arena(spec_of(0)) == (0, 2 * MIB)
    full = grown.allocate(2 * MIB)
    assert not grown.table.room_for(spec_of(0))
    with pytest.raises(OutOfMemory):
        grown.allocate(0)
    grown.table.free(full)
    assert grown.allocate(0).spec.nbytes == 0
    assert grown.table.live_bytes == 0
    grown.table.close()


def test_idle_arenas_make_room_under_the_limit() -> None:
    grown = Grown(limit=4 * MIB)
    small = [grown.allocate(2 * MIB) for _ in range(2)]
    for ref in small:
        grown.table.free(ref)
    assert grown.table.idle_arenas() == (0, 1)
    large = grown.allocate(4 * MIB)
    assert grown.table.resolve(large).arena.number == 2
    assert grown.table.arena_bytes == 4 * MIB
    assert grown.descriptors.open_count() == 1
    grown.table.close()


def test_no_more_arenas_are_dropped_than_must_be() -> None:
    grown = Grown(limit=8 * MIB)
    refs = [grown.allocate(n * MIB) for n in (2, 4, 2)]
    for ref in refs:
        grown.table.free(ref)
    assert grown.table.arenas_to_drop(2 * MIB) == (1,)
    assert grown.table.arenas_to_drop(6 * MIB) == (1, 0)
    grown.table.close()


def test_without_a_limit_nothing_must_be_dropped(grown: Grown) -> None:
    grown.table.free(grown.allocate(1))
    assert grown.table.arenas_to_drop(1 << 40) == ()


def test_the_oldest_arena_with_room_is_filled_first(grown: Grown) -> None:
    refs = [grown.allocate(2 * MIB) for _ in range(3)]
    grown.table.free(refs[0])
    grown.table.free(refs[2])
    grown.allocate(1)
    assert grown.table.idle_arenas() == (2,)


def test_an_arena_in_use_is_not_dropped(grown: Grown) -> None:
    ref = grown.allocate(1)
    slot = grown.table.resolve(ref)
    grown.table.hold(slot)
    with pytest.raises(ValueError, match="in use"):
        grown.table.drop_arena(0)
    grown.table.free(ref)
    with pytest.raises(ValueError, match="in use"):
        grown.table.drop_arena(0)
    grown.table.release(slot)
    grown.table.drop_arena(0)
    with pytest.raises(KeyError):
        grown.table.drop_arena(0)


def test_a_descriptor_is_closed_once_even_when_its_number_is_reused(grown: Grown) -> None:
    grown.allocate(1)
    (arena,) = grown.table.arenas()
    grown.table.close()
    stranger = os.open("/dev/null", os.O_RDONLY)
    try:
        assert stranger == arena.fd, "the lowest free number is the one just closed"
        arena.close()
        grown.table.close()
        os.fstat(stranger)
    finally:
        os.close(stranger)


def test_a_refused_descriptor_stays_the_callers() -> None:
    descriptors = Descriptors()
    table = MemoryTable("cpu")
    odd = descriptors.make(100)
    with pytest.raises(ValueError, match="multiple of 256"):
        table.add_arena(0, 100, odd)
    table.close()
    with pytest.raises(ServiceStopped):
        table.add_arena(0, 2 * MIB, odd)
    assert descriptors.is_open(odd)
    os.close(odd)
    assert table.arena_bytes == 0


def test_arenas_say_what_a_new_incarnation_must_map(grown: Grown) -> None:
    grown.allocate(1)
    grown.allocate(3 * MIB)
    assert [(a.number, a.nbytes, os.fstat(a.fd).st_size) for a in grown.table.arenas()] == [
        (0, 2 * MIB, 2 * MIB),
        (1, 4 * MIB, 4 * MIB),
    ]


@pytest.mark.parametrize(
    ("field", "options"),
    [
        ("nonce", {"nonce": 0}),
        ("nonce", {"nonce": 1 << 32}),
        ("nonce", {"nonce": True}),
        ("arena_bytes", {"arena_bytes": 0}),
        ("memory_limit", {"limit": -1}),
        ("memory_limit", {"limit": 1.5}),
    ],
)
def test_a_table_refuses_options_out_of_range(field: str, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        MemoryTable("cpu", **options)
    assert caught.value.field == field


@pytest.mark.parametrize("who", ["who adds is interrupted", "who closes is interrupted"])
def test_an_arena_that_is_added_while_the_table_closes_has_one_owner(who: str) -> None:
    """The service's end closes the table on one thread while another takes over what a worker has made."""
    for at in itertools.count():
        grown = Grown()
        grown.allocate(1)
        descriptor = grown.descriptors.make(2 * MIB)
        refused: list[int] = []

        def add(grown: Grown = grown, descriptor: int = descriptor, refused: list[int] = refused) -> None:
            try:
                grown.table.add_arena(1, 2 * MIB, descriptor)
            except ServiceStopped:
                refused.append(descriptor)

        step, other = (add, grown.table.close) if who.startswith("who adds") else (grown.table.close, add)
        happened = _interrupted(step, at, other)
        if not happened:
            other()
        assert [descriptor] * grown.descriptors.open_count() == refused
        for each in refused:
            os.close(each)
        if not happened:
            assert at > 1, "nothing was interrupted"
            break


@functools.cache
def _of_the_pool() -> list[CodeType]:
    """Looked for among all objects: by the first test, not by each process that collects the tests."""
    return functions_in("memory/pool.py")


def _interrupted(step: Callable[[], Any], at: int, other: Callable[[], Any]) -> bool:
    """Make a step, and another before its `at`-th instruction; whether there was one."""
    count, happened = itertools.count(), False

    def hear(_code: CodeType, _offset: int) -> None:
        nonlocal happened
        if next(count) == at:
            happened = True
            other()

    with instructions(_of_the_pool(), hear):
        step()
    return happened
