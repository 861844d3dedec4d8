"""Messages that are long: only the sender of one that is too long for a worker gets an error."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cudnn_actor import InvalidRequest
from cudnn_actor.isolation.process.child.decoders import FROM_PARENT
from cudnn_actor.isolation.process.wire import FROM_WORKER, Request, Requests, encode_message
from cudnn_actor.messages import Warm
from cudnn_actor.processes.channel import Channel, channel_pair
from cudnn_actor.processes.frames import LONGEST

from .scenarios import Logs
from .setups import COLUMNS, open_session

(SETUP,) = COLUMNS["process, CPU"]


async def test_a_warm_that_is_too_long_for_a_frame_is_refused_and_the_worker_goes_on(logs: Logs) -> None:
    async with open_session(SETUP, logs) as session:
        request = session.trio.product()
        each = len(encode_message(Warm(messages=(request,) * 100))) // 100
        with pytest.raises(
            InvalidRequest, match=r"a worker accepts at most .*; warm fewer requests at a time"
        ):
            await session.gpu.ask(Warm(messages=(request,) * (LONGEST // each)))
        assert await session.gpu.ping() == 1


async def test_long_warms_are_answered_in_order(logs: Logs) -> None:
    async with open_session(SETUP, logs) as session:
        ended: list[int] = []
        futures = [session.gpu.submit(Warm(messages=(session.trio.product(),) * 300)) for _ in range(5)]
        for number, future in enumerate(futures):
            future.add_done_callback(lambda _, number=number: ended.append(number))  # type: ignore[misc]
        answers = await asyncio.gather(*futures)  # adds its callbacks after those above
        assert answers == [0, 0, 0, 0, 0]
        assert ended == [0, 1, 2, 3, 4]


def test_frames_that_arrive_in_many_pieces_are_received_whole_and_in_order() -> None:
    parent, worker = channel_pair()
    sender, receiver = Channel(parent, FROM_WORKER), Channel(worker, FROM_PARENT)
    try:
        sent = [Requests([Request(number, 0, bytes(size), None)]) for number, size in enumerate(SIZES)]
        for frame in sent:
            sender.send(frame)
        received: list[Any] = []
        while len(received) < len(sent):
            sender.flush()
            received += receiver.receive()
        assert received == sent
    finally:
        sender.close()
        receiver.close()


SIZES = (16 << 20, 0, 1, 5 << 20, 300_000, 0, 262_144, 262_131, 7)
