"""Sides that take turns, and what their runs took."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.recording import Row
from benchmarks.trained_files import error_of
from cudnn_actor.trials.bench.cpu_time import others_cpu

from .cases import Case
from .sides import Side, Unavailable, opened

__all__ = ["apart", "compared", "timed"]

_PAUSE_S = 0.03
"""In which pools of threads stop spinning, which some do for 20 ms behind a run."""
_TURN_S, _MOST_RUNS = 0.05, 10
"""A turn's timed runs."""
_IN_FLIGHT = 8
"""Requests of a service at a time, in the second part of a turn."""
_SHORT_MS = 8.0
"""Longer runs have no second part: what a request costs beside them does not show."""
_FEWEST, _MOST = 5, 15
"""Turns of each side."""
_APART = 1e-3
"""How far results may be apart, relative to the largest number of an output."""


class Turn(NamedTuple):
    """Milliseconds of a run in one turn.

    Parameters
    ----------
    wall_ms, least_ms, cpu_ms
        The median, the least, and CPU time on average, of runs one after the other.
    flight
        Wall and CPU time on average with several requests in flight; of a side that has none, of its runs
        one after the other. None if a run takes too long.
    """

    wall_ms: float
    least_ms: float
    cpu_ms: float
    flight: tuple[float, float] | None


async def _turn(side: Side, *, warm: bool) -> Turn:
    await asyncio.sleep(_PAUSE_S)
    if warm:
        await side.run()
    times, cpu, start = list[float](), side.cpu_s(), time.perf_counter()
    while not times or (len(times) < _MOST_RUNS and time.perf_counter() - start < _TURN_S):
        begin = time.perf_counter()
        await side.run()
        times.append(time.perf_counter() - begin)
    cpu_ms = 1e3 * (side.cpu_s() - cpu) / len(times)
    wall_ms = 1e3 * statistics.median(times)
    flight: tuple[float, float] | None = 1e3 * statistics.fmean(times), cpu_ms
    if side.takes_several:
        flight = await _in_flight(side) if wall_ms < _SHORT_MS else None
    return Turn(wall_ms, 1e3 * min(times), cpu_ms, flight)


async def _in_flight(side: Side) -> tuple[float, float]:
    """Milliseconds of wall and CPU time of a run where callers send the next once theirs is answered."""
    count, cpu, start = 0, side.cpu_s(), time.perf_counter()

    async def call_again_and_again() -> None:
        nonlocal count
        while True:
            await side.run()
            count += 1
            if time.perf_counter() - start > _TURN_S:
                return

    await asyncio.gather(*(call_again_and_again() for _ in range(_IN_FLIGHT)))
    wall = time.perf_counter() - start
    return 1e3 * wall / count, 1e3 * (side.cpu_s() - cpu) / count


async def timed(sides: Mapping[str, Side], budget_s: float) -> dict[str, list[Turn]]:
    """The turns of each side: as many as fit into the budget, at least five."""
    found: dict[str, list[Turn]] = {name: [] for name in sides}
    end = time.perf_counter() + budget_s
    for number in range(_MOST):
        if number >= _FEWEST and time.perf_counter() > end:
            break
        for name, side in sides.items():
            quick = not found[name] or found[name][-1].wall_ms < 1e3 * _TURN_S
            found[name].append(await _turn(side, warm=quick))
    return found


def apart(results: Mapping[str, Sequence[np.ndarray]]) -> dict[str, float]:
    """How far the results of each side are from the last one's. Raises `ArithmeticError` if it is too far."""
    *_, last = results.values()
    found = {name: error_of(mine, last) for name, mine in results.items()}
    if max(found.values()) > _APART:
        raise ArithmeticError(f"results are apart: {found}")
    return found


def compared(case: Case, names: Sequence[str], threads: int, budget_s: float) -> Row:
    """The time of each side for a case, in columns by side, and how far its results are from the last one's.

    Blocks. Raises `ArithmeticError` if they are apart.
    """
    row: Row = {}
    with others_cpu() as share:
        asyncio.run(_compare(case, names, threads, budget_s, row))
    return row | {"others_cpu": round(share[0], 3)}


async def _compare(case: Case, names: Sequence[str], threads: int, budget_s: float, row: Row) -> None:
    async with contextlib.AsyncExitStack() as stack:
        sides = dict[str, Side]()
        for name in names:
            try:
                sides[name] = await stack.enter_async_context(opened(name, case, threads))
            except Unavailable as why:
                row.setdefault("without", {})[name] = str(why)
        results = {name: await side.result() for name, side in sides.items()}
        row["apart"] = apart(results)
        row["plans"] = {name: side.plan for name, side in sides.items() if side.plan is not None}
        turns = await timed(sides, budget_s)
    row["wall_ms"] = {name: [round(turn.wall_ms, 4) for turn in of] for name, of in turns.items()}
    row["least_ms"] = {name: [round(min(turn.least_ms for turn in of), 4)] for name, of in turns.items()}
    row["cpu_ms"] = {name: [round(turn.cpu_ms, 4) for turn in of] for name, of in turns.items()}
    flights = {name: [turn.flight for turn in of if turn.flight] for name, of in turns.items()}
    for place, what in enumerate(("flight_ms", "flight_cpu_ms")):
        # None at all if some turns have none, so that the turns' ratios are of the same turns.
        row[what] = {
            name: [round(flight[place], 4) for flight in of]
            for name, of in flights.items()
            if len(of) == len(turns[name])
        }
