"""Round trips: one request in flight, and many, on each loop and placement."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from cudnn_actor import ConvFwd, ConvSpec, CudnnRef, spawn
from cudnn_actor.messages import Ping
from cudnn_actor.trials.bench.record import IN_FLIGHT, SUBJECTS, Hop
from cudnn_actor.trials.measure import BareHop, Plan, PykkaWay, Request, one_by_one, rate
from cudnn_actor.trials.placement import last_cores, place

__all__ = ["round_trips", "trivial_convolution"]


async def round_trips(plan: Plan, loop: str, placement: str) -> list[Hop]:
    """Measure every subject alternately, in several rounds."""
    rows = {name: Hop(loop=loop, placement=placement, subject=name) for name in SUBJECTS}
    async with spawn(device="cpu", isolation="thread") as gpu:
        with _subjects(gpu, await trivial_convolution(gpu)) as subjects:
            for request, _ in subjects.values():
                await rate(request, max(IN_FLIGHT), plan.slice_s)  # warm, and with all its threads started
            place(placement)
            for _ in range(plan.rounds):
                for name, (request, thread) in subjects.items():
                    await _one_round(plan, rows[name], request, thread)
    return list(rows.values())


async def _one_round(plan: Plan, row: Hop, request: Request, thread: int | None) -> None:
    def look() -> None:
        where = last_cores(thread)
        if where is not None:
            row.shared_core.append(where[0] == where[1])

    row.one.append(await one_by_one(request, plan.slice_s, look))
    for in_flight in IN_FLIGHT:
        per_s, _ = await rate(request, in_flight, plan.slice_s)
        row.per_s.setdefault(in_flight, []).append(per_s)


@contextmanager
def _subjects(gpu: CudnnRef, trivial: ConvFwd) -> Iterator[dict[str, tuple[Request, int | None]]]:
    actor = next(thread for thread in threading.enumerate() if thread.name.startswith("CudnnActor-"))
    hop, plain, ping = BareHop(), PykkaWay(), Ping()
    threads = (hop.thread.native_id, actor.native_id, actor.native_id, plain.native_id())
    requests: tuple[Request, ...] = (hop, lambda: gpu.ask(ping), lambda: gpu.ask(trivial), plain)
    try:
        yield dict(zip(SUBJECTS, zip(requests, threads, strict=True), strict=True))
    finally:
        hop.close()
        plain.close()


async def trivial_convolution(gpu: CudnnRef) -> ConvFwd:
    """A 1×1×1×1 forward convolution: all costs of a request except arithmetic."""
    one = np.ones((1, 1, 1, 1), "float32")
    x, w, y = await gpu.upload(one), await gpu.upload(one), await gpu.empty((1, 1, 1, 1))
    return ConvFwd(x=x, w=w, y=y, conv=ConvSpec.symmetric(2))
