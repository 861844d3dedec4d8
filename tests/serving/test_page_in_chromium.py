"""The page at `/` in a browser, where there is one: headless Chromium, driven by its DevTools protocol."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import struct
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import onnx
import pytest

from ..onnx.small_models import image_model
from ..patience import PATIENCE_S
from .servers import running

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
CHROMIUM = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None)
"""The browser's program; the variable names one that is not on the path."""
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-proxy-server", "--remote-debugging-port=0")
PAINTED = """
(() => { const made = [...document.getElementById("canvas").getContext("2d").getImageData(0, 0, 1, 1).data];
  return made.join(" "); })()
"""


def red_square() -> bytes:
    """A PNG of 8 × 8 red pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = (b"\0" + b"\xff\0\0" * 8) * 8
    head = struct.pack(">IIBBBBB", 8, 8, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", head)
        + chunk(b"IDAT", zlib.compress(rows))
        + chunk(b"IEND", b"")
    )


class Page:
    """A page of the browser."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = itertools.count()
        self.said: list[dict[str, Any]] = []
        """Errors of scripts, of what they fetch, and of the policy of the page."""

    async def call(self, method: str, **params: Any) -> Any:
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": params})
        while True:
            answer = await self._socket.receive_json(timeout=PATIENCE_S)
            told = answer.get("params", {})
            if "exceptionDetails" in told or told.get("entry", {}).get("level") == "error":
                self.said.append(told)
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]

    async def value(self, expression: str) -> Any:
        found = await self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        return found["result"].get("value")

    async def text(self, name: str, having: str) -> str:
        """The text of an element, once it has this."""
        while having not in (found := str(await self.value(f'document.getElementById("{name}").innerText'))):
            pass
        return found


@contextlib.asynccontextmanager
async def opened(url: str, folder: Path) -> AsyncIterator[Page]:
    assert CHROMIUM is not None
    process = await asyncio.create_subprocess_exec(
        CHROMIUM, *FLAGS, f"--user-data-dir={folder}", stderr=asyncio.subprocess.PIPE
    )
    try:
        assert process.stderr is not None
        while (line := (await process.stderr.readline()).decode()) and "DevTools listening on" not in line:
            pass
        port = line.split("127.0.0.1:")[1].partition("/")[0]
        async with (
            aiohttp.ClientSession() as session,
            session.put(f"http://127.0.0.1:{port}/json/new?about:blank") as made,
            session.ws_connect((await made.json())["webSocketDebuggerUrl"]) as socket,
        ):
            page = Page(socket)
            for domain in ("Runtime", "Log", "DOM", "Page"):
                await page.call(f"{domain}.enable")
            await page.call("Page.navigate", url=url)
            while await page.value("document.readyState") != "complete":
                pass
            yield page
    finally:
        process.kill()
        await process.wait()


async def test_the_page_shows_the_models_and_the_scores_of_a_picture(tmp_path: Path) -> None:
    path, picture = tmp_path / "image.onnx", tmp_path / "red.png"
    onnx.save(image_model(), path)
    picture.write_bytes(red_square())
    with running(str(path), "--http", "0", "--grpc", "0") as (_, ports):
        async with opened(f"http://127.0.0.1:{ports['http']}/", tmp_path / "profile") as page:
            assert await page.text("state", "ready") == "ready, worker replaced 0 times"
            assert (await page.text("models", "READY")).split() == ["image", "1", "READY", "0", "0"]
            root = (await page.call("DOM.getDocument"))["root"]["nodeId"]
            node = (await page.call("DOM.querySelector", nodeId=root, selector="#picture"))["nodeId"]
            await page.call("DOM.setFileInputFiles", files=[str(picture)], nodeId=node)
            name, *scores, took = (await page.text("scores", " ms")).splitlines()
            assert name == image_model().graph.output[0].name
            assert scores
            assert took.endswith(" ms")
            assert await page.value(PAINTED) == "255 0 0 255"
            await page.value("refresh()")
            assert (await page.text("models", "\t1\t0\t")).startswith("image\t1\tREADY")
            assert not page.said, json.dumps(page.said)
