"""Profiles the CPU time of a round trip: both threads under cProfile, `ping` and a trivial convolution.

    python benchmarks/profile_round_trip.py [--count N] [--top N] [--out DIR]

The profile counts CPU time, not waiting. A profiler multiplies the price of short functions, so only shares
are given of it; the CPU time a request of each thread is taken without it.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import datetime
import pstats
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pykka
from rich.console import Console
from rich.table import Table

from cudnn_actor import CudnnRef, CudnnService
from cudnn_actor.actors import Envelope
from cudnn_actor.cli.logbook import LogBook
from cudnn_actor.messages import Ping
from cudnn_actor.options import Options
from cudnn_actor.trials.bench.hops import trivial_convolution

IN_FLIGHT = 64
console = Console()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=40_000)
    parser.add_argument("--top", type=int, default=14)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    with LogBook(live=False):
        found = asyncio.run(measure(args.count, args.top))
    for name, request in found["requests"].items():
        console.print(
            f"{name}: CPU us a request: loop {request['loop_us']:.2f}, actor {request['actor_us']:.2f}"
        )
        for thread in ("loop", "actor"):
            console.print(table(f"{name}: the {thread}'s thread", request[thread]))
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        path = args.out / f"profile-{found['date'].replace(':', '').replace('-', '')[:15]}.json"
        path.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1))


async def measure(count: int, top: int) -> dict[str, Any]:
    service = CudnnService(Options(device="cpu", isolation="thread"))
    service.launch()
    await asyncio.wrap_future(service.started)
    gpu = CudnnRef(service)
    requests = {}
    for name, message in (("ping", Ping()), ("trivial convolution", await trivial_convolution(gpu))):
        await pump(gpu, message, count // 10)
        loop_us, actor_us = await cpu_time(service, gpu, message, count)
        profiles = await profiled(service, gpu, message, count)
        shares = {thread: ranked(profile, top) for thread, profile in profiles.items()}
        requests[name] = {"loop_us": loop_us, "actor_us": actor_us, **shares}
    await gpu.aclose()
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"date": date, "in_flight": IN_FLIGHT, "count": count, "requests": requests}


async def pump(gpu: CudnnRef, message: Any, count: int) -> None:
    async def sender() -> None:
        for _ in range(count // IN_FLIGHT):
            await gpu.ask(message)

    await asyncio.gather(*(sender() for _ in range(IN_FLIGHT)))


class Errand:
    """Stands in for a message's context, and is therefore run on the actor's thread."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._call = call

    def run(self, *_: Any) -> Any:
        return self._call()


def on_actor(service: CudnnService, call: Callable[[], Any]) -> Any:
    reply: pykka.ThreadingFuture[Any] = pykka.ThreadingFuture()
    service.state.mailbox.admit(Envelope(Ping(), reply_to=reply, context=Errand(call)))  # type: ignore[arg-type]
    return reply.get()


async def cpu_time(service: CudnnService, gpu: CudnnRef, message: Any, count: int) -> tuple[float, float]:
    actor, mine = on_actor(service, time.thread_time), time.thread_time()
    await pump(gpu, message, count)
    mine, actor = time.thread_time() - mine, on_actor(service, time.thread_time) - actor
    return 1e6 * mine / count, 1e6 * actor / count


async def profiled(
    service: CudnnService, gpu: CudnnRef, message: Any, count: int
) -> dict[str, cProfile.Profile]:
    loop, actor = cProfile.Profile(time.thread_time), cProfile.Profile(time.thread_time)
    on_actor(service, actor.enable)
    loop.enable()
    await pump(gpu, message, count)
    loop.disable()
    on_actor(service, actor.disable)
    return {"loop": loop, "actor": actor}


def ranked(profile: cProfile.Profile, top: int) -> list[tuple[str, float]]:
    """Functions by their own share of the CPU time, in percent."""
    stats: dict[Any, Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    total = sum(entry[2] for entry in stats.values())
    shares: dict[str, float] = {}
    for (file, _, function), entry in stats.items():
        where = function if file == "~" else f"{file.rsplit('/', 1)[-1]} {function}"
        shares[where] = shares.get(where, 0.0) + 100 * entry[2] / total
    return sorted(shares.items(), key=lambda item: -item[1])[:top]


def table(title: str, shares: list[tuple[str, float]]) -> Table:
    rows = Table("% of CPU", "function", title=title, title_justify="left", pad_edge=False)
    for where, share in shares:
        rows.add_row(f"{share:.1f}", where)
    return rows


if __name__ == "__main__":
    main()
