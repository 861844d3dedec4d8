"""Undoing a free: only while the bytes are held, and only of the buffer that was freed last there."""

from __future__ import annotations

import pytest

from cudnn_actor.protocol import StaleBufferError

from .memory_fixtures import Grown


def test_a_freed_buffer_whose_bytes_are_held_comes_back_as_it_was(grown: Grown) -> None:
    ref = grown.allocate(100)
    slot = grown.table.resolve(ref)
    grown.table.hold(slot)
    grown.table.free(ref)
    assert grown.table.is_withheld(ref)
    assert grown.table.revive(ref)
    assert grown.table.resolve(ref) is slot
    assert grown.table.is_live(ref)
    assert (grown.table.live_buffers, grown.table.live_bytes) == (1, 100)
    grown.table.release(slot)
    assert grown.table.resolve(ref) is slot
    grown.table.free(ref)
    with pytest.raises(StaleBufferError, match="freed"):
        grown.table.resolve(ref)
    assert grown.table.live_bytes == 0


def test_one_whose_bytes_nobody_holds_does_not(grown: Grown) -> None:
    ref = grown.allocate(100)
    grown.table.free(ref)
    assert not grown.table.revive(ref)
    assert not grown.table.is_live(ref)


def test_one_whose_seat_has_been_taken_does_not(grown: Grown) -> None:
    ref = grown.allocate(100)
    grown.table.free(ref)
    other = grown.allocate(100)
    assert other.slot == ref.slot
    slot = grown.table.resolve(other)
    grown.table.hold(slot)
    assert not grown.table.revive(ref)
    grown.table.free(other)
    assert not grown.table.revive(ref)
    assert grown.table.revive(other)
    grown.table.release(slot)


def test_one_that_was_torn_does_not(grown: Grown) -> None:
    ref = grown.allocate(100)
    slot = grown.table.resolve(ref)
    grown.table.hold(slot)
    grown.table.tear(slot)
    assert not grown.table.revive(ref)
    grown.table.release(slot)


def test_one_that_lives_is_not_revived(grown: Grown) -> None:
    ref = grown.allocate(100)
    grown.table.hold(grown.table.resolve(ref))
    assert not grown.table.revive(ref)
    grown.table.release(grown.table.resolve(ref))
