"""Long lists of numbers are read and written beside the event loop, on a bounded number of threads."""

from __future__ import annotations

import asyncio
import gzip
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest

from cudnn_actor.serving import http_wire
from cudnn_actor.serving.host import _MOST_ASIDE
from cudnn_actor.serving.server import ServerOptions, serve

from ..patience import PATIENCE_S
from .servers import PLAIN, write_square

ROWS = 4000


def body(rows: int) -> dict[str, Any]:
    values = np.arange(3 * rows).tolist()
    return {"inputs": [{"name": "x", "datatype": "FP32", "shape": [rows, 3], "data": values}]}


def options_for(folder: Path) -> ServerOptions:
    service = {"device": "cpu", "isolation": "thread"}
    return ServerOptions(models={"square": write_square(folder)}, http=0, grpc=None, service=service)


async def test_only_short_lists_are_read_and_written_on_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here: Counter[str] = Counter()

    def noting(name: str) -> None:
        call = getattr(http_wire, name)

        def noted(*args: Any, **named: Any) -> Any:
            here[f"{name}, {'loop' if threading.get_ident() == loop else 'thread'}"] += 1
            return call(*args, **named)

        monkeypatch.setattr(http_wire, name, noted)

    loop = threading.get_ident()
    for name in ("decode", "encode", "decompress"):
        noting(name)
    async with serve(options_for(tmp_path)) as server:
        url = f"http://127.0.0.1:{server.http_port}/v2/models/square/infer"
        async with httpx.AsyncClient(**PLAIN) as client:
            small = (await client.post(url, json=body(2))).json()
            assert small["outputs"][0]["data"] == [0, 1, 4, 9, 16, 25]
            assert here == {"decode, loop": 1, "encode, loop": 1}
            here.clear()
            asked = [client.post(url, json=body(4 * ROWS)) for _ in range(5)]
            for answer in await asyncio.gather(*asked):
                assert answer.json()["outputs"][0]["data"][-1] == np.float32(12 * ROWS - 1) ** 2
            assert here == {"decode, thread": 5, "encode, thread": 5}
            packed = gzip.compress(msgspec.json.encode(body(2)))
            answer = await client.post(url, content=packed, headers={"content-encoding": "gzip"})
            assert answer.status_code == 200
            assert here["decompress, thread"] == 1
            assert here["decompress, loop"] == 0


async def test_so_many_threads_work_beside_the_loop_at_a_time_and_no_more(tmp_path: Path) -> None:
    arrived, go = threading.Semaphore(0), threading.Event()
    counted = Counter[str]()

    def work() -> None:
        counted["began"] += 1
        arrived.release()
        assert go.wait(PATIENCE_S)

    async with serve(options_for(tmp_path)) as server:
        asked = [asyncio.create_task(server.host.aside(work)) for _ in range(2 * _MOST_ASIDE)]
        try:
            for _ in range(_MOST_ASIDE):
                assert await asyncio.to_thread(arrived.acquire, timeout=PATIENCE_S)
            assert counted["began"] == _MOST_ASIDE
        finally:
            go.set()
        await asyncio.gather(*asked)
    assert counted["began"] == 2 * _MOST_ASIDE


async def test_a_version_whose_request_is_being_read_is_closed_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived, go = threading.Event(), threading.Event()
    decode = http_wire.decode

    def decode_later(*args: Any) -> Any:
        arrived.set()
        assert go.wait(PATIENCE_S)
        return decode(*args)

    monkeypatch.setattr(http_wire, "decode", decode_later)
    async with serve(options_for(tmp_path)) as server, httpx.AsyncClient(**PLAIN) as client:
        url = f"http://127.0.0.1:{server.http_port}/v2/models/square/infer"
        asked = asyncio.ensure_future(client.post(url, json=body(ROWS), timeout=PATIENCE_S))
        try:
            assert await asyncio.to_thread(arrived.wait, PATIENCE_S)
            await server.catalog.unload("square")
            # What the service is told, it does in order: behind this, it would have freed the first version.
            await server.catalog.load("square")
        finally:
            go.set()
        assert (await asked).status_code == 200
