"""Clients of every kind of an inference server whose worker is killed: all answers, and all of them right.

    python -m benchmarks.served_chaos --out benchmarks/results

`cudnn-actor serve` has a repository of five models, each of another datatype. `tritonclient` asks it over
HTTP, gRPC, streams of gRPC, and with inputs and outputs in shared memory, registered over either. Each answer
is compared to the bit. The worker that serves gets SIGKILL each time that so many answers have come. So no
request is under way at two of these times, which would be a reason to refuse it (docs/failures.md). At the
end the server's own statistics must have as many answers and no failure.

Then so many connections send bytes that are no requests, over HTTP and over gRPC: what was answered is
counted by status, and the memory and the descriptors of the server are compared with those before.

The exit status is 1 if a request failed, an answer was wrong, or a connection got a status that says that the
server is to blame.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tritonclient.grpc.aio as triton_grpc
import tritonclient.http.aio as triton_http
from rich.table import Table
from tritonclient.utils import shared_memory

from cudnn_actor.trials.bench.record import versions
from tests.serving.five_models import KINDS, values_of, write_models
from tests.serving.malformed import Damage, damage
from tests.serving.servers import PATIENCE_S, running, workers_of

from .recording import Row, keep

__all__ = ["arguments", "is_right", "main", "rows"]

Ask = Callable[[str, np.ndarray], Awaitable[np.ndarray]]
_SLOT = 4096
"""Bytes of a tensor's place in shared memory."""
_MOST_ROWS = 4


def _inputs(module: Any, kind: str, values: np.ndarray) -> list[Any]:
    given = module.InferInput("x", values.shape, kind)
    given.set_data_from_numpy(values)
    return [given]


@contextlib.asynccontextmanager
async def over_http(ports: dict[str, int], _: str) -> AsyncIterator[Ask]:
    """Binary tensors; every fourth request as JSON, where the datatype has numbers in JSON."""
    async with triton_http.InferenceServerClient(f"127.0.0.1:{ports['http']}") as client:
        asked = 0

        async def ask(model: str, values: np.ndarray) -> np.ndarray:
            nonlocal asked
            asked += 1
            listed = asked % 4 == 0 and KINDS[model] in ("FP32", "INT64", "BOOL")
            given = triton_http.InferInput("x", values.shape, KINDS[model])
            given.set_data_from_numpy(values, binary_data=not listed)
            wanted = [triton_http.InferRequestedOutput("y", binary_data=not listed)]
            return (await client.infer(model, [given], outputs=wanted)).as_numpy("y")  # type: ignore[no-any-return]

        yield ask


@contextlib.asynccontextmanager
async def over_grpc(ports: dict[str, int], _: str) -> AsyncIterator[Ask]:
    async with triton_grpc.InferenceServerClient(f"127.0.0.1:{ports['grpc']}") as client:

        async def ask(model: str, values: np.ndarray) -> np.ndarray:
            answer = await client.infer(model, _inputs(triton_grpc, KINDS[model], values))
            return answer.as_numpy("y")  # type: ignore[no-any-return]

        yield ask


@contextlib.asynccontextmanager
async def by_stream(ports: dict[str, int], _: str) -> AsyncIterator[Ask]:
    async with triton_grpc.InferenceServerClient(f"127.0.0.1:{ports['grpc']}") as client:
        requests: asyncio.Queue[dict[str, Any]] = asyncio.Queue()

        async def sent() -> AsyncIterator[dict[str, Any]]:
            while True:
                yield await requests.get()

        answers = client.stream_infer(sent())

        async def ask(model: str, values: np.ndarray) -> np.ndarray:
            given = _inputs(triton_grpc, KINDS[model], values)
            requests.put_nowait({"model_name": model, "inputs": given})
            answer, error = await anext(answers)
            if error is not None:
                raise error
            return answer.as_numpy("y")  # type: ignore[no-any-return]

        try:
            yield ask
        finally:
            answers.cancel()


@contextlib.asynccontextmanager
async def in_memory(module: Any, port: int, name: str) -> AsyncIterator[Ask]:
    """Input and output lie in shared memory."""
    region = shared_memory.create_shared_memory_region(name, name, 2 * _SLOT)
    try:
        async with module.InferenceServerClient(f"127.0.0.1:{port}") as client:
            await client.register_system_shared_memory(name, name, 2 * _SLOT)

            async def ask(model: str, values: np.ndarray) -> np.ndarray:
                shared_memory.set_shared_memory_region(region, [values])
                given = module.InferInput("x", values.shape, KINDS[model])
                given.set_shared_memory(name, values.nbytes)
                wanted = module.InferRequestedOutput("y")
                wanted.set_shared_memory(name, values.nbytes, offset=_SLOT)
                await client.infer(model, [given], outputs=[wanted])
                found = shared_memory.get_contents_as_numpy(region, values.dtype, values.shape, offset=_SLOT)
                return np.array(found)

            yield ask
            await client.unregister_system_shared_memory(name)
    finally:
        shared_memory.destroy_shared_memory_region(region)


WAYS: dict[str, Callable[[dict[str, int], str], contextlib.AbstractAsyncContextManager[Ask]]] = {
    "HTTP": over_http,
    "gRPC": over_grpc,
    "gRPC, stream": by_stream,
    "HTTP, shared memory": lambda ports, name: in_memory(triton_http, ports["http"], name),
    "gRPC, shared memory": lambda ports, name: in_memory(triton_grpc, ports["grpc"], name),
}


class Run:
    """The requests, their answers, and the kills in between.

    Parameters
    ----------
    pid
        The server's process.
    requests, kills
        How many requests there are, and how often the worker is killed meanwhile.
    seed
        Of the requests' values.
    """

    def __init__(self, pid: int, requests: int, kills: int, seed: int) -> None:
        self._pid = pid
        self._numbers = iter(range(requests))
        self._between = max(requests // (kills + 1), 1)
        self._kills = kills
        self._rng = np.random.default_rng(seed)
        self.answered: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.failed: list[str] = []
        self.took_s: list[float] = []
        self.killed = 0

    async def work(self, way: str, ports: dict[str, int], name: str) -> None:
        """Ask one request after the other, until there are no more."""
        async with WAYS[way](ports, name) as ask:
            for number in self._numbers:
                model = [*KINDS][number % len(KINDS)]
                values = values_of(model, self._rng, int(self._rng.integers(1, _MOST_ROWS + 1)))
                await self._ask(f"{way}, {model}, request {number}", way, lambda: ask(model, values), values)  # noqa: B023

    async def _ask(
        self, what: str, way: str, ask: Callable[[], Awaitable[np.ndarray]], values: np.ndarray
    ) -> None:
        begun = time.monotonic()
        try:
            found = await ask()
        except Exception as error:  # noqa: BLE001 - counted
            self.failed.append(f"{what}: {type(error).__name__}: {error}"[:300])
            return
        self.took_s.append(time.monotonic() - begun)
        self.answered[way] += 1
        wanted = values | values if values.dtype == bool else values + values
        if (found.dtype, found.shape, found.tobytes()) != (wanted.dtype, wanted.shape, wanted.tobytes()):
            self.wrong.append(what)
        if self.answered.total() % self._between == 0 and self.killed < self._kills:
            os.kill(min(workers_of(self._pid), key=_started), signal.SIGKILL)
            self.killed += 1


def _started(pid: int) -> int:
    """The time at which a process has started: the one that serves is the oldest, and the other its
    standby."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


async def asked(run: Run, ports: dict[str, int], tasks: int) -> None:
    """All requests, from so many tasks of each way."""
    await asyncio.gather(
        *(
            run.work(way, ports, f"cudnn_actor_chaos_{os.getpid()}_{place}_{number}")
            for place, way in enumerate(WAYS)
            for number in range(tasks)
        )
    )


def _restarts(port: int) -> int:
    """How often the server says that its worker was replaced."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as answer:
        lines = answer.read().decode().splitlines()
    return int(
        sum(float(line.split()[-1]) for line in lines if line.startswith("cudnn_actor_restarts_total{"))
    )


async def _counted(port: int) -> tuple[int, int]:
    """The answers and failures of all models, as the server counts them."""
    async with triton_grpc.InferenceServerClient(f"127.0.0.1:{port}") as client:
        stats = (await client.get_inference_statistics()).model_stats
    return (
        sum(each.inference_stats.success.count for each in stats),
        sum(each.inference_stats.fail.count for each in stats),
    )


def rows(args: argparse.Namespace) -> Iterator[Row]:
    """The row of the requests, and one for the malformed connections of each face."""
    seed = random.randrange(1 << 32) if args.seed is None else args.seed
    with tempfile.TemporaryDirectory() as folder:
        write_models(Path(folder))
        words = ["--repository", folder, "--http", "0", "--grpc", "0", "--batch", "8:500"]
        words += ["--standby", str(args.standby), "--max-restarts", "1000000"]
        with running(*words) as (process, ports):
            run = Run(process.pid, args.requests, args.kills, seed)
            begun = time.monotonic()
            asyncio.run(asked(run, ports, args.tasks))
            seconds = time.monotonic() - begun
            counted = asyncio.run(_counted(ports["grpc"]))
            p50, p99 = (float(each) * 1e3 for each in np.percentile(run.took_s, (50, 99)))
            yield {
                "part": "requests",
                "seed": seed,
                "requests": args.requests,
                "answered": dict(run.answered),
                "failed": run.failed,
                "wrong": run.wrong,
                "counted_by_the_server": counted[0],
                "failed_by_the_server": counted[1],
                "killed": run.killed,
                "restarts": _restarts(ports["http"]),
                "seconds": round(seconds, 1),
                "p50_ms": round(p50, 2),
                "p99_ms": round(p99, 2),
                "longest_ms": round(max(run.took_s) * 1e3, 1),
            }
            for face in ("http", "grpc") if args.malformed else ():
                yield _malformed(damage(process.pid, ports, face, args.malformed, seed), face, seed)
            process.send_signal(signal.SIGTERM)
            yield {"part": "end", "status": process.wait(PATIENCE_S)}


def _malformed(found: Damage, face: str, seed: int) -> Row:
    return {
        "part": f"malformed, {face}",
        "seed": seed,
        "connections": found.connections,
        "statuses": dict(sorted(found.statuses.items())),
        "to_blame": found.to_blame,
        "grown_bytes": found.grown_bytes,
        "grown_descriptors": found.grown_descriptors,
    }


def is_right(found: list[Row]) -> bool:
    """Whether nothing failed, no answer was wrong, and no malformed connection was the server's fault."""
    requests, *others = found
    return (
        not (requests["failed"] or requests["wrong"] or requests["failed_by_the_server"])
        and requests["counted_by_the_server"] == sum(requests["answered"].values()) == requests["requests"]
        and not any(row.get("to_blame") for row in others)
        and others[-1].get("status") == 0
    )


def sheet(found: list[Row]) -> Table:
    """The table for a terminal."""
    table = Table("part", "what", title="an inference server under kills and malformed requests")
    for row in found:
        told = {name: value for name, value in row.items() if name != "part"}
        table.add_row(row["part"], ", ".join(f"{name} {value}" for name, value in told.items()))
    return table


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The options; of the command line unless others are given."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.served_chaos",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--tasks", type=int, default=8, help="of each way")
    parser.add_argument("--standby", type=int, choices=(0, 1), default=1)
    parser.add_argument("--malformed", type=int, default=10_000, help="connections of each face")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--out", type=Path, help="directory for the JSON")
    return parser.parse_args(words)


def main() -> int:
    args = arguments()
    found: list[Row] = []

    def noted() -> Iterator[Row]:
        for row in rows(args):
            found.append(row)
            yield row

    keep(noted(), sheet, args.out, "served-chaos", versions=versions(("grpcio", "tritonclient", "uvicorn")))
    return 0 if is_right(found) else 1


if __name__ == "__main__":
    sys.exit(main())
