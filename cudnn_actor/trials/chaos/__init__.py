"""`cudnn-actor chaos`: full load, continuous faults, and every answer checked.

The command's options are here; `harness` and `one_run` do the run, `report` prints it. A correct service
loses no request, gives no wrong answer and lets no caller wait for long, whatever faults come. The exit
status is 1 if the service was not correct.
"""

from __future__ import annotations

import argparse
import enum
import math
from collections.abc import Callable, Container
from pathlib import Path
from typing import TypeVar

from rich.console import Console

from cudnn_actor.cli.user_error import UserError, check_writable, whole_number
from cudnn_actor.trials.bench.record import write
from cudnn_actor.trials.chaos import processes
from cudnn_actor.trials.chaos.faults import NEEDED_LOAD, FaultKind, possible_faults
from cudnn_actor.trials.chaos.harness import Harness
from cudnn_actor.trials.chaos.load_kinds import OF_A_MODEL, LoadKind
from cudnn_actor.trials.chaos.report import Report, print_report
from cudnn_actor.trials.chaos.settings import Settings

__all__ = ["add_arguments", "run"]

K = TypeVar("K", bound=enum.StrEnum)

_DEFAULTS = Settings()
_LEAST_PAUSE_S = 0.01
_KINDS = """
Faults: kill and hang send SIGKILL and SIGSTOP to the worker that serves; kill-standby, hang-forkserver and
their like to the process that they name: kill-client to one that is attached to the service, kill-server to
one with a service of its own. poison ends the device context in the middle of a request. start
fails a start of a worker, fail one run, memory one allocation.
Load: tasks are tasks of one event loop; loops have event loops on threads of their own; threads and pykka are
plain threads; alarms is the main thread, interrupted by a signal handler that raises. attached is an event
loop that is attached to the service by its socket; doomed is attached to a server that is killed and
replaced, and finds each of its requests ended. With the model of
--model, models run it, batched sends it samples that run together, and swaps runs it while all its weights
are overwritten every second. With uploads all others also send large arrays, with cancels also cancellations
and tiny timeouts.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.epilog = _KINDS
    parser.add_argument("--seconds", type=_seconds, default=_DEFAULTS.seconds, help="how long (%(default)s)")
    parser.add_argument("--engine", choices=("cpu", "cuda"), default="cpu", help="what runs (%(default)s)")
    parser.add_argument(
        "--isolation", choices=("process", "thread"), default="process", help="where it runs (%(default)s)"
    )
    parser.add_argument(
        "--standby", type=int, choices=(0, 1), default=0, help="number of standby workers (%(default)s)"
    )
    parser.add_argument(
        "--kill-every",
        type=_pause,
        default=_DEFAULTS.kill_every,
        metavar="SECONDS",
        help="mean time between two signals, or from a worker's start to its signal (%(default)s)",
    )
    parser.add_argument(
        "--faults",
        type=_kinds(*FaultKind),
        metavar="KINDS",
        help=f"faults to inject, from {', '.join(FaultKind)}, or none; default: all that are possible",
    )
    parser.add_argument(
        "--load",
        type=_kinds(*LoadKind),
        metavar="KINDS",
        help=f"kinds of callers, from {', '.join(LoadKind)}; default: all",
    )
    parser.add_argument(
        "--without",
        type=_kinds(*FaultKind, *LoadKind, nothing=("", "none")),
        default=(),
        metavar="KINDS",
        help="kinds of faults and of load to leave out",
    )
    parser.add_argument(
        "--tasks",
        type=whole_number(1, 1000),
        default=_DEFAULTS.tasks,
        help="tasks that send requests (%(default)s)",
    )
    parser.add_argument(
        "--model", type=Path, metavar="FILE", help="an ONNX model that is run, too; needs the package onnx"
    )
    parser.add_argument(
        "--problems",
        type=whole_number(1),
        default=_DEFAULTS.problems,
        metavar="COUNT",
        help="compute only this many of the load's problems, drawn by the seed: for short runs; default: all",
    )
    parser.add_argument(
        "--seed", type=whole_number(), default=0, help="determines programs, faults and pauses (%(default)s)"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write all results as JSON")


def run(args: argparse.Namespace) -> int:
    """Run the harness; the exit status is 1 if the run was not good: see `Report.good`.

    It is 130 after a Ctrl-C: the first ends the load, and the results so far are reported; the second ends
    this process at once.

    Raises
    ------
    UserError
        The arguments cannot be combined, the file cannot be written, or such a service cannot run here.
    CudnnActorError
        The service did not start.
    """
    settings = _settings(args)
    if args.out is not None:
        check_writable(args.out)
    console = Console(highlight=False)
    with processes.mark_processes():
        harness = Harness(settings, console, finish=lambda report: _finish(report, args, console))
        return harness.run()


def _finish(report: Report, args: argparse.Namespace, console: Console) -> None:
    """Print the report, and write the requested file."""
    print_report(report, console)
    if args.out is not None:
        write(report, args.out)
        console.print(f"wrote {args.out}", soft_wrap=True)


def _settings(args: argparse.Namespace) -> Settings:
    why_not = possible_faults(args.engine, args.isolation, args.standby)
    possible = tuple(kind for kind in FaultKind if not why_not[kind])
    for kind in args.faults or ():
        if why_not[kind]:
            raise UserError(f"--faults {kind}: {why_not[kind]}; leave {kind} out, or choose another service")
    faults = possible if args.faults is None else args.faults
    callers = [kind for kind in LoadKind if kind not in OF_A_MODEL or args.model is not None]
    for kind in args.load or ():
        if kind in OF_A_MODEL and args.model is None:
            raise UserError(f"--load {kind}: there is no model; give one with --model FILE")
    load = tuple(callers) if args.load is None else args.load
    load = tuple(kind for kind in load if kind not in args.without)
    for kind, needed in NEEDED_LOAD.items():
        if kind in (args.faults or ()) and needed not in load:
            raise UserError(f"--faults {kind}: nothing feels it; add {needed} to --load, or leave {kind} out")
    selected = [kind for kind in faults if kind not in NEEDED_LOAD or NEEDED_LOAD[kind] in load]
    settings = Settings(
        seconds=args.seconds,
        engine=args.engine,
        isolation=args.isolation,
        standby=args.standby,
        kill_every=args.kill_every,
        faults=tuple(kind for kind in selected if kind not in args.without),
        load=load,
        tasks=args.tasks,
        model="" if args.model is None else str(args.model),
        required=args.load or (),
        problems=args.problems,
        seed=args.seed,
    )
    if not set(settings.load) - {LoadKind.UPLOADS, LoadKind.CANCELS}:
        raise UserError(f"--load: no caller is selected; choose some of {','.join(callers[:-2])}")
    return settings


def _kinds(*kinds: K, nothing: Container[str] = ("none",)) -> Callable[[str], tuple[K, ...]]:
    known = {kind.value: kind for kind in kinds}

    def read(words: str) -> tuple[K, ...]:
        if words in nothing:
            return ()
        try:
            return tuple(dict.fromkeys(known[word.strip()] for word in words.split(",")))
        except KeyError:
            problem = f"{words!r}: give kinds separated by commas, from {', '.join(known)}; or none"
            raise argparse.ArgumentTypeError(problem) from None

    return read


def _pause(word: str) -> float:
    seconds = _seconds(word)
    if seconds < _LEAST_PAUSE_S:
        raise argparse.ArgumentTypeError(f"{word} must be at least {_LEAST_PAUSE_S}: a start takes longer")
    return seconds


def _seconds(word: str) -> float:
    try:
        seconds = float(word)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{word} must be a number of seconds > 0")
    return seconds
