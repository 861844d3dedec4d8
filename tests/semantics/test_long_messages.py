"""A message may be longer than a worker takes: that is its own caller's error, and nobody else's."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cudnn_actor import InvalidRequest, Warm
from cudnn_actor.processes.channel import Channel, channel_pair
from cudnn_actor.processes.frames import LONGEST
from cudnn_actor.workers.wire import FROM_PARENT, FROM_WORKER, Request, Requests, encode_message

from .places import COLUMNS, world
from .scenarios import Logs

(HERE,) = COLUMNS["process, CPU"]


async def test_a_warm_that_no_frame_has_room_for_is_refused_and_the_worker_stays(logs: Logs) -> None:
    async with world(HERE, logs) as here:
        request = here.trio.product()
        each = len(encode_message(Warm(messages=(request,) * 100))) // 100
        with pytest.raises(
            InvalidRequest, match=r"a worker accepts at most .*; warm fewer requests at a time"
        ):
            await here.gpu.ask(Warm(messages=(request,) * (LONGEST // each)))
        assert await here.gpu.ping() == 1


async def test_warms_that_are_longer_than_most_messages_are_answered_in_order(logs: Logs) -> None:
    async with world(HERE, logs) as here:
        ended: list[int] = []
        futures = [here.gpu.submit(Warm(messages=(here.trio.product(),) * 300)) for _ in range(5)]
        for number, future in enumerate(futures):
            future.add_done_callback(lambda _, number=number: ended.append(number))  # type: ignore[misc]
        answers = await asyncio.gather(*futures)  # which adds its callbacks behind those above
        assert answers == [0, 0, 0, 0, 0]
        assert ended == [0, 1, 2, 3, 4]


def test_frames_that_come_in_many_pieces_arrive_whole_and_in_order() -> None:
    parent, worker = channel_pair()
    here, there = Channel(parent, FROM_WORKER), Channel(worker, FROM_PARENT)
    try:
        sent = [Requests([Request(number, 0, bytes(size), None)]) for number, size in enumerate(SIZES)]
        for frame in sent:
            here.send(frame)
        received: list[Any] = []
        while len(received) < len(sent):
            here.flush()
            received += there.receive()
        assert received == sent
    finally:
        here.close()
        there.close()


SIZES = (16 << 20, 0, 1, 5 << 20, 300_000, 0, 262_144, 262_131, 7)
