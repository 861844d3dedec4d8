"""This code against another checkout of it: requests per second, side by side in one run.

    git worktree add ../old COMMIT
    python -m benchmarks.against ../old . --out benchmarks/results

In each round both checkouts run in a fresh process of their own, on the CPU engine, and measure in turns. A
round's figure is the ratio of the two rates; the table has the median of the rounds, the standard error of
their mean, and their range. A ratio above 1 says that the second checkout is faster. Which process is started
first changes from round to round, so give an even number of rounds, or many.

With one request in flight two threads wake each other, and how long that takes depends on which cores they
are on, far more than on the code. `--threads one` keeps them on one core, `two` the loop's thread on one and
all others on another.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

LOOPS = ("asyncio", "uvloop") if importlib.util.find_spec("uvloop") else ("asyncio",)
CASES = tuple(itertools.product(LOOPS, ("thread", "process"), ("ping", "convolution"), (1, 64)))
"""Event loop, isolation, request, requests in flight."""
_SIDE = Path(__file__).with_name("against_side.py")


class Side:
    """One checkout's process. `measure` blocks for the slice."""

    def __init__(self, tree: Path, loop: str, threads: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(_SIDE), loop, threads],
            env={**environment(tree), "PYTHONHASHSEED": "0"},
            cwd=tree,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def measure(self, isolation: str, request: str, in_flight: int, seconds: float) -> float:
        """Requests per second of one slice."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(isolation, request, in_flight, seconds, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise SystemExit(f"a side ended with status {self._process.wait()}")
        return float(answer)

    def close(self) -> None:
        """End the process. Blocks until it has ended."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Found(NamedTuple):
    """The measurements of one case, an item for each round."""

    case: tuple[str, str, str, int]
    old_per_s: list[float]
    new_per_s: list[float]

    @property
    def error(self) -> float:
        """The standard error of the ratios' mean."""
        return statistics.stdev(self.ratios) / len(self.ratios) ** 0.5 if len(self.ratios) > 1 else math.nan

    @property
    def ratios(self) -> list[float]:
        """New over old, round by round."""
        return [new / old for old, new in zip(self.old_per_s, self.new_per_s, strict=True)]


def compare(
    old: Path, new: Path, *, rounds: int, slices: int, seconds: float, threads: str = "free"
) -> list[Found]:
    """Measure every case in every round, and print each round's number."""
    found = {case: Found(case, [], []) for case in CASES}
    for number in range(rounds):
        for loop in LOOPS:
            sides = _started(old, new, loop, threads, new_first=bool(number % 2))
            try:
                for case in CASES:
                    if case[0] == loop:
                        _one_round(found[case], sides, number, slices, seconds)
            finally:
                for side in sides:
                    side.close()
        print(f"round {number + 1} of {rounds}", file=sys.stderr, flush=True)
    return list(found.values())


def _started(old: Path, new: Path, loop: str, threads: str, *, new_first: bool) -> tuple[Side, Side]:
    """Both processes. Which is started first matters: the second has been seen to be 5 to 10 % slower."""
    if new_first:
        second, first = Side(new, loop, threads), Side(old, loop, threads)
        return first, second
    return Side(old, loop, threads), Side(new, loop, threads)


def _one_round(found: Found, sides: tuple[Side, Side], number: int, slices: int, seconds: float) -> None:
    _, isolation, request, in_flight = found.case
    rates: tuple[list[float], list[float]] = ([], [])
    for side in sides:  # warm
        side.measure(isolation, request, in_flight, seconds / 2)
    for turn in range(slices):
        order = (0, 1) if (turn + number) % 2 else (1, 0)
        for which in order:
            rates[which].append(sides[which].measure(isolation, request, in_flight, seconds))
    found.old_per_s.append(statistics.median(rates[0]))
    found.new_per_s.append(statistics.median(rates[1]))


def table(found: list[Found], old: str, new: str) -> Table:
    """The ratios for a terminal."""
    sheet = Table(title=f"{new} against {old}")
    for name in (
        "loop",
        "isolation",
        "request",
        "in flight",
        "old, /s",
        "new, /s",
        "new / old",
        "error",
        "range",
    ):
        sheet.add_column(name, justify="left" if name in ("loop", "isolation", "request") else "right")
    for row in found:
        loop, isolation, request, in_flight = row.case
        sheet.add_row(
            loop,
            isolation,
            request,
            str(in_flight),
            f"{statistics.median(row.old_per_s):,.0f}",
            f"{statistics.median(row.new_per_s):,.0f}",
            f"{statistics.median(row.ratios):.3f}",
            f"{row.error:.3f}",
            f"{min(row.ratios):.2f}-{max(row.ratios):.2f}",
        )
    return sheet


def environment(tree: Path) -> dict[str, str]:
    """This process's, in which a checkout's packages come before those that are found by PYTHONPATH here."""
    places = [str(tree.resolve()), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places)}


def commit(tree: Path) -> str:
    """A checkout's commit, as git describes it; the folder's name where that is no checkout of its own."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return tree.resolve().name
    return done.stdout.strip() if (tree / ".git").exists() else tree.resolve().name


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--slices", type=int, default=3, help="slices of each side in a round")
    parser.add_argument("--seconds", type=float, default=0.3, help="of each slice")
    parser.add_argument("--threads", choices=("free", "one", "two"), default="free", help="cores")
    parser.add_argument("--out", type=Path, help="directory for the JSON")
    given = parser.parse_args()
    old, new = commit(given.old), commit(given.new)
    found = compare(
        given.old,
        given.new,
        rounds=given.rounds,
        slices=given.slices,
        seconds=given.seconds,
        threads=given.threads,
    )
    Console(width=110).print(table(found, old, new))
    if given.out is not None:
        record: dict[str, Any] = {
            "old": old,
            "new": new,
            "date": time.strftime("%Y-%m-%dT%H:%M:%S"),
            "python": platform.python_version(),
            "cores": os.cpu_count(),
            "threads": given.threads,
            "found": [row._asdict() for row in found],
        }
        given.out.mkdir(parents=True, exist_ok=True)
        path = given.out / time.strftime("against-%Y%m%dT%H%M%S.json")
        path.write_text(json.dumps(record, indent=1) + "\n")
        print(path)


if __name__ == "__main__":
    main()
