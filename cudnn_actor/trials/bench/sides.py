"""Benchmarks that send requests to an actor on a thread and to one in a process, alternately, in one run."""

from __future__ import annotations

import asyncio
import functools
import itertools
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

import numpy as np

from cudnn_actor import CudnnRef, spawn
from cudnn_actor.messages import Ping
from cudnn_actor.trials.bench.cpu_time import worker_cpu_s
from cudnn_actor.trials.bench.hops import trivial_convolution
from cudnn_actor.trials.bench.record import ISOLATIONS, SIDE_SUBJECTS, SIDES_IN_FLIGHT, Moves, Side
from cudnn_actor.trials.measure import Plan, Request, one_by_one, rate

__all__ = ["CPU_IN_FLIGHT", "idle", "moves", "sides"]

CPU_IN_FLIGHT = 64
"""The CPU time per request is measured with this many in flight."""
_ELEMENTS = 64 << 18


@asynccontextmanager
async def _both() -> AsyncIterator[dict[str, CudnnRef]]:
    """A service in each isolation."""
    async with AsyncExitStack() as stack:
        yield {
            name: await stack.enter_async_context(spawn(device="cpu", isolation=name)) for name in ISOLATIONS
        }


async def sides(plan: Plan, loop: str) -> list[Side]:
    """Measure pings and the trivial convolution, one and many in flight; both services alternately, in
    several rounds."""
    async with _both() as services:
        requests: dict[tuple[str, str], Request] = {}
        for name, gpu in services.items():
            trivial = await trivial_convolution(gpu)
            for subject, message in zip(SIDE_SUBJECTS, (Ping(), trivial), strict=True):
                requests[subject, name] = functools.partial(gpu.ask, message)
        rows = {key: Side(loop=loop, isolation=key[1], subject=key[0]) for key in requests}
        for request in requests.values():
            await rate(request, max(SIDES_IN_FLIGHT), plan.slice_s)
        for number in range(plan.rounds):
            for subject, name in list(requests)[:: -1 if number % 2 else 1]:
                await _one_round(plan, rows[subject, name], requests[subject, name], services[name])
    return list(rows.values())


async def _one_round(plan: Plan, row: Side, request: Request, gpu: CudnnRef) -> None:
    row.one.append(await one_by_one(request, plan.slice_s))
    for in_flight in SIDES_IN_FLIGHT:
        mine, theirs = time.thread_time(), worker_cpu_s(gpu)
        per_s, timing = await rate(request, in_flight, plan.slice_s)
        if in_flight == CPU_IN_FLIGHT:
            row.loop_cpu_us.append(1e6 * (time.thread_time() - mine) / timing.count)
            row.worker_cpu_us.append(1e6 * (worker_cpu_s(gpu) - theirs) / timing.count)
        row.per_s.setdefault(in_flight, []).append(per_s)


async def moves(plan: Plan) -> Moves:
    """64 MiB uploaded, downloaded, and copied by NumPy from one array to another, alternately.

    The arena and the arrays have been used before, so no timed operation allocates memory from the system.
    """
    values = np.random.default_rng(0).random(_ELEMENTS, np.float32).reshape(-1, 64, 64, 64)
    other = values.copy()
    found = Moves(nbytes=values.nbytes)
    async with _both() as services:
        for gpu in services.values():
            await _up_and_down(gpu, values)
        for _ in range(plan.moves):
            began = time.perf_counter()
            np.copyto(other, values)
            found.copy_s.append(time.perf_counter() - began)
            for name, gpu in services.items():
                for taken, seconds in zip(
                    (found.up_s, found.down_s), await _up_and_down(gpu, values), strict=True
                ):
                    taken.setdefault(name, []).append(seconds)
    return found


async def _up_and_down(gpu: CudnnRef, values: np.ndarray) -> tuple[float, float]:
    began = time.perf_counter()
    ref = await gpu.upload(values)
    there = time.perf_counter()
    await gpu.download(ref)
    back = time.perf_counter()
    await gpu.free(ref)
    return there - began, back - there


async def idle(plan: Plan) -> dict[str, list[float]]:
    """Percent of one core that an idle service uses after it has worked; one item per round."""
    found: dict[str, list[float]] = {}
    for name, _ in itertools.product(ISOLATIONS, range(plan.idle_rounds)):
        async with spawn(device="cpu", isolation=name) as gpu:
            await gpu.ask(await trivial_convolution(gpu))
            await asyncio.sleep(plan.idle_s / 4)  # until the work after the last request is done, too
            wall, own, theirs = time.perf_counter(), time.process_time(), worker_cpu_s(gpu)
            await asyncio.sleep(plan.idle_s)
            took_s = time.perf_counter() - wall
            found.setdefault(f"{name}: this process", []).append(100 * (time.process_time() - own) / took_s)
            if gpu.worker_pid is not None:
                found.setdefault(f"{name}: the worker", []).append(
                    100 * (worker_cpu_s(gpu) - theirs) / took_s
                )
    return found
