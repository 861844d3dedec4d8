"""`cudnn-actor bench`: latencies and throughput on the CPU engine, in both isolations.

Asserts nothing: it prints tables and, with `--out`, writes every raw number as JSON.
Things that are compared are measured in the same run, alternately, in several rounds;
a ratio is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import itertools
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from importlib import util
from pathlib import Path
from typing import Any

from rich.console import Console

from cudnn_actor.trials.bench.busy import busy_loops
from cudnn_actor.trials.bench.convolutions import convolutions, crash
from cudnn_actor.trials.bench.cpu_time import others_cpu
from cudnn_actor.trials.bench.crashes import recoveries
from cudnn_actor.trials.bench.hops import round_trips
from cudnn_actor.trials.bench.record import APART, Report, machine, now, target, versions, write
from cudnn_actor.trials.bench.sides import idle, moves, sides
from cudnn_actor.trials.bench.tables import tables
from cudnn_actor.trials.measure import FULL, QUICK, Plan
from cudnn_actor.trials.placement import PLACEMENTS, place

__all__ = ["PARTS", "add_arguments", "run"]

PARTS = ("hops", "isolation", "work", "transfers", "recovery", "idle", "busy")
"""The parts that can be measured alone."""
_WIDTH = 100
_PACKAGES = ("cudnn-actor", "numpy", "pykka", "msgspec", "uvloop")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument("--out", metavar="DIR", type=Path, help="also write the numbers to DIR, as JSON")
    parser.add_argument("--quick", action="store_true", help="run a few seconds, to check that it works")
    parser.add_argument("--only", metavar="PARTS", type=_parts, default=PARTS, help=", ".join(PARTS))


def _parts(text: str) -> tuple[str, ...]:
    names = text.split(",")
    for name in names:
        if name not in PARTS:
            raise argparse.ArgumentTypeError(f"{name!r} is not a part: choose from {', '.join(PARTS)}")
    return tuple(name for name in PARTS if name in names)


def run(args: argparse.Namespace) -> int:
    """Measure, print, write."""
    console = Console() if sys.stdout.isatty() else Console(width=_WIDTH)
    date = now()
    path = None if args.out is None else target(args.out, date)
    report = Report(
        date=date,
        quick=args.quick,
        machine=machine(),
        versions=versions(_PACKAGES),
        hops=[],
        convolutions_ms={},
        crash_to_next_reply_ms=[],
        starvation=[],
        others_cpu={},
    )
    with console.status("measuring") as status:
        run = _Run(report, QUICK if args.quick else FULL, lambda text: status.update(f"measuring {text}"))
        for part in args.only:
            getattr(run, part)()
    for table in tables(report):
        console.print(table)
    if path is not None:
        write(report, path)
        console.print(f"written to {path}", soft_wrap=True)
    return 0


class _Run:
    """A run: one method for each of `PARTS`, which fills in its part of the report."""

    def __init__(self, report: Report, plan: Plan, say: Callable[[str], None]) -> None:
        self._report = report
        self._plan = plan
        self._say = say

    @contextmanager
    def _section(self, name: str) -> Iterator[None]:
        self._say(name)
        with others_cpu() as share:
            yield
        self._report.others_cpu[name] = share[0]

    def hops(self) -> None:
        for loop, placement in itertools.product(_loops(), PLACEMENTS):
            with self._section(f"round trips, {loop}, {placement}"):
                self._report.hops += _on(loop, round_trips(self._plan, loop, placement))

    def isolation(self) -> None:
        for loop in _loops():
            with self._section(f"{APART}{loop}"):
                self._report.sides += _on(loop, sides(self._plan, loop))

    def work(self) -> None:
        repeats = self._plan.repeats
        with self._section("convolutions"):
            self._report.convolutions_ms = _on("asyncio", convolutions(repeats))
        with self._section("a crash"):
            self._report.crash_to_next_reply_ms = [_on("asyncio", crash()) for _ in range(repeats)]

    def transfers(self) -> None:
        with self._section(f"{APART}transfers"):
            self._report.moves = _on("asyncio", moves(self._plan))

    def recovery(self) -> None:
        with self._section(f"{APART}recovery"):
            self._report.recovery_ms = _on("asyncio", recoveries(self._plan))

    def idle(self) -> None:
        with self._section(f"{APART}idling"):
            self._report.idle = _on("asyncio", idle(self._plan))

    def busy(self) -> None:
        for loop, placement in itertools.product(_loops(), PLACEMENTS[1:]):
            with self._section(f"busy loop, {loop}, {placement}"):
                self._report.starvation += _on(loop, busy_loops(self._plan, loop, placement))


def _loops() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    loops: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
    if util.find_spec("uvloop") is not None:
        loops["uvloop"] = importlib.import_module("uvloop").new_event_loop
    return loops


def _on(loop: str, measurement: Coroutine[Any, Any, Any]) -> Any:
    try:
        with asyncio.Runner(loop_factory=_loops()[loop]) as runner:
            return runner.run(measurement)
    finally:
        place("free")
