"""What a pool adds to a small request of an attached process, on members that answer at once.

    python -m benchmarks.pool_requests --members 2 --out benchmarks/results

Each member is a process that answers every request with the same receipt, and computes nothing. The request
is a small convolution of buffers that each member has. The ways take turns in each round, with the same
callers for each member:

- "attached": each caller awaits `gpu.ask` of one member's handle.
- "submit": the same with `gpu.submit`.
- "asyncio alone": each caller awaits a future whose result a callback of the loop sets. Nobody is asked.
- "call": each caller awaits `pool.call`, whose function awaits `gpu.ask`.

Rows have the medians of the rounds. A round is short, so that the ways find the machine alike.

- `loop_us`: what the thread of the event loop computes for a request.
- `ratio`: that, divided by what "attached" took in the same round.
- `instructions`: bytecode instructions of that thread for a request, with asyncio's. They are counted in runs
  of their own. `by_function`: those of the functions that take most.
- `per_s`: requests a second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import platform
import select
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
from rich.table import Table

from cudnn_actor import BufferRef, ConvFwd, ConvSpec, CudnnRef, Receipt
from cudnn_actor.attached.client.attached_service import AttachedService
from cudnn_actor.attached.server.sending import frame_of
from cudnn_actor.attached.wire import FROM_CLIENT, FROM_SERVER, Attached, Done, Requests
from cudnn_actor.pool.dispatching import Dispatching
from cudnn_actor.pool.replicas import PoolBuffer
from cudnn_actor.pool.requests import PoolRequests
from cudnn_actor.processes.channel import Channel, channel_pair
from cudnn_actor.protocol.types.tensor import Layout, TensorSpec

from .attached import asking_nobody
from .recording import Row, attempted, keep, table_of

__all__ = ["main"]

_DIMS = {"x": (1, 8, 16, 16), "w": (8, 8, 3, 3), "y": (1, 8, 14, 14)}
_RECEIPT = Receipt(request_id=1, generation=1, plan="cudnn/ConvFwd/0123456789", queue_us=10.0, run_us=10.0)
_MOST_FUNCTIONS = 24
Ask = Callable[[], Awaitable[Any]]


class _Member:
    """A process that answers all requests, and the handle for it, as a pool has them."""

    def __init__(self, number: int) -> None:
        self.number, self.name = number, f"pool-{number}"
        own, others = channel_pair()
        with others:
            command = [sys.executable, "-m", "benchmarks.pool_requests", "--answers", str(others.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[others.fileno()])
        own.recv(1)  # it is ready
        attached = Attached(
            service=self.name,
            device="cpu",
            isolation="process",
            worker_pid=None,
            window=1024,
            nbytes=None,
            operations=1024,
            graphs=1 << 20,
            models={},
            loaded={},
        )
        service: Any = AttachedService(Channel(own, FROM_SERVER), attached)
        self._service = service
        self.gpu = CudnnRef(service)

    def buffers(self) -> dict[str, BufferRef]:
        """References to buffers that the member is said to have."""
        made = {
            name: BufferRef(slot=slot, generation=self.number + 1, spec=TensorSpec.packed(dims), device="cpu")
            for slot, (name, dims) in enumerate(_DIMS.items())
        }
        for ref in made.values():
            self._service.state.memory.add(ref)
        return made

    async def aclose(self) -> None:
        """End the connection and the process."""
        self._service.end()
        while not self._service.stopped.done():  # noqa: ASYNC110 - in the next turns
            await asyncio.sleep(0)
        self._process.wait()


def answer_all(connection: socket.socket) -> None:
    """Answer each request of a client with the same receipt, until it has gone."""
    connection.send(b"r")
    channel = Channel(connection, FROM_CLIENT)
    while not channel.ended:
        select.select([channel], [], [])
        channel.fetch()
        while channel.frames:
            frame = channel.frames.popleft()
            if isinstance(frame, Requests):
                numbers = range(frame.first, frame.first + len(frame.requests))
                channel.send(frame_of([Done(number, _RECEIPT) for number in numbers]))


@contextlib.asynccontextmanager
async def ways(count: int) -> AsyncIterator[dict[str, list[Ask]]]:
    """For each way, the functions that callers await, in turn."""
    async with contextlib.AsyncExitStack() as ends:
        members = list[_Member]()
        for number in range(count):
            members.append(_Member(number))
            ends.push_async_callback(members[-1].aclose)
        dispatching = Dispatching(count)
        pool = PoolRequests("pool", members, dispatching)  # type: ignore[arg-type]  # as far as requests go
        made = [member.buffers() for member in members]
        for number in range(count):
            dispatching.up(number)
        x = PoolBuffer(np.empty(_DIMS["x"], np.float32), Layout.NCHW, None)
        x.at = {number: refs["x"] for number, refs in enumerate(made)}
        messages = [
            ConvFwd(x=refs["x"], w=refs["w"], y=refs["y"], conv=ConvSpec.symmetric(2)) for refs in made
        ]
        by_x = dict(zip([refs["x"] for refs in made], messages, strict=True))

        def call() -> Awaitable[Any]:
            return pool.call(lambda gpu, own: gpu.ask(by_x[own(x)]), kind="measured")

        handles = [member.gpu for member in members]
        yield {
            "attached": list(map(_asking, handles, messages)),
            "submit": list(map(_submitting, handles, messages)),
            "asyncio alone": [asking_nobody()],
            "call": [call],
        }


def _asking(gpu: CudnnRef, message: ConvFwd) -> Ask:
    return lambda: gpu.ask(message)


def _submitting(gpu: CudnnRef, message: ConvFwd) -> Ask:
    return lambda: gpu.submit(message)


async def load(asks: list[Ask], callers: int, count: int) -> None:
    """Have so many requests answered, by callers that send the next one after an answer."""
    left = iter(range(count))

    async def caller(ask: Ask) -> None:
        for _ in left:
            await ask()

    await asyncio.gather(*(caller(asks[number % len(asks)]) for number in range(callers)))


async def one_round(asks: list[Ask], callers: int, count: int) -> dict[str, float]:
    """The figures of so many requests."""
    began, thread = time.perf_counter(), time.thread_time()
    await load(asks, callers, count)
    thread, took = time.thread_time() - thread, time.perf_counter() - began
    return {"loop_us": 1e6 * thread / count, "per_s": count / took}


async def counted(asks: list[Ask], callers: int, count: int) -> Counter[str]:
    """How many instructions this thread runs in each function for so many requests."""
    found = Counter[str]()

    def opcode(frame: FrameType, event: str, _: object) -> Any:
        if event == "opcode":
            found[f"{Path(frame.f_code.co_filename).name}: {frame.f_code.co_name}"] += 1
        return opcode

    def call(frame: FrameType, _event: str, _argument: object) -> Any:
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return opcode

    before = sys.gettrace()
    sys.settrace(call)
    try:
        await load(asks, callers, count)
    finally:
        sys.settrace(before)
    return found


async def measured(args: argparse.Namespace) -> list[Row]:
    """The rows."""
    async with ways(args.members) as all_ways:
        callers = args.callers * args.members
        for asks in all_ways.values():
            await load(asks, callers, 4 * callers)
        gc.collect()
        gc.freeze()
        rounds = defaultdict[str, list[dict[str, float]]](list)
        for _ in range(args.rounds):
            for name, asks in all_ways.items():
                rounds[name].append(await one_round(asks, callers, args.requests))
        rows = list[Row]()
        for name, found in rounds.items():
            # Since Python 3.12, the first trace lacks instructions.
            await counted(all_ways[name], callers, callers)
            by_function = await counted(all_ways[name], callers, args.counted)
            for function, number in by_function.most_common(args.functions):
                print(f"{name}: {number / args.counted:.1f} instructions in {function}")
            ratios = [
                each["loop_us"] / first["loop_us"]
                for each, first in zip(found, rounds["attached"], strict=True)
            ]
            row = {
                "way": name,
                "members": args.members,
                "callers": callers,
                "loop_us": round(statistics.median(each["loop_us"] for each in found), 2),
                "ratio": round(statistics.median(ratios), 3),
                "instructions": round(by_function.total() / args.counted, 1),
                "per_s": round(statistics.median(each["per_s"] for each in found)),
                "by_function": {
                    function: round(number / args.counted, 2)
                    for function, number in by_function.most_common(_MOST_FUNCTIONS)
                },
            }
            rows.append(row)
        gc.unfreeze()
        return rows


def table(rows: list[Row]) -> Table:
    """The table of the rows, without the functions."""
    shown = [{name: value for name, value in row.items() if name != "by_function"} for row in rows]
    return table_of("A small request of a pool", shown)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pool_requests", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--members", type=int, default=2)
    parser.add_argument("--callers", type=int, default=64, help="for each member")
    parser.add_argument("--requests", type=int, default=2560, help="of a way in a round")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--counted", type=int, default=2560, help="requests whose instructions are counted")
    parser.add_argument(
        "--functions", type=int, default=0, help="how many functions to print, the longest first"
    )
    parser.add_argument("--out", type=Path, help="directory for the JSON")
    parser.add_argument("--answers", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.answers is not None:
        answer_all(socket.socket(fileno=args.answers))
        return

    def rows() -> Iterator[Row]:
        yield from attempted("requests", lambda: asyncio.run(measured(args)))

    known = {name: value for name, value in vars(args).items() if name not in ("out", "answers")}
    keep(
        rows(),
        table,
        args.out,
        "pool_requests",
        asked=known,
        python=platform.python_version(),
        cores=os.cpu_count(),
    )


if __name__ == "__main__":
    main()
