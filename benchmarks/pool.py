"""Pools of one and of all devices beside each other, and the killing of members under load.

    python -m benchmarks.pool --devices cuda:0 cuda:1 --out benchmarks/results
    python -m benchmarks.pool --devices cuda:0 cuda:1 --model resnet50.onnx --dtype bfloat16 --batched

Callers send one request after the other: a small convolution of buffers that each member has, a model
(`--model`), or single samples of a model in batches (`--batched`).

- `per_s`, `p50_ms`, `p99_ms`: requests a second, and from a call to its answer; medians of the rounds, in
  which the pools take turns. `callers` is the number of callers.
- "one member, its handle" is the same by `pool.on(0)`: what the pool adds is the difference.
- "1 process", "2 processes": so many processes with an interpreter of their own send small convolutions to
  the members' sockets, `callers` to each member. With batches, each process has a pool of one member, and
  `callers` of its own.
- `busy`: the share of the time in which the thread of this process's event loop computed. Near 1, this
  process is what limits the rate. `cores` is the same of all its threads, in sum.
- `collected_ms`: the longest pause of the garbage collector meanwhile. With `--freeze`, `gc.freeze()` is
  called when the pools are warm: the collector then passes over what lives since then.
- `batch`: samples in a batch, on average; `assembled_ms`, `ran_ms`, `divided_ms`: see `BatchTimes`;
  `waited_ms`: how long a sample waited for its batch, on average; `assembled_p99_ms`, `ran_p99_ms`: the 99th
  percentiles of batches.
- "80 % load": requests begin at random moments, of which another process tells. `asked_per_s`: how many begin
  in a second, 0.8 times what the pool answered in a second just before. `late_p99_ms`: from such a moment
  until the request is sent; `p99_ms` includes it.
- "killed": with all members, one is killed by SIGKILL in turn. `slowest_ms` is the longest request of those
  that were answered within a second after a kill, the median and the maximum of the kills; `others_ms` the
  same of those that the killed member never had; `before_ms` the same of all within 0.3 s before it;
  `down_ms` from the end of a member's process until it is up again.
- "swapped": with all members, the model is replaced by itself under load: `swap_s` is how long that takes,
  `during_per_s` and `slowest_ms` what callers see meanwhile.
- "target": a figure that is aimed at on two devices, and whether it was reached.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import gc
import os
import signal
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from cudnn_actor import BufferRef, ConvFwd, ConvSpec, CudnnRef
from cudnn_actor.models.batch_records import BatchTimes
from cudnn_actor.pool import MemberState, Pool, PoolBuffer, PoolModel, spawn_pool
from cudnn_actor.supervision import Restarted

from .gpu.setting import gpu_versions
from .open_load import Request, other_process
from .recording import Row, keep

__all__ = ["Asked", "main", "rows", "sheet", "versions_of"]

_BEHIND_S, _BEFORE_S = 1.0, 0.3
_LOAD = 0.8
_MAX_WAITING = 1 << 16
"""Samples: none is refused."""
Own = Callable[[Any], Any]
Ask = Callable[[CudnnRef, Own], Awaitable[Any]]
"""Sends a request to a member, whose own buffers and models the second argument gives."""
Call = Callable[[], Awaitable[Any]]


class Asked(NamedTuple):
    """What is measured."""

    devices: list[str]
    model: Path | None
    dtype: str | None
    batched: bool
    batch: int
    in_flight: int
    callers: list[int]
    processes: list[int]
    seconds: float
    rounds: int
    kills: int
    freeze: bool = False
    plan_store: Path | None = None


class Way(NamedTuple):
    """How requests are sent to a pool; and, where they are batched, the times of their batches."""

    call: Call
    batches: list[BatchTimes]


async def _ask(pool: Pool, asked: Asked, model: PoolModel | None) -> Ask:
    """What is sent to a member of a pool, which is given what it needs; of a model, if there is one."""
    if model is not None:
        given = _inputs(model, asked.batch)
        return lambda gpu, own: gpu.run(own(model), given)
    dims = {"x": (1, 8, 16, 16), "w": (8, 8, 3, 3), "y": (1, 8, 14, 14)}
    made = {name: await pool.upload(np.ones(each, np.float32)) for name, each in dims.items()}
    x = made["x"]
    messages: dict[BufferRef, ConvFwd] = {}
    """By the member's buffer: a message that is sent again is not looked at again."""

    def first(own: Callable[[PoolBuffer], Any]) -> ConvFwd:
        buffers = {name: own(buffer) for name, buffer in made.items()}
        messages[own(x)] = message = ConvFwd(**buffers, conv=ConvSpec.symmetric(2))
        return message

    return lambda gpu, own: gpu.ask(messages.get(own(x)) or first(own))


def _dims(asked: Asked) -> dict[str, int]:
    from cudnn_actor.onnx import OnnxModel  # noqa: PLC0415 - needs an extra

    assert asked.model is not None, "of a model alone"
    names = {dim for each in OnnxModel(asked.model).inputs for dim in each.dims or () if isinstance(dim, str)}
    return dict.fromkeys(names, asked.batch)


def _inputs(model: PoolModel, batch: int) -> dict[str, np.ndarray]:
    return {
        each.name: np.zeros(
            [dim if isinstance(dim, int) else batch for dim in each.dims or ()],
            np.float32 if each.dtype is None else each.dtype.numpy,
        )
        for each in model.inputs
    }


async def _loaded(pool: Pool, asked: Asked) -> PoolModel | None:
    """The model that is asked for, if one is. The dims of batches are warmed by their endpoint."""
    if asked.model is None:
        return None
    dims = None if asked.batched else _dims(asked)
    return await pool.load(asked.model, dtype=asked.dtype, dims=dims)  # type: ignore[arg-type]


@contextlib.asynccontextmanager
async def _calls(pool: Pool, asked: Asked, model: PoolModel | None) -> AsyncIterator[dict[str, Way]]:
    """A request by the pool; the same, which returns the member that had it first; and by a handle."""
    if asked.batched:
        assert model is not None, "batches are of a model"
        sample = _inputs(model, 1)
        times, in_flight = list[BatchTimes](), asked.in_flight * len(pool)
        async with pool.batched(
            model, max_batch=asked.batch, max_waiting=_MAX_WAITING, in_flight=in_flight
        ) as endpoint:
            endpoint.on_batch = times.append

            async def one_sample() -> None:
                await endpoint(sample)

            yield {"pool": Way(one_sample, times)}
        return
    ask = await _ask(pool, asked, model)

    def by_the_pool() -> Awaitable[Any]:
        return pool.call(ask, kind="measured")

    async def noted() -> str | None:
        members = list[str | None]()

        async def work(gpu: CudnnRef, own: Own) -> None:
            members.append(gpu._state.name)
            await ask(gpu, own)

        await pool.call(work, kind="measured")
        return members[0]

    async def by_its_handle() -> None:
        await ask(pool.on(0), lambda replica: replica.at[0])

    yield {"handle": Way(by_its_handle, []), "pool": Way(by_the_pool, []), "noted": Way(noted, [])}


async def _load(call: Call, callers: int, seconds: float, *, noted: bool = False) -> list[Request]:
    """The requests of so many seconds, by callers that send the next one after an answer. `noted`: whether a
    call returns the member that had it first."""
    until, found = time.perf_counter() + seconds, list[Request]()

    async def caller() -> None:
        began = time.perf_counter()
        while began < until or not found:
            member = await call()
            found.append(Request(began, time.perf_counter(), member if noted else None))
            began = time.perf_counter()

    await asyncio.gather(*(caller() for _ in range(callers)))
    return found


def _figures(found: list[Request]) -> dict[str, float]:
    took_ms = np.array([1e3 * (each.ended - each.began) for each in found])
    span_s = max(each.ended for each in found) - min(each.began for each in found)
    return {
        "per_s": len(found) / span_s,
        "p50_ms": float(np.percentile(took_ms, 50)),
        "p99_ms": float(np.percentile(took_ms, 99)),
        "late_p99_ms": 1e3 * float(np.percentile([each.late for each in found], 99)),
    }


@contextlib.contextmanager
def _collections() -> Iterator[list[float]]:
    """The pauses of the garbage collector in the body, in milliseconds; 0 first."""
    pauses, began = [0.0], [0.0]

    def note(phase: str, _: dict[str, int]) -> None:
        if phase == "start":
            began[0] = time.perf_counter()
        else:
            pauses.append(1e3 * (time.perf_counter() - began[0]))

    gc.callbacks.append(note)
    try:
        yield pauses
    finally:
        gc.callbacks.remove(note)


async def _measured(way: Way, load: Awaitable[list[Request]]) -> dict[str, float]:
    """The figures of a load that is awaited here, what this process computed meanwhile, and its batches."""
    way.batches.clear()
    thread, process = time.thread_time(), time.process_time()
    with _collections() as pauses:
        found = await load
    took = max(each.ended for each in found) - min(each.began for each in found)
    figures = {
        **_figures(found),
        "collected_ms": max(pauses),
        "busy": (time.thread_time() - thread) / took,
        "cores": (time.process_time() - process) / took,
    }
    if way.batches:
        figures |= _of_batches(way.batches)
    return figures


def _of_batches(batches: list[BatchTimes]) -> dict[str, float]:
    """The samples and the times of batches."""
    samples = sum(each.samples for each in batches)
    figures = {
        "batch": samples / len(batches),
        "waited_ms": 1e-6 * sum(each.waited_ns for each in batches) / samples,
    }
    for name in ("assembled", "ran", "divided"):
        took_ms = [1e-6 * getattr(each, f"{name}_ns") for each in batches]
        figures[f"{name}_ms"] = statistics.fmean(took_ms)
        if name != "divided":
            figures[f"{name}_p99_ms"] = float(np.percentile(took_ms, 99))
    return figures


async def _rates(asked: Asked) -> AsyncIterator[Row]:
    async with (
        spawn_pool(asked.devices[:1], name="one", plan_store=asked.plan_store) as one,
        spawn_pool(asked.devices, plan_store=asked.plan_store) as all_of_them,
        _calls(one, asked, await _loaded(one, asked)) as of_one,
        _calls(all_of_them, asked, await _loaded(all_of_them, asked)) as of_all,
    ):
        ways = {"one member, its handle": of_one["handle"]} if "handle" in of_one else {}
        ways |= {"one member": of_one["pool"], f"{len(all_of_them)} members": of_all["pool"]}
        for way in ways.values():
            await _load(way.call, max(asked.callers), asked.seconds / 4)
        if asked.freeze:
            gc.collect()
            gc.freeze()
        for callers in asked.callers:
            rounds = defaultdict[str, list[dict[str, float]]](list)
            for _ in range(asked.rounds):
                for name, way in ways.items():
                    rounds[name].append(await _measured(way, _load(way.call, callers, asked.seconds)))
            for name, found in rounds.items():
                yield {"what": name, "callers": callers, **_medians(found)}
        async for row in _at_load(asked, {name: ways[name] for name in list(ways)[-2:]}):
            yield row
        for processes in () if asked.model is not None else asked.processes:
            for name, pool in (("one member", one), (f"{len(all_of_them)} members", all_of_them)):
                sockets = [member.socket for member in pool.statistics().members]
                arguments = [str(asked.seconds), str(max(asked.callers) * len(sockets)), *sockets]
                yield await _by_processes(asked, name, [["benchmarks.pool_caller", *arguments]] * processes)
    if asked.batched and asked.processes:  # once those members have ended
        for devices in (asked.devices[:1], asked.devices):
            name = "one member" if len(devices) == 1 else f"{len(devices)} members"
            yield await _by_processes(asked, name, [_batching(asked, device) for device in devices])


def _batching(asked: Asked, device: str) -> list[str]:
    """The arguments of a process that runs batches on one device, by a pool of its own."""
    options = [
        str(asked.model),
        "--batched",
        "--batch",
        str(asked.batch),
        "--in-flight",
        str(asked.in_flight),
    ]
    options += [] if asked.dtype is None else ["--dtype", asked.dtype]
    callers, seconds = max(asked.callers), asked.seconds
    return [
        "benchmarks.pool",
        "--sends",
        "--devices",
        device,
        "--model",
        *options,
        "--callers",
        str(callers),
        "--seconds",
        str(seconds),
    ]


async def _sends(asked: Asked) -> None:
    """Be such a process: say that it is ready, begin when a line comes, and print the rate."""
    async with (
        spawn_pool(asked.devices, plan_store=asked.plan_store) as pool,
        _calls(pool, asked, await _loaded(pool, asked)) as calls,
    ):
        call, callers = calls["pool"].call, max(asked.callers)
        await _load(call, callers, asked.seconds / 4)
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        print(_figures(await _load(call, callers, asked.seconds))["per_s"], flush=True)


def _medians(found: list[dict[str, float]]) -> dict[str, float]:
    return {name: round(statistics.median(each[name] for each in found), 3) for name in found[0]}


async def _at_load(asked: Asked, ways: dict[str, Way]) -> AsyncIterator[Row]:
    """The latencies at 0.8 of what a pool can answer, measured just before, likewise with a task for each."""
    rounds = defaultdict[str, list[dict[str, float]]](list)

    async def as_task(call: Call) -> None:
        await asyncio.ensure_future(call())

    async with other_process() as open_load:
        for _ in range(asked.rounds):
            for name, way in ways.items():
                load = _load(functools.partial(as_task, way.call), max(asked.callers), asked.seconds)
                asked_per_s = _LOAD * _figures(await load)["per_s"]
                figures = await _measured(way, open_load(way.call, asked_per_s, asked.seconds))
                rounds[name].append({"asked_per_s": asked_per_s, **figures})
    for name, found in rounds.items():
        yield {"what": f"{name}, 80 % load", **_medians(found)}


async def _by_processes(asked: Asked, way: str, processes: list[list[str]]) -> Row:
    """The rate of what processes of their own send, which are given by module and arguments."""
    running = [
        await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", *arguments),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        for arguments in processes
    ]
    for each in running:
        assert each.stdout is not None, "it was asked for"
        await each.stdout.readline()  # it is ready
    answers = await asyncio.gather(*(each.communicate(b"\n") for each in running))
    words = "1 process" if len(processes) == 1 else f"{len(processes)} processes"
    rates = [float(out) for out, _ in answers]
    return {"what": f"{way}, {words}", "callers": max(asked.callers), "per_s": round(sum(rates), 1)}


async def _killed(asked: Asked) -> Row:
    callers = max(asked.callers)
    slowest = defaultdict[str, list[float]](list)
    async with (
        spawn_pool(asked.devices, max_restarts=2 * asked.kills, plan_store=asked.plan_store) as pool,
        _calls(pool, asked, await _loaded(pool, asked)) as calls,
    ):
        call = calls["noted" if "noted" in calls else "pool"].call
        await _load(call, callers, asked.seconds / 4)
        for number in range(asked.kills):
            victim = number % len(pool)
            name = pool.statistics().members[victim].name
            load = asyncio.ensure_future(_load(call, callers, _BEFORE_S + _BEHIND_S, noted=True))
            await asyncio.sleep(_BEFORE_S)
            killed = time.perf_counter()
            os.kill(pool.statistics().members[victim].pid or 0, signal.SIGKILL)
            found = await load
            behind = [each for each in found if each.ended > killed]
            slowest["before_ms"].append(_slowest([each for each in found if each.ended <= killed]))
            slowest["slowest_ms"].append(_slowest(behind))
            slowest["others_ms"].append(_slowest([each for each in behind if each.member != name]))
            while pool.statistics().members[victim].state is not MemberState.UP:  # noqa: ASYNC110 - it is not told
                await asyncio.sleep(0.01)
        moved = pool.statistics().moved
    down = [1e3 * event.downtime_s async for event in pool.events() if isinstance(event, Restarted)]
    both = {name: [round(statistics.median(each), 2), round(max(each), 2)] for name, each in slowest.items()}
    return {
        "what": "killed",
        "callers": callers,
        "kills": asked.kills,
        "moved": moved,
        **both,
        "down_ms": [round(statistics.median(down), 2), round(max(down), 2)] if down else [],
    }


async def _swapped(asked: Asked) -> Row:
    """A rolling swap under load, of a model by itself."""
    assert asked.model is not None, "models are swapped"
    callers = max(asked.callers)
    async with spawn_pool(asked.devices, plan_store=asked.plan_store) as pool:
        model = await _loaded(pool, asked)
        async with _calls(pool, asked, model) as calls:
            call, over = calls["pool"].call, asyncio.Event()
            await _load(call, callers, asked.seconds)

            async def caller() -> list[Request]:
                found = list[Request]()
                while not over.is_set():
                    began = time.perf_counter()
                    await call()
                    found.append(Request(began, time.perf_counter()))
                return found

            async with asyncio.TaskGroup() as tasks:
                callings = [tasks.create_task(caller()) for _ in range(callers)]
                await asyncio.sleep(_BEFORE_S)
                began = time.perf_counter()
                await pool.load(asked.model, dtype=asked.dtype, replace=model)  # type: ignore[arg-type]
                ended = time.perf_counter()
                over.set()
    found = [each for calling in callings for each in calling.result() if began < each.ended < ended]
    return {
        "what": "swapped",
        "callers": callers,
        "swap_s": round(ended - began, 3),
        "during_per_s": round(len(found) / (ended - began), 1),
        "slowest_ms": round(_slowest(found), 2),
    }


def _slowest(found: list[Request]) -> float:
    """The longest of requests, in milliseconds."""
    return 1e3 * max((each.ended - each.began for each in found), default=0.0)


def _targets(asked: Asked, found: list[Row]) -> Iterator[Row]:
    """What is aimed at on two devices, from the rows before."""
    all_of_them = f"{len(asked.devices)} members"
    by = {(row["what"], row.get("callers")): row for row in found}
    most = max(asked.callers)

    def ratio(suffix: str, figure: str, callers: int | None) -> float:
        many, one = (by[f"{way}{suffix}", callers][figure] for way in (all_of_them, "one member"))
        return round(float(many) / float(one), 3)

    def target(what: str, measured: float, limit: float, *, least: bool) -> Row:
        met = measured >= limit if least else measured <= limit
        return {"what": "target", "of": what, "measured": measured, "limit": limit, "met": met}

    if asked.model is not None:
        yield target("rate beside one member's", ratio("", "per_s", most), 1.9, least=True)
    else:
        if 2 in asked.processes:
            measured = ratio(", 2 processes", "per_s", most)
            yield target("rate beside one member's, from 2 processes", measured, 1.9, least=True)
        yield target("rate beside one member's, from this one", ratio("", "per_s", most), 1.5, least=True)
    yield target("p99 at 80 % load beside one's", ratio(", 80 % load", "p99_ms", None), 1.3, least=False)
    if killed := by.get(("killed", most)):
        which = "slowest_ms" if asked.batched else "others_ms"  # of a batch's member nothing is known here
        measured = killed[which][1]
        yield target("slowest of the others' requests after a kill, ms", measured, 300.0, least=False)


def rows(asked: Asked) -> Iterator[Row]:
    """Yields a row for each way and number of callers, one of the kills, and the targets. Blocks for it."""
    found = list[Row]()
    with asyncio.Runner() as runner:
        rates = _rates(asked)
        try:
            while True:
                found.append(runner.run(anext(rates)))  # type: ignore[arg-type]  # a coroutine in all but type
                yield found[-1]
        except StopAsyncIteration:
            pass
        if asked.freeze:
            gc.unfreeze()
        if asked.kills:
            found.append(runner.run(_killed(asked)))
            yield found[-1]
        if asked.model is not None:
            found.append(runner.run(_swapped(asked)))
            yield found[-1]
    yield from _targets(asked, found)


def sheet(found: list[Row]) -> Table:
    """The table for a terminal."""
    table = Table(title="Pools")
    names = (
        "what",
        "callers",
        "per_s",
        "p50_ms",
        "p99_ms",
        "slowest_ms",
        "others_ms",
        "before_ms",
        "down_ms",
        "swap_s",
        "during_per_s",
    )
    columns = (*names, "moved", "busy", "cores", "of", "measured", "limit", "met")
    for name in columns:
        table.add_column(name, justify="left" if name in ("what", "of") else "right")
    for row in found:
        table.add_row(*(str(row.get(name, "")) for name in columns))
    return table


def versions_of(devices: list[str]) -> dict[str, str]:
    """Of the GPU and the libraries, where a member is on one."""
    return gpu_versions() if any(device.startswith("cuda") for device in devices) else {}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pool", description=__doc__.splitlines()[0])
    parser.add_argument("--devices", nargs="+", default=["cpu", "cpu"])
    parser.add_argument("--model", type=Path, help="an ONNX file; without one, a small convolution")
    parser.add_argument("--dtype", help="what the model is computed in")
    parser.add_argument("--batched", action="store_true", help="the model's samples, in batches of --batch")
    parser.add_argument("--batch", type=int, default=32, help="the size of named dims, and of batches")
    parser.add_argument("--in-flight", type=int, default=2, help="batches that a member may have")
    parser.add_argument("--callers", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--processes", type=int, nargs="*", default=[1, 2], help="processes that send")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--freeze", action="store_true", help="gc.freeze() when the pools are warm")
    parser.add_argument("--plan-store", type=Path, help="a directory for plans, which saves their builds")
    parser.add_argument("--sends", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, help="directory for the JSON")
    given = vars(parser.parse_args())
    out, sends = given.pop("out"), given.pop("sends")
    if sends:
        asyncio.run(_sends(Asked(**given)))
        return
    known = {name: str(value) for name, value in given.items()}
    keep(rows(Asked(**given)), sheet, out, "pool", asked=known, versions=versions_of(given["devices"]))


if __name__ == "__main__":
    main()
