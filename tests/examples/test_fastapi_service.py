"""`examples/fastapi_service.py` under real servers: it serves, it ends in order, and it is no zombie."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import threading
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
from fastapi import FastAPI

from cudnn_actor import (
    ConvFwd,
    CudnnActorError,
    CudnnRef,
    ExecutionFailed,
    Fault,
    FaultPlan,
    InvalidRequest,
    MailboxFull,
    OutcomeUnknown,
    ServiceStopped,
)
from examples.fastapi_service import MAX_BYTES, make_app

from ..patience import PATIENCE_S
from .web_servers import Server, blurred, image, serve

EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE = "examples.fastapi_service:app"
UVICORN = ("-m", "uvicorn", "--host", "127.0.0.1", "--port", "{port}")
GUNICORN = ("-m", "gunicorn", "--bind", "127.0.0.1:{port}", "--worker-class", "asgi", "--no-control-socket")
SLOW, DYING = "tests.examples.slow_web_service:app", "tests.examples.dying_web_service:app"


def check(response: httpx.Response, picture: np.ndarray) -> None:
    assert response.status_code == 200, response.text
    answer = np.frombuffer(response.content, np.uint8).reshape(picture.shape)
    assert np.array_equal(answer, blurred(picture))


# Serving.


def test_it_runs_as_a_program_of_its_own(tmp_path: Path) -> None:
    with serve(tmp_path, str(EXAMPLES / "fastapi_service.py"), PORT="{port}") as server:
        check(server.blur(33, 47), image(33, 47))
        assert server.probe("/livez")[0] == 200
        with server.nothing_outlives():
            server.process.terminate()
            assert server.ends() in (0, -signal.SIGTERM)
        assert "Traceback" not in server.log


@pytest.mark.parametrize(
    ("size", "content", "status"),
    [
        ({"height": 4, "width": 4}, b"x" * 15, 400),
        ({"height": 4, "width": 4}, b"x" * 17, 413),
        ({"height": 1, "width": MAX_BYTES}, b"x" * (MAX_BYTES + 1), 413),
        ({"height": 2, "width": MAX_BYTES}, b"x", 413),
        ({"height": 0, "width": 4}, b"", 422),
        ({"height": 4}, b"x" * 16, 422),
    ],
)
async def test_a_body_of_the_wrong_size_is_refused(size: dict[str, int], content: bytes, status: int) -> None:
    app = make_app(device="cpu")
    async with app.router.lifespan_context(app), client_of(app) as client:
        assert (await client.post("/blur", params=size, content=content)).status_code == status
        picture = image(4, 4)
        answer = await client.post("/blur", params={"height": 4, "width": 4}, content=picture.tobytes())
        check(answer, picture)
        assert (await app.state.gpu.statistics()).live_buffers == 1  # the kernel


def client_of(app: FastAPI) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


@pytest.mark.parametrize(
    ("error", "status", "retry"),
    [
        (MailboxFull(capacity=16), 503, True),
        (ServiceStopped(reason="gave up"), 503, True),
        (OutcomeUnknown(request_id=1, cause="crash", why="it accumulates"), 503, False),
        (InvalidRequest(field="x", value=(4, 4), problem="has no spatial dims", fix="give it"), 422, False),
        (ExecutionFailed(status="BAD", detail="no", plan="cpu/conv_fwd"), 500, False),
    ],
    ids=lambda value: type(value).__name__,
)
async def test_an_error_is_answered_by_whether_the_request_may_be_sent_again(
    error: CudnnActorError, status: int, retry: bool
) -> None:
    async def fail() -> None:
        raise error

    app = make_app(device="cpu")
    app.add_api_route("/fail", fail)
    async with client_of(app) as client:
        answer = await client.get("/fail")
    assert answer.status_code == status
    assert ("retry-after" in answer.headers) is retry
    assert answer.json()["error"] == type(error).__name__


async def test_an_image_that_the_service_can_never_hold_is_too_large() -> None:
    app = make_app(device="cpu", memory_limit=4 << 20)
    picture = image(2000, 2000)  # 16 MB in float32
    async with app.router.lifespan_context(app), client_of(app) as client:
        size = {"height": 2000, "width": 2000}
        answer = await client.post("/blur", params=size, content=picture.tobytes())
        assert (answer.status_code, answer.json()["error"]) == (413, "OutOfMemory")
        assert "retry-after" not in answer.headers
        small = image(8, 8)
        check(await client.post("/blur", params={"height": 8, "width": 8}, content=small.tobytes()), small)


async def test_requests_beyond_the_mailbox_are_told_to_come_back() -> None:
    hangs = FaultPlan().at(1, Fault.HANG, of=ConvFwd)
    app = make_app(device="cpu", mailbox=4, faults=hangs)
    picture = image(8, 8)

    def post() -> asyncio.Task[httpx.Response]:
        size = {"height": 8, "width": 8}
        return asyncio.create_task(client.post("/blur", params=size, content=picture.tobytes()))

    async with app.router.lifespan_context(app), client_of(app) as client, asyncio.timeout(PATIENCE_S):
        gpu = app.state.gpu
        sent = [post()]
        await asyncio.to_thread(until_it_hangs, gpu)
        sent += [post() for _ in range(9)]
        for answered in itertools.islice(asyncio.as_completed(sent), 5):
            await answered
        os.kill(gpu.worker_pid, signal.SIGKILL)  # the hang goes with it, and the rest is served
        responses = await asyncio.gather(*sent)
    refused = [response for response in responses if response.status_code != 200]
    assert len(refused) == 5, "one hangs and four wait"
    for response in refused:
        assert response.status_code == 503
        assert response.headers["retry-after"] == "1"
        assert response.json()["error"] == "MailboxFull"
    for response in set(responses) - set(refused):
        check(response, picture)


def until_it_hangs(gpu: CudnnRef) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not gpu.health().working or gpu.health().queued:
        assert time.monotonic() < deadline, gpu.health()


# Ending in order.


class Load:
    """Threads that send images all the time, until nobody listens any more."""

    def __init__(self, server: Server, threads: int) -> None:
        self.wrong: list[str] = []
        self._right: list[float] = []
        self._server = server
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._send) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def _send(self) -> None:
        picture = image(16, 16)
        right = blurred(picture).tobytes()
        while not self._over.is_set():
            try:
                response = self._server.blur(16, 16)
            except httpx.ConnectError:
                return
            except httpx.TransportError:  # it was not taken up any more
                continue
            if response.status_code == 200 and response.content == right:
                self._right.append(time.monotonic())
            elif response.status_code != 503:
                self.wrong.append(f"{response.status_code} {response.text}")

    def right_since(self, then: float) -> int:
        """Right answers that came after a moment."""
        return sum(came > then for came in self._right)

    def end(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(PATIENCE_S)


@pytest.mark.parametrize(
    ("number", "whom", "workers"),
    [
        (signal.SIGTERM, "the server", 1),
        (signal.SIGINT, "the whole group", 1),
        (signal.SIGTERM, "the whole group", 2),
        (signal.SIGINT, "the server", 2),
    ],
)
def test_under_load_what_is_in_flight_is_answered(
    number: signal.Signals, whom: str, workers: int, tmp_path: Path
) -> None:
    with serve(tmp_path, *UVICORN, SLOW, "--workers", str(workers)) as server:
        load = Load(server, threads=8)
        try:
            then, at_least = several_in_flight(server)
            with server.nothing_outlives():
                kill = os.kill if whom == "the server" else os.killpg
                kill(server.process.pid, number)
                status = server.ends()
        finally:
            load.end()
        assert load.right_since(then) >= at_least
        assert load.wrong == []
        assert status in (0, -number), server.log
        assert "Traceback" not in server.log


def several_in_flight(server: Server) -> tuple[float, int]:
    """A moment since which so many requests waited at the service of one of the server's processes.

    Each has one message there at most. The one in work is not counted: it may have been, as one that waits.
    """
    found: list[tuple[float, int]] = []

    def look() -> bool:
        then = time.monotonic()
        health = server.probe()[1]
        found.append((then, health["queued"]))
        return found[-1][1] >= 3

    server.until("several in flight", look)
    return found[-1]


# Giving up.


def test_a_server_that_gives_up_is_not_ready_first_and_then_ends(tmp_path: Path) -> None:
    """Meanwhile every request is answered: rightly, or with 503."""
    with serve(tmp_path, *UVICORN, DYING) as server:
        before = server.ready()
        load = Load(server, threads=1)
        try:
            with server.nothing_outlives():
                os.kill(before["worker_pid"], signal.SIGKILL)
                seen = statuses_until_the_end(server)
                assert server.ends() == -signal.SIGTERM
        finally:
            load.end()
        assert 503 in seen
        assert load.wrong == []
        assert "process.ending" in server.log
        assert "Application shutdown complete" in server.log
        assert "Traceback" not in server.log


def statuses_until_the_end(server: Server) -> set[int]:
    """What `/readyz` says, again and again, until nobody answers."""
    seen: set[int] = set()

    def look() -> bool:
        seen.add(server.probe()[0])
        return 0 in seen

    server.until("at its end", look)
    return seen


def test_a_worker_that_is_killed_four_times_ends_a_server_with_the_defaults(tmp_path: Path) -> None:
    with serve(tmp_path, *UVICORN, EXAMPLE) as server:
        for generation in range(1, 5):
            ready = {"generation": 0}
            while ready["generation"] < generation:
                ready = server.ready()
            assert ready["restarts_left"] == 4 - generation
            check(server.blur(9, 9), image(9, 9))
            os.kill(ready["worker_pid"], signal.SIGKILL)
        assert server.ends() == -signal.SIGTERM
        assert "Traceback" not in server.log


@pytest.mark.parametrize(
    "command", [UVICORN, (*GUNICORN, "--preload")], ids=["uvicorn", "gunicorn --preload"]
)
def test_of_several_processes_the_one_that_gives_up_is_replaced(
    command: tuple[str, ...], tmp_path: Path
) -> None:
    with serve(tmp_path, *command, DYING, "--workers", "2") as server:
        pids = two_of(server, besides=0)
        (dying, worker), (other, _) = pids.items()
        os.kill(worker, signal.SIGKILL)
        assert other in two_of(server, besides=dying)
        for seed in range(8):
            check(server.blur(9, 9, seed), image(9, 9, seed))
        with server.nothing_outlives():
            server.process.terminate()
            assert server.ends() in (0, -signal.SIGTERM)


def two_of(server: Server, *, besides: int) -> dict[int, int]:
    """Wait until two processes of the server, besides one, have said that they are ready: their workers."""
    found: dict[int, int] = {}

    def look() -> bool:
        status, body = server.probe()
        if status == 200 and body["pid"] != besides and body["worker_pid"] is not None:
            found[body["pid"]] = body["worker_pid"]
        return len(found) == 2

    server.until("two of them ready", look, pause_s=0.05)
    return found
