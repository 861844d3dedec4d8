"""`cudnn-actor autotune`: measures all candidate plans of given problems, and stores the fastest."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from cudnn_actor.cli.graph_bench import GraphBench, graph_bench, made_up_values, open_engine
from cudnn_actor.cli.problem_form import FORM, Problem, read_problem, read_problems
from cudnn_actor.cli.user_error import UserError, whole_number
from cudnn_actor.engines import Builder, Engine, EngineFailure, Plan
from cudnn_actor.engines.cuda.running.recipe import Tuning
from cudnn_actor.engines.remote import BuilderHost
from cudnn_actor.plan_store.builders import StoringBuilder
from cudnn_actor.plan_store.plan_file import PlanKey
from cudnn_actor.plan_store.store import PlanStore
from cudnn_actor.protocol import CudnnActorError

__all__ = ["Tuned", "Tuner", "add_arguments", "run", "tune_all"]

_FAILURES = (CudnnActorError, EngineFailure, MemoryError, UserError)
_NOTHING_TO_TUNE = (
    "the CPU engine has only one plan for each graph, so there is nothing to tune; "
    "on a machine with a GPU, give --device cuda:0 (cudnn-actor doctor says what is missing)"
)


class Tuned(NamedTuple):
    """One problem's figures, in microseconds per run (average over many); `error` says why there are none.

    `measured` is the number of plans that ran: 0 if the store had the winner already. `discarded` has the
    reasons for discarding plans that could not be trusted.
    """

    problem: str
    heuristic_us: float = 0.0
    tuned_us: float = 0.0
    measured: int = 0
    discarded: tuple[str, ...] = ()
    plan: str = ""
    error: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "problems",
        nargs="+",
        metavar="PROBLEMS",
        help=f"a file with one problem per line, - for standard input, or one problem: {FORM}",
    )
    parser.add_argument(
        "--store", required=True, type=Path, metavar="DIR", help="where to store plans: spawn(plan_store=DIR)"
    )
    parser.add_argument("--device", default="auto", help='"cuda:0" or "auto" (the default)')
    parser.add_argument(
        "--workspace-limit",
        type=whole_number(least=1),
        metavar="BYTES",
        help="the value that you give spawn(workspace_limit=): a plan is stored for one limit",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command; the exit status is 1 if a problem could not be tuned."""
    problems = _problems(args.problems)
    _check(args)
    console = Console(highlight=False)
    with open_engine(args.device) as engine, BuilderHost() as builders:
        builder = engine.builder(builders)
        if builder is None:
            raise UserError(_NOTHING_TO_TUNE)
        store = PlanStore(args.store)
        with Tuner(engine, builder, store, workspace_limit=args.workspace_limit) as tuner:
            results = tune_all(tuner, problems)
    console.print(_table(results))
    for result in results:
        for reason in result.discarded:
            console.print(Text(f"discarded for {_short(result.problem)}: {reason}"), soft_wrap=True)
    console.print(Text(f"stored in {os.path.abspath(args.store)}"), soft_wrap=True)
    return 1 if any(result.error for result in results) else 0


def _problems(words: Sequence[str]) -> list[Problem]:
    """The problems from a file, from standard input, or from the arguments themselves."""
    if list(words) == ["-"]:
        return _some(read_problems(sys.stdin), "standard input")
    if len(words) == 1 and (os.sep in words[0] or os.path.exists(words[0])):
        try:
            lines = Path(words[0]).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{words[0]} cannot be read: {error}") from error
        return _some(read_problems(lines), words[0])
    try:
        return [read_problem(" ".join(words))]
    except UserError as error:
        if len(words) > 1:
            raise
        raise UserError(f"{error}; there is no file of that name either") from error


def _some(problems: Iterator[Problem], where: str) -> list[Problem]:
    found = list(problems)
    if not found:
        raise UserError(f"{where} contains no problem; write one per line, like `{FORM}`")
    return found


def _check(args: argparse.Namespace) -> None:
    """Check arguments that would otherwise cause an error after minutes of measuring."""
    if args.workspace_limit is not None and args.workspace_limit < 1:
        raise UserError(f"--workspace-limit {args.workspace_limit}: must be a number of bytes >= 1")
    try:
        args.store.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--store {args.store} cannot be created: {error}") from error
    found = args.store.stat()
    if not os.access(args.store, os.W_OK) or found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o022:
        raise UserError(f"--store {args.store}: choose a directory that you can write and no one else can")


class Tuner:
    """Tunes problems one after the other, on an open engine.

    Parameters
    ----------
    engine
        The engine that runs the plans.
    builder
        The engine's builder, not open yet.
    store
        Where the fastest plans are stored.
    workspace_limit
        Bytes that plans may use; None for the engine's own bound.
    """

    def __init__(
        self, engine: Engine, builder: Builder, store: PlanStore, *, workspace_limit: int | None
    ) -> None:
        self._engine = engine
        self._builder = builder
        self._store = store
        self._stored = StoringBuilder(store, builder)
        self._limit = workspace_limit

    def __enter__(self) -> Self:
        self._stored.open()
        return self

    def __exit__(self, *_: object) -> None:
        self._stored.close()

    def tune(self, problem: Problem, progress: Callable[[int, int, str], None]) -> Tuned:
        """Measure one problem's plans, and store the fastest. Blocks. A failure is reported in the result."""
        graph, limit = problem.graph, self._limit
        try:
            winner = self._stored.tune(graph, workspace_limit=limit, progress=progress)
            error = "" if self._has_plan(problem) else "tuned, but the plan could not be stored: -v shows why"
            return self._figures(problem, winner)._replace(plan=winner.tag, error=error)
        except _FAILURES as error:
            return Tuned(problem.text, error=f"{type(error).__name__}: {error}")

    def _figures(self, problem: Problem, winner: Plan) -> Tuned:
        """The figures of the tuning itself; for a plan from the store, new measurements of it and its
        rival."""
        tuning: Tuning | None = getattr(winner, "tuning", None)  # only a new plan has it, not a stored one
        if tuning is not None:
            heuristic_us, tuned_us = tuning.heuristic_us, tuning.tuned_us
            measured, discarded = tuning.timed, tuning.discarded
            return Tuned(problem.text, heuristic_us, tuned_us, measured, discarded)
        # not from the store, whose plan is the winner
        heuristic = self._builder.build(problem.graph, workspace_limit=self._limit)
        with graph_bench(self._engine, problem.graph) as bench:
            bench.fill(made_up_values(problem.graph, seed=0))
            return Tuned(
                problem.text, self._microseconds(bench, heuristic), self._microseconds(bench, winner)
            )

    def _microseconds(self, bench: GraphBench, plan: Plan) -> float:
        self._engine.prepare(plan)
        return bench.measure(plan)

    def _has_plan(self, problem: Problem) -> bool:
        key = PlanKey(
            graph=problem.graph.digest(),
            fingerprint=self._builder.fingerprint,
            workspace_limit=self._limit,
        )
        return self._store.load(key) is not None


def tune_all(tuner: Tuner, problems: Sequence[Problem]) -> list[Tuned]:
    """Tune every problem, under a progress bar on stderr."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        all_of_them = progress.add_task("problems", total=len(problems))
        plans = progress.add_task("plans", total=None)
        results = []
        for problem in problems:
            progress.update(plans, description=_short(problem.text), completed=0, total=None)
            results.append(tuner.tune(problem, _show_progress(progress, plans, _short(problem.text))))
            progress.advance(all_of_them)
    return results


def _show_progress(progress: Progress, task: TaskID, name: str) -> Callable[[int, int, str], None]:
    """A callback through which a tuning reports its progress."""

    def show(done: int, of: int, what: str) -> None:
        progress.update(task, description=f"{name}  {what}", completed=done, total=of or None)

    return show


def _table(results: Sequence[Tuned]) -> Table:
    table = Table(title="Microseconds per run, averaged over many", title_justify="left", pad_edge=False)
    table.add_column("problem", overflow="fold")
    for name in ("heuristic", "tuned", "speedup", "measured", "discarded"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("plan", overflow="fold")
    for result in results:
        table.add_row(Text(_short(result.problem)), *_times(result), Text(result.error or result.plan))
    return table


def _times(result: Tuned) -> Iterator[str]:
    if not result.tuned_us:
        yield from "-----"
        return
    yield f"{result.heuristic_us:.1f}"
    yield f"{result.tuned_us:.1f}"
    yield f"{result.heuristic_us / result.tuned_us:.2f}x"
    yield str(result.measured) if result.measured else "kept"
    yield str(len(result.discarded)) if result.measured else "-"


def _short(text: str, most: int = 60) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."
