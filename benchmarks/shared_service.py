"""Two web processes and a script share one service, while its worker and one of its clients are killed.

    python -m benchmarks.shared_service --device cpu --out benchmarks/results

A process serves a socket. Two uvicorn processes are attached to it, and answer POST with what a model makes
of the body; a script is attached by `cudnn_actor.blocking`. Each loads the same model, whose weight has
4 MiB. This process sends the requests to the web processes, so many at a time to each. Needs the packages
onnx and uvicorn.

- `weights`: the bytes of buffers that the service has with one client, and with all.
- `worker killed`: SIGKILL of the worker under load from all, so many times, each after the one before has
  been replaced.
- `client killed`: SIGKILL of another script under load from all.

Rows have the answers of the web processes and the script, those that failed and those that were wrong, and
the slowest answer in milliseconds: of those that came in the second after a kill, and of all others.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from cudnn_actor import CudnnRef, blocking, connect, spawn
from cudnn_actor.attached import serve_socket

from .recording import Row, attempted, keep, table_of

__all__ = ["main"]

_WIDTH = 1024
_AFTER_S = 1.0


class Answer(NamedTuple):
    """When a request was answered, by `time.monotonic`, and how it went."""

    at: float
    took_s: float
    outcome: str


def given() -> np.ndarray:
    """The input of each request."""
    return np.linspace(-1.0, 1.0, _WIDTH, dtype=np.float32)[None]


def write_model(path: Path) -> None:
    """Write a model: a product of rows with a square matrix, and the ReLU of it."""
    from tests.onnx.small_models import FLOAT, model_of, node  # noqa: PLC0415 - it needs onnx

    weight = np.random.default_rng(3).standard_normal((_WIDTH, _WIDTH)).astype(np.float32) / 32
    nodes = [node("MatMul", "x w", "product", name="product"), node("Relu", "product", "y", name="relu")]
    dims: list[int | str | None] = ["N", _WIDTH]
    model = model_of(nodes, {"x": (FLOAT, dims)}, {"y": (FLOAT, dims)}, {"w": weight})
    path.write_bytes(model.SerializeToString())


# The other processes.


async def serve(path: str, model: str, device: str, standby: int) -> None:
    """Serve a service until standard input ends."""
    async with (
        spawn(device=device, isolation="process", standby=standby, max_restarts=1000) as gpu,
        serve_socket(gpu, path, models={"net": model}),
    ):
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.read)


async def web(path: str) -> None:
    """Answer HTTP on a port that this prints, until SIGTERM."""
    import uvicorn  # noqa: PLC0415 - only these processes need it

    async with connect(path) as gpu, await gpu.load("net", dims={"N": 1}) as model:

        async def app(_scope: Any, receive: Any, send: Any) -> None:
            body, more = b"", True
            while more:
                event = await receive()
                body, more = body + event.get("body", b""), event.get("more_body", False)
            found = await gpu.run(model, x=np.frombuffer(body, np.float32)[None])
            answer = found["y"].tobytes()
            headers = [(b"content-length", str(len(answer)).encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": answer})

        with socket.create_server(("127.0.0.1", 0)) as listening:
            config = uvicorn.Config(app, lifespan="off", access_log=False, log_level="warning")
            print(listening.getsockname()[1], flush=True)
            await uvicorn.Server(config).serve(sockets=[listening])


def script(path: str, out: str) -> None:
    """Run the model until standard input ends, and write all answers to a file."""
    answers, ends = list[Answer](), False

    def until_the_end() -> None:
        nonlocal ends
        sys.stdin.read()
        ends = True

    with blocking.connect(path) as gpu, gpu.load("net", dims={"N": 1}) as model:
        expected = gpu.run(model, x=given())["y"]
        waiting = threading.Thread(target=until_the_end)
        waiting.start()
        print("ready", flush=True)
        while not ends:
            begun = time.monotonic()
            try:
                found = gpu.run(model, x=given())["y"]
                outcome = "right" if np.array_equal(found, expected) else "wrong"
            except Exception:  # noqa: BLE001 - counted
                outcome = "failed"
            answers.append(Answer(time.monotonic(), time.monotonic() - begun, outcome))
        waiting.join()
    Path(out).write_text(json.dumps(answers))


# The load.


async def callers(port: int, expected: bytes, answers: list[Answer]) -> None:
    """Send one request after the other to a web process, until this is cancelled."""
    body = given().tobytes()
    head = f"POST / HTTP/1.1\r\nHost: here\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    while True:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            while True:
                begun = time.monotonic()
                try:
                    writer.write(head + body)
                    status = (await reader.readuntil(b"\r\n\r\n")).split(b" ", 2)[1]
                    answer = await reader.readexactly(len(expected)) if status == b"200" else b""
                    outcome = "failed" if not answer else "right" if answer == expected else "wrong"
                except (OSError, asyncio.IncompleteReadError):
                    outcome = "failed"
                answers.append(Answer(time.monotonic(), time.monotonic() - begun, outcome))
                if outcome == "failed":
                    break
        finally:
            writer.close()


@contextlib.asynccontextmanager
async def started(*words: str) -> AsyncIterator[tuple[subprocess.Popen[str], str]]:
    """A process of this module, and its first line. Its standard input ends, and it is waited for."""
    command = [sys.executable, "-m", "benchmarks.shared_service", *words]
    with subprocess.Popen(  # noqa: ASYNC220 - it is waited for on a thread
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            yield process, (await asyncio.to_thread(process.stdout.readline)).strip()
        finally:
            if words[0] == "--web":
                process.terminate()
            await asyncio.to_thread(process.communicate)


def read_answers(path: Path) -> list[Answer]:
    """The answers that the script has written."""
    return [Answer(*each) for each in json.loads(path.read_text())]


async def kill_worker(gpu: CudnnRef) -> float:
    """Kill the worker, and wait until another one serves. Returns when it was killed."""
    before, pid = gpu.generation, gpu.worker_pid
    assert pid is not None
    at = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    while gpu.generation == before or gpu.worker_pid == pid:  # noqa: ASYNC110 - the load goes on
        await asyncio.sleep(0.01)
    return at


def row_of(what: str, kills: Sequence[float], answers: Sequence[Answer]) -> Row:
    """The row of these answers."""
    soon = [each.took_s for each in answers if any(0 <= each.at - at <= _AFTER_S for at in kills)]
    others = [each.took_s for each in answers if not any(0 <= each.at - at <= _AFTER_S for at in kills)]
    outcomes = [each.outcome for each in answers]
    return {
        "what": what,
        "kills": len(kills),
        "answered": len(answers),
        "failed": outcomes.count("failed"),
        "wrong": outcomes.count("wrong"),
        "slowest_in_the_second_after_ms": round(1e3 * max(soon, default=0.0), 1),
        "slowest_else_ms": round(1e3 * max(others, default=0.0), 1),
    }


async def measured(args: argparse.Namespace) -> list[Row]:
    """The rows."""
    async with contextlib.AsyncExitStack() as ends:
        folder = ends.enter_context(tempfile.TemporaryDirectory())
        path, model, out = f"{folder}/s", f"{folder}/net.onnx", f"{folder}/answers.json"
        write_model(Path(model))
        serving = started("--serve", path, model, args.device, str(args.standby))
        await ends.enter_async_context(serving)
        gpu = await ends.enter_async_context(connect(path))
        own = await ends.enter_async_context(await gpu.load("net", dims={"N": 1}))
        expected = (await gpu.run(own, x=given()))["y"].tobytes()
        one_client = (await gpu.statistics()).live_bytes
        ports = [int((await ends.enter_async_context(started("--web", path)))[1]) for _ in range(2)]
        answers = list[Answer]()
        async with (
            started("--script", path, out) as (_, ready),
            started("--script", path, f"{folder}/not-written") as (victim, also),
        ):
            assert ready == also == "ready"
            all_clients = (await gpu.statistics()).live_bytes
            load = [
                asyncio.ensure_future(callers(port, expected, answers))
                for port in ports
                for _ in range(args.callers)
            ]
            await asyncio.sleep(args.seconds)
            worker_kills = list[float]()
            for _ in range(args.kills):
                worker_kills.append(await kill_worker(gpu))
                await asyncio.sleep(args.seconds)
            between = time.monotonic()
            await asyncio.sleep(args.seconds)
            client_kill = time.monotonic()
            victim.send_signal(signal.SIGKILL)
            await asyncio.sleep(args.seconds)
            for each in load:
                each.cancel()
            await asyncio.gather(*load, return_exceptions=True)
        answers += read_answers(Path(out))
    weight = 4 * _WIDTH * _WIDTH
    return [
        {"what": "weights", "weight_bytes": weight, "one_client": one_client, "all_clients": all_clients},
        row_of("worker killed", worker_kills, [each for each in answers if each.at < between]),
        row_of("client killed", [client_kill], [each for each in answers if each.at >= between]),
    ]


def table(found: list[Row]) -> Table:
    """The table of the kills."""
    return table_of("One service of two web processes and a script", [row for row in found if "kills" in row])


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.shared_service", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--standby", type=int, default=1)
    parser.add_argument("--kills", type=int, default=10, help="of the worker")
    parser.add_argument("--seconds", type=float, default=1.5, help="after each kill")
    parser.add_argument("--callers", type=int, default=8, help="of each web process")
    parser.add_argument("--out", type=Path, help="directory for the JSON")
    parser.add_argument("--serve", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--web", help=argparse.SUPPRESS)
    parser.add_argument("--script", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        path, model, device, standby = args.serve
        asyncio.run(serve(path, model, device, int(standby)))
    elif args.web:
        asyncio.run(web(args.web))
    elif args.script:
        script(*args.script)
    else:
        known = {name: getattr(args, name) for name in ("device", "standby", "kills", "seconds", "callers")}

        def rows() -> Iterator[Row]:
            yield from attempted("shared", functools.partial(asyncio.run, measured(args)))

        keep(
            rows(),
            table,
            args.out,
            "shared_service",
            asked=known,
            python=platform.python_version(),
            cores=os.cpu_count(),
            load=[round(each, 1) for each in os.getloadavg()],
        )


if __name__ == "__main__":
    main()
