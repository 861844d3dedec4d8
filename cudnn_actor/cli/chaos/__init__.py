"""`cudnn-actor chaos`: full load, faults all the time, and every answer checked.

The words are here; `trial` runs, `report` tells. A service that keeps its promises loses no request and gives
no wrong answer, whatever strikes; the command's exit status is 1 where it did not.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn

from cudnn_actor.cli.chaos.faults import injected_errors
from cudnn_actor.cli.chaos.report import Report, print_report, report_of, write
from cudnn_actor.cli.chaos.settings import EVERYWHERE, FaultKind, Settings
from cudnn_actor.cli.chaos.tally import Tally
from cudnn_actor.cli.chaos.trial import trial
from cudnn_actor.cli.problems import UserError
from cudnn_actor.extras import install_command
from cudnn_actor.protocol import InvalidRequest

__all__ = ["add_arguments", "run"]

_DEFAULTS = Settings()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's words."""
    parser.add_argument("--seconds", type=_seconds, default=_DEFAULTS.seconds, help="how long (%(default)s)")
    parser.add_argument("--engine", choices=("cpu", "cuda"), default="cpu", help="what runs (%(default)s)")
    parser.add_argument(
        "--isolation", choices=("process", "thread"), default="process", help="where it runs (%(default)s)"
    )
    parser.add_argument(
        "--standby", type=int, choices=(0, 1), default=0, help="workers that stand by (%(default)s)"
    )
    parser.add_argument(
        "--kill-every",
        type=_seconds,
        default=_DEFAULTS.kill_every,
        metavar="SECONDS",
        help="between two signals to the worker, on average (%(default)s)",
    )
    parser.add_argument(
        "--faults",
        type=_faults,
        metavar="KINDS",
        help=f"some of {','.join(FaultKind)}, or none; all that the isolation can have (the default)",
    )
    parser.add_argument(
        "--tasks", type=_count, default=_DEFAULTS.tasks, help="tasks that send requests (%(default)s)"
    )
    parser.add_argument(
        "--seed", type=_whole, default=0, help="decides programs, faults and pauses (%(default)s)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write everything as JSON")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="also draw it; needs matplotlib")


def run(args: argparse.Namespace) -> int:
    """Run the harness; the exit status is 1 where a request was lost, or an answer wrong.

    Raises
    ------
    UserError
        The words do not go together, a file can't be written, matplotlib is not installed, or there is no
        such service.
    CudnnActorError
        The service did not start.
    """
    settings = _settings(args)
    _check_files(args)
    console = Console(highlight=False)
    report = asyncio.run(_watched(settings, console))
    print_report(report, console)
    if args.out is not None:
        write(report, args.out)
        console.print(f"wrote {args.out}", soft_wrap=True)
    if args.plot is not None:
        from cudnn_actor.cli.chaos.plot import draw  # noqa: PLC0415 - only this needs matplotlib

        draw(report, args.plot)
        console.print(f"wrote {args.plot}", soft_wrap=True)
    return 0 if report.good else 1


def _settings(args: argparse.Namespace) -> Settings:
    possible = EVERYWHERE if args.isolation == "thread" else tuple(FaultKind)
    if args.isolation == "thread" and args.engine == "cuda":
        possible = tuple(kind for kind in possible if kind is not FaultKind.POISON)
    faults = possible if args.faults is None else args.faults
    for kind in faults:
        if kind not in possible:
            raise UserError(_impossible(kind))
    return Settings(
        seconds=args.seconds,
        engine=args.engine,
        isolation=args.isolation,
        standby=args.standby,
        kill_every=args.kill_every,
        faults=faults,
        tasks=args.tasks,
        seed=args.seed,
    )


def _impossible(kind: FaultKind) -> str:
    why = (
        "in thread isolation on CUDA nothing survives a sticky error"
        if kind is FaultKind.POISON
        else "in thread isolation there is no worker process to send a signal to"
    )
    return f"--faults {kind}: {why}; use --isolation process, or leave {kind} out"


async def _watched(settings: Settings, console: Console) -> Report:
    """Run, with a line that says how it goes."""
    ending, tally = asyncio.Event(), Tally(injected_errors(settings))
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.completed:>4.0f} of {task.total:g} s"),
        BarColumn(bar_width=20),
        TextColumn("[cyan]{task.fields[rate]:>8,.0f}/s[/]  faults {task.fields[faults]:<4}"),
        TextColumn("lost {task.fields[lost]}  wrong {task.fields[wrong]}"),
        console=console,
        transient=True,
    )
    task = progress.add_task("chaos", total=settings.seconds, rate=0.0, faults=0, lost=0, wrong=0)

    def show() -> None:
        now = tally.now_s
        progress.update(
            task,
            completed=min(now, settings.seconds),
            rate=tally.finished / now,
            faults=len(tally.strikes),
            lost=tally.overdue(settings.deadline_s),
            wrong=tally.wrong,
        )

    kinds = ", ".join(settings.faults) or "none"
    with progress, _ended_by_an_interrupt(ending):
        console.print(f"[bold]cudnn-actor chaos[/] seed {settings.seed}, faults: {kinds}", soft_wrap=True)
        try:
            outcome = await trial(settings, tally, ending, show=show)
        except InvalidRequest as error:
            raise UserError(str(error)) from error
    return report_of(settings, tally, outcome)


@contextlib.contextmanager
def _ended_by_an_interrupt(ending: asyncio.Event) -> Iterator[None]:
    """The first Ctrl-C ends the load early, and what was found is reported; the second interrupts."""
    loop = asyncio.get_running_loop()
    before = signal.getsignal(signal.SIGINT)

    def interrupted() -> None:
        ending.set()
        restore()

    def restore() -> None:
        loop.remove_signal_handler(signal.SIGINT)
        signal.signal(signal.SIGINT, before)

    if before in (signal.SIG_IGN, None):  # of a job in the background; it stays so
        yield
        return
    loop.add_signal_handler(signal.SIGINT, interrupted)
    try:
        yield
    finally:
        restore()


def _check_files(args: argparse.Namespace) -> None:
    """Fail before the work, not after it."""
    if args.plot is not None:
        if args.plot.suffix.lower() != ".png":
            raise UserError(f"--plot {args.plot} is no PNG; give a name that ends in .png")
        _check_matplotlib()
    for option, path in (("--out", args.out), ("--plot", args.plot)):
        if path is None:
            continue
        if path.is_dir():
            raise UserError(f"{option} {path} is a directory; give a file name in it")
        if not path.parent.is_dir():
            raise UserError(f"{option} {path}: there is no directory {path.parent}; make it first")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise UserError(f"{option} {path} cannot be written; give a place where you may write")


def _check_matplotlib() -> None:
    try:
        importlib.import_module("cudnn_actor.cli.chaos.plot")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "matplotlib":
            raise
        raise UserError(
            f"--plot draws with matplotlib, which is not installed: {install_command('demo')}"
        ) from None


def _faults(words: str) -> tuple[FaultKind, ...]:
    if words == "none":
        return ()
    try:
        return tuple(dict.fromkeys(FaultKind(word.strip()) for word in words.split(",")))
    except ValueError:
        known = ", ".join(FaultKind)
        raise argparse.ArgumentTypeError(f"{words!r}: the kinds are {known}, with commas; or none") from None


def _seconds(word: str) -> float:
    try:
        seconds = float(word)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{word} is no number of seconds over 0")
    return seconds


def _count(word: str) -> int:
    if not word.isdecimal() or not 1 <= int(word) <= 1000:
        raise argparse.ArgumentTypeError(f"{word} is no whole number from 1 to 1000")
    return int(word)


def _whole(word: str) -> int:
    if not word.isdecimal() or int(word) >= 1 << 63:
        raise argparse.ArgumentTypeError(f"{word} is no whole number from 0 to 2**63 - 1")
    return int(word)
