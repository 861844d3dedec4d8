"""`cudnn-actor bench`: latencies and throughput in thread isolation on the CPU engine.

Asserts nothing: it prints tables and, with `--out`, writes every raw number as JSON.
What is compared is measured in the same run, in turns, round after round; a ratio is the
median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import itertools
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from importlib import util
from pathlib import Path
from typing import Any

from rich.console import Console

from cudnn_actor.cli.bench.busy import busy_loops
from cudnn_actor.cli.bench.hops import round_trips
from cudnn_actor.cli.bench.machine import machine, versions
from cudnn_actor.cli.bench.plan import FULL, QUICK, Plan
from cudnn_actor.cli.bench.record import Report, now, target, write
from cudnn_actor.cli.bench.tables import tables
from cudnn_actor.cli.bench.work import convolutions, crash
from cudnn_actor.cli.placement import PLACEMENTS, others_cpu, place

__all__ = ["add_arguments", "run"]

_PACKAGES = ("cudnn-actor", "numpy", "pykka", "msgspec", "uvloop")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the command."""
    parser.add_argument("--out", metavar="DIR", type=Path, help="also write the numbers to DIR, as JSON")
    parser.add_argument("--quick", action="store_true", help="a few seconds, to see that it works")


def run(args: argparse.Namespace) -> int:
    """Measure, print, write."""
    console = Console()
    date = now()
    path = None if args.out is None else target(args.out, date)
    plan = QUICK if args.quick else FULL
    with console.status("measuring") as status:
        report = _measure(plan, date, args.quick, lambda text: status.update(f"measuring {text}"))
    for table in tables(report):
        console.print(table)
    if path is not None:
        write(report, path)
        console.print(f"written to {path}", soft_wrap=True)
    return 0


def _measure(plan: Plan, date: str, quick: bool, say: Callable[[str], None]) -> Report:
    report = Report(
        date=date,
        quick=quick,
        machine=machine(),
        versions=versions(_PACKAGES),
        hops=[],
        convolutions_ms={},
        crash_to_next_reply_ms=[],
        starvation=[],
        others_cpu={},
    )

    @contextmanager
    def section(name: str) -> Iterator[None]:
        say(name)
        with others_cpu() as share:
            yield
        report.others_cpu[name] = share[0]

    for loop, placement in itertools.product(_loops(), PLACEMENTS):
        with section(f"round trips, {loop}, {placement}"):
            report.hops += _on(loop, round_trips(plan, loop, placement))
    with section("convolutions"):
        report.convolutions_ms = _on("asyncio", convolutions(plan.repeats))
    with section("recovery"):
        report.crash_to_next_reply_ms = [_on("asyncio", crash()) for _ in range(plan.repeats)]
    for loop, placement in itertools.product(_loops(), PLACEMENTS[1:]):
        with section(f"busy loop, {loop}, {placement}"):
            report.starvation += _on(loop, busy_loops(plan, loop, placement))
    return report


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
