"""Pools of one and of all devices beside each other, and the killing of members under load.

    python -m benchmarks.pool --devices cuda:0 cuda:1 --model resnet50.onnx --out benchmarks/results

Callers send one request after the other: a product of matrices with weights on the members, a small
convolution of buffers that each member has (`--convolution`), or a model.

- `per_s`, `p50_ms`, `p99_ms`: requests a second, and from a call to its answer; medians of the rounds, in
  which the pools take turns. `callers` is the number of callers.
- "one member, its handle" is the same by `pool.on(0)`: what the pool adds is the difference.
- "killed": with all members, one is killed by SIGKILL in turn. `slowest_ms` is the longest request of those
  that were answered within a second after a kill, the median and the maximum of the kills; `before_ms` the
  same within 0.3 s before it; `down_ms` from the end of a member's process until it is up again.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import statistics
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from cudnn_actor import ConvFwd, ConvSpec, GraphBuilder
from cudnn_actor.pool import Pool, PoolBuffer, PoolModel, spawn_pool
from cudnn_actor.supervision import Restarted

from .recording import Row, keep

__all__ = ["main", "rows", "sheet"]

_BEHIND_S, _BEFORE_S = 1.0, 0.3
Call = Callable[[], Awaitable[Any]]


class Asked(NamedTuple):
    """What is measured."""

    devices: list[str]
    model: Path | None
    convolution: bool
    batch: int
    callers: list[int]
    seconds: float
    rounds: int
    kills: int


async def _calls(pool: Pool, asked: Asked) -> dict[str, Call]:
    """A request by the pool, and the same by its first member's handle."""
    if asked.model is not None:
        model = await pool.load(asked.model, dims=_dims(asked))
        return await _calls_of_model(pool, model, asked.batch)
    if asked.convolution:
        return await _calls_of_convolution(pool)
    g, rng = GraphBuilder(), np.random.default_rng(0)
    graph = g.build(y=g.matmul(g.input("x", (asked.batch, 256)), g.input("w", (256, 256))))
    x = rng.standard_normal((asked.batch, 256)).astype(np.float32)
    w = rng.standard_normal((256, 256)).astype(np.float32)
    everywhere, there = await pool.upload(w), await pool.on(0).upload(w)
    return {
        "pool": lambda: pool.compute(graph, x=x, w=everywhere),
        "handle": lambda: pool.on(0).compute(graph, x=x, w=there),
    }


async def _calls_of_convolution(pool: Pool) -> dict[str, Call]:
    dims = {"x": (1, 8, 16, 16), "w": (8, 8, 3, 3), "y": (1, 8, 14, 14)}
    made = {name: await pool.upload(np.ones(each, np.float32)) for name, each in dims.items()}
    messages: dict[int, ConvFwd] = {}
    """By member's buffer: a message that is sent again is not looked at again."""

    def message(own: Callable[[PoolBuffer], Any]) -> ConvFwd:
        x = own(made["x"])
        if id(x) not in messages:
            messages[id(x)] = ConvFwd(x=x, w=own(made["w"]), y=own(made["y"]), conv=ConvSpec.symmetric(2))
        return messages[id(x)]

    return {
        "pool": lambda: pool.call(lambda gpu, own: gpu.ask(message(own)), kind="convolution"),
        "handle": lambda: pool.on(0).ask(message(lambda buffer: buffer.at[0])),
    }


def _dims(asked: Asked) -> dict[str, int]:
    from cudnn_actor.onnx import OnnxModel  # noqa: PLC0415 - needs an extra

    names = {dim for each in OnnxModel(asked.model).inputs for dim in each.dims or () if isinstance(dim, str)}
    return dict.fromkeys(names, asked.batch)


async def _calls_of_model(pool: Pool, model: PoolModel, batch: int) -> dict[str, Call]:
    given = {
        each.name: np.zeros(
            [dim if isinstance(dim, int) else batch for dim in each.dims or ()],
            np.float32 if each.dtype is None else each.dtype.numpy,
        )
        for each in model.inputs
    }
    return {
        "pool": lambda: pool.run(model, given),
        "handle": lambda: pool.on(0).run(model.at[0], given),
    }


async def _load(call: Call, callers: int, seconds: float) -> list[tuple[float, float]]:
    """When each request of so many seconds was sent and answered."""
    until, found = time.perf_counter() + seconds, list[tuple[float, float]]()

    async def caller() -> None:
        while (began := time.perf_counter()) < until:
            await call()
            found.append((began, time.perf_counter()))

    await asyncio.gather(*(caller() for _ in range(callers)))
    return found


def _figures(found: list[tuple[float, float]]) -> dict[str, float]:
    took_ms = np.array([1e3 * (ended - began) for began, ended in found])
    span_s = found[-1][1] - min(began for began, _ in found)
    return {
        "per_s": len(found) / span_s,
        "p50_ms": float(np.percentile(took_ms, 50)),
        "p99_ms": float(np.percentile(took_ms, 99)),
    }


async def _rates(asked: Asked) -> AsyncIterator[Row]:
    async with spawn_pool(asked.devices[:1], name="one") as one, spawn_pool(asked.devices) as all_of_them:
        calls = await _calls(one, asked)
        ways = {
            "one member, its handle": calls["handle"],
            "one member": calls["pool"],
            f"{len(all_of_them)} members": (await _calls(all_of_them, asked))["pool"],
        }
        for call in ways.values():
            await _load(call, max(asked.callers), asked.seconds / 4)
        for callers in asked.callers:
            rounds = defaultdict[str, list[dict[str, float]]](list)
            for _ in range(asked.rounds):
                for way, call in ways.items():
                    rounds[way].append(_figures(await _load(call, callers, asked.seconds)))
            for way, found in rounds.items():
                medians = {name: statistics.median(each[name] for each in found) for name in found[0]}
                yield {
                    "what": way,
                    "callers": callers,
                    **{name: round(of, 3) for name, of in medians.items()},
                }


async def _killed(asked: Asked) -> Row:
    callers, before, behind = max(asked.callers), list[float](), list[float]()
    async with spawn_pool(asked.devices, max_restarts=2 * asked.kills) as pool:
        call = (await _calls(pool, asked))["pool"]
        await _load(call, callers, asked.seconds / 4)
        for number in range(asked.kills):
            load = asyncio.ensure_future(_load(call, callers, _BEFORE_S + _BEHIND_S))
            await asyncio.sleep(_BEFORE_S)
            killed = time.perf_counter()
            os.kill(pool.statistics().members[number % len(pool)].pid or 0, signal.SIGKILL)
            found = await load
            before.append(_slowest(found, killed, -1))
            behind.append(_slowest(found, killed, 1))
            while not pool.statistics().members[number % len(pool)].pid:  # noqa: ASYNC110 - it is not told
                await asyncio.sleep(0.01)
        moved = pool.statistics().moved
        await pool.aclose()
        down = [1e3 * event.downtime_s async for event in pool.events() if isinstance(event, Restarted)]
    return {
        "what": "killed",
        "callers": callers,
        "kills": asked.kills,
        "moved": moved,
        "slowest_ms": [round(statistics.median(behind), 2), round(max(behind), 2)],
        "before_ms": [round(statistics.median(before), 2), round(max(before), 2)],
        "down_ms": [round(statistics.median(down), 2), round(max(down), 2)] if down else [],
    }


def _slowest(found: list[tuple[float, float]], killed: float, side: int) -> float:
    """The longest of the requests that were answered before (-1) or after (1) a kill, in milliseconds."""
    return 1e3 * max((ended - began for began, ended in found if side * (ended - killed) > 0), default=0.0)


def rows(asked: Asked) -> Iterator[Row]:
    """Yields a row for each way and number of callers, and one of the kills. Blocks for the runs."""
    with asyncio.Runner() as runner:
        rates = _rates(asked)
        try:
            while True:
                yield runner.run(anext(rates))  # type: ignore[arg-type]  # a coroutine in all but its type
        except StopAsyncIteration:
            pass
        if asked.kills:
            yield runner.run(_killed(asked))


def sheet(found: list[Row]) -> Table:
    """The table for a terminal."""
    table = Table(title="Pools")
    names = ("what", "callers", "per_s", "p50_ms", "p99_ms", "slowest_ms", "before_ms", "down_ms", "moved")
    for name in names:
        table.add_column(name, justify="left" if name == "what" else "right")
    for row in found:
        table.add_row(*(str(row.get(name, "")) for name in names))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pool", description=__doc__.splitlines()[0])
    parser.add_argument("--devices", nargs="+", default=["cpu", "cpu"])
    parser.add_argument("--model", type=Path, help="an ONNX file; without one, a product of matrices")
    parser.add_argument(
        "--batch", type=int, default=32, help="the size of named dims, or rows of the product"
    )
    parser.add_argument("--convolution", action="store_true", help="a small one, of buffers on the members")
    parser.add_argument("--callers", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--out", type=Path, help="directory for the JSON")
    given = vars(parser.parse_args())
    out = given.pop("out")
    known = {name: str(value) for name, value in given.items()}
    keep(rows(Asked(**given)), sheet, out, "pool", asked=known)


if __name__ == "__main__":
    main()
