"""The rival of the inference server, with a function in the place of PyTorch."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import httpx
import pytest

from benchmarks.serving_torch import Batches, make_app

from ..patience import PATIENCE_S


async def test_what_waits_is_run_together_and_each_gets_its_own() -> None:
    begun, go, sizes = threading.Event(), threading.Event(), list[int]()

    def doubled(given: Sequence[bytearray]) -> list[bytes]:
        begun.set()
        assert go.wait(PATIENCE_S)
        sizes.append(len(given))
        return [bytes(each) * 2 for each in given]

    batches = Batches(doubled, most=4)
    transport = httpx.ASGITransport(make_app(batches))
    async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
        first = asyncio.create_task(client.post("/", content=b"0"))
        while not begun.is_set():  # noqa: ASYNC110 - a thread tells
            await asyncio.sleep(0)
        rest = [asyncio.create_task(client.post("/", content=b"%d" % number)) for number in range(1, 7)]
        while batches.waiting < len(rest):  # noqa: ASYNC110
            await asyncio.sleep(0)
        go.set()
        answers = [await each for each in (first, *rest)]
    assert [each.content for each in answers] == [b"%d%d" % (number, number) for number in range(7)]
    assert sizes == [1, 4, 2]


async def test_an_error_is_raised_to_all_of_its_batch_and_the_next_runs() -> None:
    def refused(given: Sequence[bytearray]) -> list[bytes]:
        if given[0] == b"bad":
            raise ValueError("bad")
        return [bytes(each) for each in given]

    batches = Batches(refused, most=4)
    with pytest.raises(ValueError, match="bad"):
        await batches.ask(bytearray(b"bad"))
    assert await batches.ask(bytearray(b"good")) == b"good"
