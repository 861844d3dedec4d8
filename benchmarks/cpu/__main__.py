"""`python -m benchmarks.cpu`: case after case; prints a table of times and ratios, and writes all turns."""

from __future__ import annotations

import argparse
import asyncio
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path

import benchmarks.cpu
from benchmarks.recording import Row, attempted, keep
from cudnn_actor.trials.bench.record import machine, versions
from cudnn_actor.trials.placement import cores

from .cases import CASES, Named
from .profile import profiled
from .profile import sheet as profile_sheet
from .sheets import shown
from .sides import SIDES
from .turns import compared


def rows(named: Sequence[Named], args: argparse.Namespace) -> Iterator[Row]:
    """The rows: one for each case that this installation has."""
    for each in named:
        yield from attempted(each.name, functools.partial(_row, each, args))


def _row(named: Named, args: argparse.Namespace) -> Iterator[Row]:
    case = named.make(args.wheels)
    if case is not None:
        about: Row = {
            "part": named.name,
            "most": named.most,
            "most_extra": named.most_extra,
            "rival": named.rival,
        }
        if args.profile:
            yield about | asyncio.run(profiled(case, args.threads))
        else:
            yield about | compared(case, args.sides, args.threads, args.seconds)


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
    keep(rows(named, args), profile_sheet if args.profile else shown, args.out, name, **about)


if __name__ == "__main__":
    main()
