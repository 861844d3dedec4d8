"""How much a channel reads at a time: little, and much after a reading that was full."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from cudnn_actor.attached.wire import FROM_CLIENT, KnowGraph
from cudnn_actor.processes import channel as module
from cudnn_actor.processes.channel import Channel, channel_pair


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    pair = [Channel(end, FROM_CLIENT) for end in channel_pair()]
    yield pair[0], pair[1]
    for end in pair:
        end.close()


SHORT, LONG = module._SHORT, module._LONG


@pytest.mark.parametrize("nbytes", [10, SHORT - 20, SHORT - 19, SHORT, 3 * SHORT, LONG, LONG + SHORT])
def test_frames_of_all_sizes_come_whole(ends: tuple[Channel, Channel], nbytes: int) -> None:
    there, here = ends
    frames = [KnowGraph("x", os.urandom(nbytes)) for _ in range(2)]
    found: list[object] = []
    for frame in frames:
        there.send(frame)
    while here.fetch() or there.backed_up:
        there.flush()
    found += here.frames
    assert found == frames
    assert here.drained


def test_a_long_frame_takes_few_readings_and_a_short_one_little_memory(
    ends: tuple[Channel, Channel],
) -> None:
    there, here = ends
    there.send(KnowGraph("x", bytes(LONG)))
    readings = 0
    while not here.frames:
        assert here.fetch()
        assert not here.drained or here.frames
        readings += 1
    assert readings <= 3
    there.send(KnowGraph("x", b"short"))
    here.fetch()
    assert here.read_size == SHORT
    assert here.drained


def test_a_frame_that_finds_the_socket_full_waits_for_room(ends: tuple[Channel, Channel]) -> None:
    """On the main thread, too, where other errors may be a signal handler's."""
    there, here = ends
    while not there.backed_up:
        there.send(KnowGraph("x", b"short"))
    assert not there.flush_only()
    while here.fetch():
        here.frames.clear()
    assert there.flush_only()
    here.fetch()
    assert list(here.frames) == [KnowGraph("x", b"short")]
