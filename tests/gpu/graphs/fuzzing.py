"""Runs random graphs on an engine, several processes at once, and makes those that fail smaller."""

from __future__ import annotations

import collections
import concurrent.futures
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field

from cudnn_actor.engines.base import Builder, Engine, StickyError

from ...engines.devices import factory
from ..building import builder_of
from .bounds import error_over_bound, truth
from .drawing import draw
from .programs import Program
from .running import run
from .shrinking import shrunk

__all__ = ["GraphReport", "fuzz_graphs", "fuzz_in_process", "fuzz_in_processes"]

_CHUNK = 20
"""Graphs that a process is given at a time."""
_MOST_SHRUNK = 3
"""Failures of a chunk that are made smaller: of a fault that is everywhere, a few are enough."""


@dataclass
class GraphReport:
    """What became of the graphs.

    Parameters
    ----------
    compared
        The sum over the graphs of the share of their elements that were compared tightly.
    largest
        The largest error in terms of its bound.
    operations
        How often each operation occurred.
    failures
        Number of the graph → what is wrong, the smallest program that shows it, and how to repeat it.
    dead
        Whether the engine's context has died, so that the graphs after it have not run.
    """

    seed: int
    engine: str
    ran: int = 0
    exact: int = 0
    compared: float = 0.0
    largest: float = 0.0
    operations: collections.Counter[str] = field(default_factory=collections.Counter)
    failures: dict[int, str] = field(default_factory=dict)
    seconds: float = 0.0
    dead: bool = False

    def add(self, other: GraphReport) -> None:
        """Add what became of other graphs."""
        self.ran += other.ran
        self.exact += other.exact
        self.compared += other.compared
        self.largest = max(self.largest, other.largest)
        self.operations += other.operations
        self.failures |= other.failures

    def __str__(self) -> str:
        kinds = ", ".join(f"{name} {count}" for name, count in self.operations.most_common())
        lines = [
            f"graphs, seed {self.seed} on {self.engine}: {self.ran} ran in {self.seconds:.0f} s, "
            f"{self.exact} of them bit for bit; {len(self.failures)} failed",
            f"  {self.compared / max(self.ran, 1):.1%} of the elements were compared to within 1 %; "
            f"the largest error was {self.largest:.3f} of its bound",
            f"  {self.operations.total()} operations: {kinds}",
        ]
        return "\n".join([*lines, *(text for _, text in sorted(self.failures.items()))])


def fuzz_graphs(engine: Engine, seed: int, numbers: Iterable[int], *, shrinks: bool = True) -> GraphReport:
    """Run graphs on an open engine. A dead context ends it early, as the failure that it is."""
    report, start = GraphReport(seed, engine.name), time.monotonic()
    with builder_of(engine) as builder:
        for number in numbers:
            try:
                program = draw(seed, number)
            except Exception as error:  # noqa: BLE001 - the others are to run
                report.failures[number] = _failure(report, number, f"it cannot be drawn: {error!r}", None)
                continue
            shown: Program | None = program
            try:
                problem = _problem(engine, builder, program, report)
                if problem is None:
                    continue
                shown = None
                if shrinks and len(report.failures) < _MOST_SHRUNK:
                    shown = shrunk(program, lambda one: _problem(engine, builder, one) is not None)
                    problem = _problem(engine, builder, shown) or problem
            except StickyError as error:
                problem, report.dead = repr(error), True
            report.failures[number] = _failure(report, number, problem, shown)
            if report.dead:
                break
    report.seconds = time.monotonic() - start
    return report


def _problem(
    engine: Engine, builder: Builder | None, program: Program, report: GraphReport | None = None
) -> str | None:
    """What is wrong with an engine's results of a program; None if nothing is. Raises `StickyError`."""
    built = program.build()
    try:
        right = truth(built.graph, built.values)
        ran = run(engine, built, builder)
    except StickyError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever it is, it is this graph's failure
        return repr(error)
    share, name = error_over_bound(built.graph, ran.values, right)
    if not share <= 1.0:
        return f"error of {name} is {share:.3g} times its bound, by {ran.plan}"
    if report is not None:
        report.ran += 1
        report.exact += share == 0.0
        report.compared += right.compared
        report.largest = max(report.largest, share)
        report.operations.update(type(operation).__name__ for operation in built.graph.body.operations)
    return None


def _failure(report: GraphReport, number: int, problem: str, shown: Program | None) -> str:
    engine = "" if report.engine == "cuda" else f" --engine {report.engine}"
    lines = [f"graph {number}: {problem}"]
    if shown is not None:
        text = [*str(shown).splitlines(), f"# {shown.build().graph.to_json().decode()}"]
        lines += [f"    {line}" for line in text]
    again = f"python -m tests.gpu.fuzz --graphs --seed {report.seed} --only {number}{engine}"
    return "\n".join([*lines, f"  to repeat it: {again}"])


# Several processes.

_opened: list[Engine] = []
"""The engine of a process that runs graphs."""


def fuzz_in_process(seed: int, numbers: Sequence[int]) -> GraphReport:
    """Run graphs on this process's engine."""
    return fuzz_graphs(_opened[0], seed, numbers)


def fuzz_in_processes(
    name: str,
    seed: int,
    numbers: Sequence[int],
    jobs: int,
    *,
    show: Callable[[GraphReport], None] = lambda _: None,
    run_part: Callable[[int, Sequence[int]], GraphReport] = fuzz_in_process,
) -> GraphReport:
    """Run graphs on the engine of that name, in so many processes. `show` is called after each part.

    A process whose context has died, or which has died itself, is replaced, and what it had left runs in the
    next. Of a process that died itself, the graphs run again, each alone, to find the one.
    """
    report, start, lock = GraphReport(seed, name), time.monotonic(), threading.Lock()
    parts = collections.deque(numbers[first : first + _CHUNK] for first in range(0, len(numbers), _CHUNK))

    def work() -> None:
        pool = _process(name)
        while True:
            try:
                part = parts.popleft()
            except IndexError:
                break
            try:
                found = pool.submit(run_part, seed, part).result()
                left = [part[part.index(max(found.failures)) + 1 :]] if found.dead else []
            except BrokenProcessPool:
                found, left = GraphReport(seed, name, dead=True), [[number] for number in part]
                if len(part) == 1:
                    found.failures[part[0]], left = _failure(found, part[0], "its process died", None), []
            parts.extend(one for one in left if one)
            with lock:
                report.add(found)
                report.seconds = time.monotonic() - start
                show(report)
            if found.dead:
                pool.shutdown()
                pool = _process(name)
        pool.shutdown()

    threads = [threading.Thread(target=work) for _ in range(jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return report


def _process(name: str) -> concurrent.futures.ProcessPoolExecutor:
    # A fork would inherit a CUDA context that it cannot use.
    spawning = multiprocessing.get_context("spawn")
    return concurrent.futures.ProcessPoolExecutor(1, spawning, initializer=_open, initargs=(name,))


def _open(name: str) -> None:
    engine = factory(name)()
    engine.open()
    _opened.append(engine)
