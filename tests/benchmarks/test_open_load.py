"""A load whose moments another process tells."""

from __future__ import annotations

import asyncio

import pytest

from benchmarks.open_load import other_process


async def test_each_call_is_made_once_and_not_before_its_moment() -> None:
    calls = 0

    async def call() -> None:
        nonlocal calls
        calls += 1
        await asyncio.sleep(0)

    async with other_process() as load:
        for made in (20, 40):
            found = await load(call, 200.0, 0.1)
            assert calls == made
            assert all(each.began < each.ended and each.late >= 0.0 for each in found)


async def test_the_end_of_the_other_process_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = "import socket, sys; socket.socket(fileno=int(sys.argv[1])).makefile('rb').readline()"
    monkeypatch.setattr("benchmarks.open_load._PROGRAM", reads)

    async def call() -> None:
        pass

    async with other_process() as load:
        with pytest.raises(RuntimeError, match="has ended"):
            await load(call, 10.0, 1.0)
