"""`python -m benchmarks.gpu`: runs part after part, prints their tables, writes the numbers."""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

import benchmarks.gpu
from benchmarks.gpu.part import PLATFORM
from benchmarks.gpu.report import PARTS, Platform, Report, new_report, sheets, write
from benchmarks.gpu.sheet import as_text

_WIDTH = 100
_SLACK_S = 90.0
"""What a part may take beyond its budget before it counts as hung: imports, what is under way."""
_ROOT = Path(__file__).parents[2]


def main() -> int:
    args = _arguments()
    console = Console() if sys.stdout.isatty() else Console(width=_WIDTH)
    report = new_report(quick=args.quick)
    path = _target(args.out, report) if args.out is not None else None
    columns = (BarColumn(20), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=1 + len(args.only))
        for name in (PLATFORM, *args.only):
            _measure(name, args, report, lambda text: progress.update(task, description=text))
            progress.advance(task)
            if not console.is_terminal:
                outcome = report.errors.get(name, "done")[-500:]
                console.print(f"{name}, {report.took_s[name]:.0f} s: {outcome}", markup=False)
            if path is not None:  # at once: what comes may not end
                write(report, path)
    for sheet in sheets(report):
        console.print(as_text(sheet))
    if path is not None:
        console.print(f"written to {path}", soft_wrap=True)
    return 1 if report.errors else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu",
        description=benchmarks.gpu.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", metavar="DIR", type=Path, help="also write the numbers to DIR, as JSON")
    parser.add_argument("--device", default="cuda:0", help='"cuda:N"; "cpu" for a dry run')
    parser.add_argument("--only", metavar="PARTS", type=_parts, default=list(PARTS), help=", ".join(PARTS))
    parser.add_argument("--quick", action="store_true", help="a few seconds a part, to see that it works")
    parser.add_argument("--profile", action="store_true", help="sample both threads under small requests too")
    return parser.parse_args()


def _parts(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        if name not in PARTS:
            raise argparse.ArgumentTypeError(f"{name!r} is not a part: choose from {', '.join(PARTS)}")
    return [name for name in PARTS if name in names]


def _target(folder: Path, report: Report) -> Path:
    """The file to write, tried at once: an hour later would be too late to find that it cannot be."""
    stamp = report.date.replace(":", "").replace("-", "")[:15]
    path = folder / f"gpu-{stamp}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write(report, path)
    except OSError as error:
        raise SystemExit(f"cannot write to {path}: {error.strerror}") from None
    return path


def _measure(name: str, args: argparse.Namespace, report: Report, say: Callable[[str], None]) -> None:
    """Run one part and put what it found, or its error, into the report."""
    say(name)
    began = time.monotonic()
    with tempfile.NamedTemporaryFile() as file:
        error = _run(_command(name, Path(file.name), args), say, _budget(name) + _SLACK_S)
        found = Path(file.name).read_bytes()
    report.took_s[name] = round(time.monotonic() - began, 1)
    if error:
        report.errors[name] = error
    else:
        record: Any = Platform if name == PLATFORM else PARTS[name].record
        setattr(report, name, msgspec.json.decode(found, type=record))


def _budget(name: str) -> float:
    return PARTS[name].budget_s if name in PARTS else 1.0


def _command(name: str, file: Path, args: argparse.Namespace) -> list[str]:
    flags = [f"--{flag}" for flag in ("quick", "profile") if getattr(args, flag)]
    words = [name, str(file), "--device", args.device, "--budget", str(_budget(name)), *flags]
    return [sys.executable, "-m", "benchmarks.gpu.part", *words]


def _run(command: list[str], say: Callable[[str], None], limit_s: float) -> str:
    """Run a part's process, showing its lines; "", or the end of what it said when it failed."""
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=_ROOT) as process,
    ):
        deadline = threading.Timer(limit_s, process.kill)
        deadline.start()
        try:
            for line in process.stdout or ():
                say(line.strip())
            status = process.wait()
        finally:
            deadline.cancel()
            process.kill()
        if status == 0:
            return ""
        errors.seek(0)
        return f"{errors.read()[-4000:]}\nexit status {status}, limit {limit_s:.0f} s".strip()


if __name__ == "__main__":
    sys.exit(main())
