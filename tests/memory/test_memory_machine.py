"""Random use of a table against a model that keeps everything."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from cudnn_actor.memory import GRANULARITY, BufferOwner, MemoryTable, Slot
from cudnn_actor.protocol import BufferRef, OutOfMemory, StaleBufferError, StaleReason

from ..whole import more
from .memory_fixtures import MIB, NONCE, Descriptors, spec_of

SIZES = st.one_of(
    st.integers(0, 4 * GRANULARITY),
    st.integers(1, 5 * MIB),
    st.sampled_from([0, GRANULARITY, MIB, 2 * MIB - GRANULARITY, 2 * MIB, 2 * MIB + 1]),
)


@dataclass
class Known:
    """A buffer as the model knows it: written down at birth, with its end."""

    ref: BufferRef
    slot: Slot
    place: tuple[int, int, int]
    ended: StaleReason | None = None
    holds: int = 0

    @property
    def occupies(self) -> bool:
        return self.ended is None or self.holds > 0


LOOKS: dict[str, Callable[[MemoryTable], object]] = {
    "room": lambda table: table.room_for(spec_of(1)),
    "idle": lambda table: table.idle_arenas(),
    "all": lambda table: table.take_back(),
}


class MemoryMachine(RuleBasedStateMachine):
    """Allocates, uses, lends, frees, tears and loses buffers; grows and shrinks the arenas."""

    buffers = Bundle("buffers")
    holds = Bundle("holds")
    loans = Bundle("loans")

    @initialize(limit=st.sampled_from([None, 6 * MIB, 10 * MIB]))
    def start(self, limit: int | None) -> None:
        self.limit = limit
        self.table = MemoryTable("cpu", nonce=NONCE, arena_bytes=2 * MIB, limit=limit)
        self.descriptors = Descriptors()
        self.arenas: dict[int, tuple[int, int]] = {}
        self.known: list[Known] = []
        self.lent: dict[int, tuple[Known, BufferOwner[Slot]]] = {}
        self.numbers = itertools.count()

    def teardown(self) -> None:
        if not hasattr(self, "table"):
            return
        self.everything_freed_is_one_block_again()
        self.table.close()
        self.table.close()
        assert self.descriptors.open_count() == 0

    def everything_freed_is_one_block_again(self) -> None:
        while self.lent:
            buffer = self.lent.popitem()[1][0]
            buffer.holds -= 1
        self.table.take_back()
        for buffer in self.known:
            if buffer.ended is None:
                self.table.free(buffer.ref)
            for _ in range(buffer.holds):
                self.table.release(buffer.slot)
        for arena in self.table.arenas():
            assert arena.free.holes == 1
            assert arena.free.allocate(arena.nbytes) == 0

    @rule(target=buffers, nbytes=SIZES)
    def allocate(self, nbytes: int) -> Known | None:
        spec = spec_of(nbytes)
        fits = self.largest_gap() >= max(nbytes, 1)
        assert self.table.room_for(spec) is fits
        if not fits and not self.add(nbytes):
            with pytest.raises(OutOfMemory):
                self.table.allocate(spec)
            return None
        ref = self.table.allocate(spec)
        slot = self.table.resolve(ref)
        size = -(-max(nbytes, 1) // GRANULARITY) * GRANULARITY  # no two buffers have one place
        assert slot.offset % GRANULARITY == 0
        assert slot.offset + size <= slot.arena.nbytes
        assert slot.binding is None
        slot.binding = ref
        assert all(old.ref.generation != ref.generation or old.ref.slot != ref.slot for old in self.known)
        buffer = Known(ref, slot, (slot.arena.number, slot.offset, slot.offset + size))
        self.known.append(buffer)
        return buffer

    def add(self, nbytes: int) -> bool:
        """Add an arena for `nbytes` if the limit allows one, and check that it was decided rightly."""
        needed = -(-max(nbytes, 1) // (2 * MIB)) * 2 * MIB
        used = sum(size for number, (size, _) in self.arenas.items() if self.taken(number))
        if self.limit is not None and used + needed > self.limit:
            with pytest.raises(OutOfMemory) as caught:
                self.table.next_arena(spec_of(nbytes))
            error = caught.value
            places = [buffer.place for buffer in self.known if buffer.occupies]
            taken = sum(end - begin for _, begin, end in places)
            assert (error.in_use, error.arena_bytes) == (taken, self.table.arena_bytes)
            most = self.limit // (2 * MIB) * 2 * MIB
            assert (error.limit, error.most, error.retry_safe) == (self.limit, most, nbytes <= most)
            assert error.largest is not None
            assert error.largest < max(nbytes, 1)
            return False
        number, size = self.table.next_arena(spec_of(nbytes))
        assert size >= needed
        for idle in self.table.arenas_to_drop(size):
            self.drop(idle)
        fd = self.descriptors.make(size)
        self.table.add_arena(number, size, fd)
        assert number not in self.arenas
        self.arenas[number] = (size, fd)
        return True

    def drop(self, number: int) -> None:
        assert not self.taken(number)
        _, fd = self.arenas.pop(number)
        assert self.descriptors.is_open(fd)
        self.table.drop_arena(number)
        assert not self.descriptors.is_open(fd)

    @rule(buffer=buffers)
    def free(self, buffer: Known | None) -> None:
        if buffer is None:
            return
        if buffer.ended is None:
            self.table.free(buffer.ref)
            buffer.ended = StaleReason.FREED
        else:
            with pytest.raises(StaleBufferError) as caught:
                self.table.free(buffer.ref)
            assert caught.value.reason is buffer.ended

    @rule(target=holds, buffer=buffers)
    def hold(self, buffer: Known | None) -> Known | None:
        if buffer is None or buffer.ended is not None:
            return None
        self.table.hold(self.table.resolve(buffer.ref))
        buffer.holds += 1
        return buffer

    @rule(buffer=consumes(holds))
    def release(self, buffer: Known | None) -> None:
        if buffer is not None:
            self.table.release(buffer.slot)
            buffer.holds -= 1

    @rule(target=loans, buffer=buffers)
    def lend(self, buffer: Known | None) -> int | None:
        if buffer is None or buffer.ended is not None:
            return None
        number = next(self.numbers)
        self.lent[number] = buffer, self.table.lend(self.table.resolve(buffer.ref))
        buffer.holds += 1
        return number

    @rule(loan=consumes(loans), look=st.sampled_from(sorted(LOOKS)))
    def let_go(self, loan: int | None, look: str) -> None:
        if loan is None:
            return
        buffer = self.lent.pop(loan)[0]
        assert buffer.slot.users == buffer.holds, "the end of a owner has written the table itself"
        LOOKS[look](self.table)
        buffer.holds -= 1

    @rule(buffer=holds, reason=st.sampled_from([StaleReason.TORN, StaleReason.CONTEXT_LOST]))
    def tear(self, buffer: Known | None, reason: StaleReason) -> None:
        if buffer is None or not buffer.holds:
            return
        self.table.tear(buffer.slot, reason)
        buffer.ended = buffer.ended or reason

    @rule()
    def lose_all(self) -> None:
        self.table.lose_all()
        for buffer in self.known:
            buffer.ended = buffer.ended or StaleReason.CONTEXT_LOST

    @rule(data=st.data())
    def drop_any(self, data: st.DataObject) -> None:
        if not self.arenas:
            return
        number = data.draw(st.sampled_from(sorted(self.arenas)))
        if not self.taken(number):
            self.drop(number)
            return
        with pytest.raises(ValueError, match="in use"):
            self.table.drop_arena(number)

    @rule()
    def restart(self) -> None:
        self.table.forget_bindings()
        assert all(buffer.slot.binding is None for buffer in self.known)

    @invariant()
    def every_reference_resolves_or_says_why_not(self) -> None:
        for buffer in self.known:
            if buffer.ended is None:
                slot = self.table.resolve(buffer.ref)
                assert slot is buffer.slot
                self.is_in_place(buffer)
                continue
            with pytest.raises(StaleBufferError) as caught:
                self.table.resolve(buffer.ref)
            assert caught.value.reason is buffer.ended
            if buffer.holds:
                self.is_in_place(buffer)

    def is_in_place(self, buffer: Known) -> None:
        slot = buffer.slot
        assert (slot.arena.number, slot.offset) == buffer.place[:2]
        assert (slot.spec, slot.users, slot.arena.nbytes) == (
            buffer.ref.spec,
            buffer.holds,
            self.arenas[slot.arena.number][0],
        )

    @invariant()
    def no_two_occupied_places_overlap(self) -> None:
        places = sorted(buffer.place for buffer in self.known if buffer.occupies)
        for (arena, _, end), (other, start, _) in itertools.pairwise(places):
            assert arena != other or end <= start

    @invariant()
    def accounting_is_exact(self) -> None:
        live = [buffer for buffer in self.known if buffer.ended is None]
        assert self.table.live_buffers == len(live)
        assert self.table.live_bytes == sum(buffer.ref.spec.nbytes for buffer in live)
        assert self.table.arena_bytes == sum(size for size, _ in self.arenas.values())
        assert self.limit is None or self.table.arena_bytes <= self.limit
        assert {a.number: (a.nbytes, a.fd) for a in self.table.arenas()} == self.arenas
        assert self.table.idle_arenas() == tuple(n for n in self.arenas if not self.taken(n))
        assert self.descriptors.open_count() == len(self.arenas)

    @invariant()
    def free_bytes_are_what_nobody_occupies(self) -> None:
        for arena in self.table.arenas():
            gaps = self.gaps(arena.number)
            assert (arena.free.free_bytes, arena.free.holes) == (sum(gaps), len(gaps))
            assert arena.free.largest == max(gaps, default=0)

    def taken(self, arena: int) -> bool:
        return any(buffer.occupies and buffer.place[0] == arena for buffer in self.known)

    def gaps(self, arena: int) -> list[int]:
        """Sizes of the holes that a coalescing free list must have."""
        places = sorted(b.place[1:] for b in self.known if b.occupies and b.place[0] == arena)
        starts = [start for start, _ in places] + [self.arenas[arena][0]]
        ends = [0] + [end for _, end in places]
        return [start - end for end, start in zip(ends, starts, strict=True) if start > end]

    def largest_gap(self) -> int:
        return max((gap for arena in self.arenas for gap in self.gaps(arena)), default=0)


MemoryMachine.TestCase.settings = settings(max_examples=more(120), stateful_step_count=50)
TestMemoryMachine = MemoryMachine.TestCase
