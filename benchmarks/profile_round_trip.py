"""Where the time of a round trip goes: both threads under cProfile, for `ping` and the trivial convolution.

    python benchmarks/profile_round_trip.py [--count N] [--top N]

A profiler multiplies the price of short functions, so read the shares and not the microseconds; the
CPU time a request of each thread is taken without it.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import pstats
import time
from collections.abc import Callable
from typing import Any

import pykka
from rich.console import Console
from rich.table import Table

from cudnn_actor import CudnnRef, CudnnService, Ping
from cudnn_actor.actors import Envelope
from cudnn_actor.cli.bench import trivial_convolution
from cudnn_actor.cli.logbook import LogBook
from cudnn_actor.options import Options

IN_FLIGHT = 64
console = Console()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=40_000)
    parser.add_argument("--top", type=int, default=14)
    args = parser.parse_args()
    with LogBook(live=False):
        asyncio.run(measure(args.count, args.top))


async def measure(count: int, top: int) -> None:
    service = CudnnService(Options(device="cpu"))
    service.launch()
    await asyncio.wrap_future(service.started)
    gpu = CudnnRef(service)
    for name, message in (("ping", Ping()), ("trivial convolution", await trivial_convolution(gpu))):
        await pump(gpu, message, count // 10)
        loop_us, actor_us = await cpu_time(service, gpu, message, count)
        console.print(
            f"{name}: {loop_us:.2f} us of the loop's thread a request, {actor_us:.2f} of the actor's"
        )
        profiles = await profiled(service, gpu, message, count)
        for thread, profile in profiles.items():
            console.print(table(f"{name}: the {thread}'s thread", profile, count, top))
    await gpu.aclose()


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
    loop, actor = cProfile.Profile(), cProfile.Profile()
    on_actor(service, actor.enable)
    loop.enable()
    await pump(gpu, message, count)
    loop.disable()
    on_actor(service, actor.disable)
    return {"loop": loop, "actor": actor}


def table(title: str, profile: cProfile.Profile, count: int, top: int) -> Table:
    rows = Table("share %", "us", "calls", "function", title=title, title_justify="left", pad_edge=False)
    stats: dict[Any, Any] = pstats.Stats(profile).stats  # type: ignore[attr-defined]
    total = sum(entry[2] for entry in stats.values())
    for (file, _, function), entry in sorted(stats.items(), key=lambda item: -item[1][2])[:top]:
        calls, own = entry[1], entry[2]
        where = function if file == "~" else f"{file.rsplit('/', 1)[-1]} {function}"
        rows.add_row(f"{100 * own / total:.1f}", f"{1e6 * own / count:.2f}", f"{calls / count:.2f}", where)
    return rows


if __name__ == "__main__":
    main()
