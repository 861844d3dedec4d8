"""Measures what a turn of a loop costs beside the body's own time on the device.

    python -m benchmarks.loops --out benchmarks/results

A row for each loop and isolation. All carry the state of a recurrent layer, h' = tanh(h @ w + b).

- `turn_us`: the receipt's run time over the number of turns, the median of the rounds.
- `body_us`: a run of the body alone, on the device, as `explain(measure=True)` gives it.
- `beyond_us`: the difference. Where the body takes longer than the host needs to launch it, it is near 0.

"rows" reads a row and writes one in each turn. "condition" also carries a counter, and reads from the device
before each turn whether it goes on.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import statistics
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from rich.table import Table

from cudnn_actor import CudnnRef, GraphBuilder, Loop, RunLoop, spawn

from .gpu.setting import gpu_versions
from .recording import Row, attempted, keep

__all__ = ["main"]

_KINDS = ("carried", "rows", "condition", "rows and condition")
_UNITS = (64, 1024)
_TURNS = 10_000
_ROUNDS = 5
Isolation = Literal["thread", "process"]
Arrays = dict[str, np.ndarray]


class Service(NamedTuple):
    """A service that runs a loop."""

    device: str
    isolation: Isolation


def _loop(kind: str, units: int, turns: int) -> tuple[Loop, Arrays]:
    """A loop, and the values of its inputs."""
    g, rng = GraphBuilder(), np.random.default_rng(0)
    h, w = g.input("h", (1, units)), g.input("w", (units, units))
    given: Arrays = {"h": np.zeros((1, units)), "w": rng.standard_normal((units, units)) / units}
    outputs: dict[str, Any] = {}
    carried, scanned = {"h": "new_h"}, ("x",) if "rows" in kind else ()
    given["x"] = rng.standard_normal((turns, 1, units) if scanned else (1, units))
    outputs["new_h"] = g.tanh(g.matmul(h, w) + g.input("x", (1, units)))
    if scanned:
        outputs["y"] = outputs["new_h"] * 2.0
    given = {name: array.astype(np.float32) for name, array in given.items()}
    if "condition" in kind:
        outputs["counted"] = g.input("count", (1,), "int32") + 1
        g.input("go", (1,), "bool")
        outputs["on"] = outputs["counted"] < turns
        given |= {"count": np.zeros(1, np.int32), "go": np.ones(1, bool)}
        carried |= {"count": "counted", "go": "on"}
    condition = "go" if "condition" in kind else None
    return Loop(body=g.build(**outputs), carried=carried, scanned=scanned, condition=condition), given


async def _message(gpu: CudnnRef, loop: Loop, turns: int, given: Arrays) -> RunLoop:
    buffers = {name: await gpu.upload(array) for name, array in given.items()}
    specs = loop.specs(turns)
    for port in loop.body.outputs:
        buffers[port.name] = await gpu.empty(specs[port.name].dims, dtype=port.spec.dtype)
    scratch = await gpu.empty(loop.scratch.dims, dtype="uint8")
    return RunLoop.bind(loop, buffers, turns=turns, scratch=scratch)


async def _found(service: Service, kind: str, units: int, turns: int, rounds: int) -> Row:
    async with spawn(device=service.device, isolation=service.isolation) as gpu:
        loop, given = _loop(kind, units, turns)
        message = await _message(gpu, loop, turns, given)
        await gpu.ask(message)  # a first time, in which both sets of addresses are captured
        took = [(await gpu.ask(message)).run_us / turns for _ in range(rounds)]
        explained = await gpu.explain(loop.body, measure=True)
    assert explained.run_us is not None
    turn_us = statistics.median(took)
    return {
        "kind": kind,
        "isolation": service.isolation,
        "units": units,
        "turns": turns,
        "turn_us": round(turn_us, 2),
        "body_us": round(explained.run_us, 2),
        "beyond_us": round(turn_us - explained.run_us, 2),
    }


def _one(service: Service, kind: str, units: int, turns: int, rounds: int) -> Iterator[Row]:
    yield asyncio.run(_found(service, kind, units, turns, rounds))


def rows(
    device: str, isolations: Iterable[Isolation], units: Iterable[int], turns: int, rounds: int
) -> Iterator[Row]:
    """Yields a row for each isolation, number of units and kind of loop."""
    for isolation in isolations:
        for count in units:
            for kind in _KINDS:
                part = functools.partial(_one, Service(device, isolation), kind, count, turns, rounds)
                yield from attempted(f"{isolation}, {count} units, {kind}", part)


def sheet(found: list[Row]) -> Table:
    """The table for a terminal."""
    table = Table(title="Turns of loops, microseconds")
    table.add_column("loop")
    table.add_column("isolation")
    numbers = ("units", "turns", "turn_us", "body_us", "beyond_us")
    for name in numbers:
        table.add_column(name, justify="right")
    for row in found:
        table.add_row(row["kind"], row["isolation"], *(f"{row[name]:,}" for name in numbers))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loops", description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument(
        "--isolations", nargs="+", default=["process", "thread"], choices=["process", "thread"]
    )
    parser.add_argument("--units", nargs="+", type=int, default=_UNITS)
    parser.add_argument("--turns", type=int, default=_TURNS)
    parser.add_argument("--rounds", type=int, default=_ROUNDS)
    parser.add_argument("--out", type=Path, help="directory for the JSON")
    given = parser.parse_args()
    versions = {} if given.device == "cpu" else gpu_versions()
    found = rows(given.device, given.isolations, given.units, given.turns, given.rounds)
    keep(found, sheet, given.out, "loops", versions=versions)


if __name__ == "__main__":
    main()
