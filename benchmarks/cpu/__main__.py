"""`python -m benchmarks.cpu`: case after case; prints a table of times and ratios, and writes all turns."""

from __future__ import annotations

import argparse
import asyncio
import functools
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.table import Table

import benchmarks.cpu
from benchmarks.recording import Row, attempted, keep
from cudnn_actor.trials.bench.record import machine, versions
from cudnn_actor.trials.measure import median_ratio
from cudnn_actor.trials.placement import cores

from .cases import CASES, Named
from .profile import profiled
from .profile import sheet as profile_sheet
from .sides import SERVICES, SIDES
from .turns import compared


def rows(named: Sequence[Named], args: argparse.Namespace) -> Iterator[Row]:
    """One for each case that this installation has."""
    for each in named:
        yield from attempted(each.name, functools.partial(_row, each, args))


def _row(named: Named, args: argparse.Namespace) -> Iterator[Row]:
    case = named.make(args.wheels)
    if case is not None:
        about: Row = {"part": named.name, "most": named.most, "rival": named.rival}
        if args.profile:
            yield about | asyncio.run(profiled(case, args.threads))
        else:
            yield about | compared(case, args.sides, args.threads, args.seconds)


def sheet(found: list[Row]) -> Table:
    """The results as a table: milliseconds of a run; how many times the rival's; and what is aimed at."""
    table = Table("ms: median", *SIDES, *(f"{side} ×" for side in SERVICES), "aim", "of")
    for row in found:
        wall, rival = row["wall_ms"], row["rival"] or "onnxruntime"
        times = (f"{statistics.median(wall[side]):.2f}" if side in wall else "" for side in SIDES)
        ratios = (_ratios(row, side, rival) for side in SERVICES)
        table.add_row(row["part"], *times, *ratios, f"{row['most']:g}", rival if row["rival"] else "ms")
    table.caption = "×: of the rival's time: median of turns, least, CPU seconds"
    return table


def _ratios(row: Row, side: str, rival: str) -> str:
    wall, cpu = row["wall_ms"], row["cpu_ms"]
    if side not in wall or rival not in wall:
        return ""
    least = min(wall[side]) / min(wall[rival])
    of_wall, of_cpu = (median_ratio(of[side], of[rival]) for of in (wall, cpu))
    return f"{of_wall:.1f} {least:.1f} {of_cpu:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cpu",
        description=benchmarks.cpu.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", nargs="+", default=[""], help="parts of the names of cases")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--threads", type=int, default=len(cores()), help="of every side")
    parser.add_argument("--seconds", type=float, default=4.0, help="for the turns of a case, about")
    parser.add_argument("--wheels", type=Path, help="where packages are, or are downloaded to")
    parser.add_argument("--profile", action="store_true", help="where this package's time goes, instead")
    parser.add_argument("--out", type=Path, help="directory for the JSON")
    args = parser.parse_args()
    named = [each for each in CASES if any(part in each.name for part in args.only)]
    known = versions(("numpy", "onnx", "onnxruntime", "torch"))
    about = {"machine": machine(), "threads": args.threads, "versions": known}
    name = "cpu-profile" if args.profile else "cpu-engine"
    keep(rows(named, args), profile_sheet if args.profile else sheet, args.out, name, **about)


if __name__ == "__main__":
    main()
