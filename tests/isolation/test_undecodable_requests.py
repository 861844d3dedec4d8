"""A request that the parent accepts and the worker cannot decode fails alone: no worker dies of it."""

from __future__ import annotations

import msgspec
import pytest

from cudnn_actor import Receipt, spawn
from cudnn_actor.errors import MalformedMessage
from cudnn_actor.messages import Fill, Warm

from ..service.rigs import Trio, outcome

pytestmark = pytest.mark.usefixtures("a_forkserver")


async def test_a_request_that_does_not_decode_fails_alone() -> None:
    async with spawn(device="cpu", isolation="process") as gpu:
        trio = await Trio.on(gpu)
        # 0.0 == 0 finds the buffer in the parent's table. The wire takes whole numbers only.
        forged = msgspec.structs.replace(trio.x, slot=float(trio.x.slot))
        for bad in (
            trio.product(x=forged),
            Fill(dst=forged, value=1.0),
            Warm(messages=(trio.product(x=forged),)),
        ):
            before, refused, behind = [gpu.submit(each) for each in (trio.product(), bad, trio.product())]
            assert isinstance(await outcome(refused), MalformedMessage)
            assert isinstance(await outcome(before), Receipt)
            assert isinstance(await outcome(behind), Receipt)
        assert await trio.result() == 6.0
        statistics = await gpu.statistics()
        assert (statistics.generation, statistics.restarts, statistics.live_buffers) == (1, 0, 3)
