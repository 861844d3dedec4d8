"""The end of a server whose service has given up, because its worker died more often than is allowed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from cudnn_actor.errors import ServiceStopped
from cudnn_actor.serving.server import InferenceServer, ServerOptions, serve

from ..patience import PATIENCE_S
from .servers import PLAIN, running, workers_of, write_square

REQUEST = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 3], "data": [1, 2, 3]}]}


async def test_it_is_no_longer_ready_while_it_answers_what_is_under_way(tmp_path: Path) -> None:
    service = {"device": "cpu", "isolation": "process", "max_restarts": 0}
    options = ServerOptions(models={"square": write_square(tmp_path)}, http=0, grpc=None, service=service)
    begun: asyncio.Future[InferenceServer] = asyncio.get_running_loop().create_future()

    async def run() -> None:
        async with serve(options) as server:
            begun.set_result(server)
            await asyncio.Event().wait()

    running_server = asyncio.create_task(run())
    server = await begun
    base = f"http://127.0.0.1:{server.http_port}"
    async with httpx.AsyncClient(base_url=base, **PLAIN) as http:
        with server.host.admit():
            assert server.gpu.worker_pid is not None
            os.kill(server.gpu.worker_pid, signal.SIGKILL)
            while (await http.get("/v2/health/ready")).status_code == 200:
                pass
            await asyncio.wait([running_server], timeout=0)
            assert not running_server.done()
            assert (await http.get("/v2/health/live")).status_code == 503
            assert (await http.post("/v2/models/square/infer", json=REQUEST)).status_code == 503
    with pytest.raises(ServiceStopped, match="max_restarts=0"):
        await running_server


@pytest.mark.parametrize("processes", ["1", "2"])
def test_its_process_ends_with_a_status_and_says_why(processes: str, tmp_path: Path) -> None:
    words = (str(write_square(tmp_path)), "--http", "0", "--grpc", "0", "--max-restarts", "1")
    with running(*words, "--processes", processes, stderr=subprocess.PIPE) as (process, ports):
        (first,) = workers_of(process.pid)
        os.kill(first, signal.SIGKILL)
        os.kill(another_worker(process.pid, first, ports["http"]), signal.SIGKILL)
        _, said = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 1
    line = said.splitlines()[0]
    assert "the server has ended, because its service has: gave up at the 2nd failure within 60 s" in line
    assert "killed by SIGKILL" in line
    assert "--max-restarts" in line


def test_the_garbage_collector_looks_no_more_at_what_was_there_before_it_served(tmp_path: Path) -> None:
    code = "import atexit, gc; from cudnn_actor.cli import main; "
    code += "atexit.register(lambda: print(gc.get_freeze_count(), len(gc.get_objects()))); main()"
    words = ("--repository", str(tmp_path), "--http", "0", "--grpc", "0")
    with running(*words, program=("-c", code)) as (process, _):
        process.terminate()
        said, _ = process.communicate(timeout=PATIENCE_S)
    spared, others = map(int, said.split())
    assert spared > 10 * others


def another_worker(pid: int, before: int, port: int) -> int:
    """The worker that has taken the place of one that died, once it is ready."""
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", **PLAIN) as http:
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            for found in workers_of(pid):
                if found != before and http.get("/v2/health/ready").status_code == 200:
                    return found
    raise AssertionError("no worker has come")
