"""Random cases on an engine against the definitions in float64, which run ahead in processes of their own.

python -m tests.gpu.fuzz --count 2000                  of each family; a new seed, printed
python -m tests.gpu.fuzz --operations pooling          of one family
python -m tests.gpu.fuzz --seed 123 --only 45          one case of each again, in every detail
python -m tests.gpu.fuzz --engine cpu --count 200      the CPU engine in its own dtypes
python -m tests.gpu.fuzz --engine float32 --count 200  the definitions in float32: the bounds, without a GPU
python -m tests.gpu.fuzz --graphs --count 3000         1 to 12 operations, gradients; failures are made small
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import functools
import math
import multiprocessing
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from cudnn_actor.engines.base import Engine, StickyError
from cudnn_actor.protocol import OperationGraph, UnsupportedGraph

from ..engines.devices import FUZZED, factory, why_not
from ..engines.refusals import may_refuse
from .building import builder_of
from .families import CONVOLUTION, FAMILIES
from .graphs.drawing import draw as draw_graph
from .graphs.fuzzing import GraphReport, fuzz_in_processes

__all__ = ["Report", "drawn_case", "fuzz"]

_TOLD_EVERY_S = 30.0
_AHEAD = 4
"""Answers per process that wait to be compared; each takes up to 2 MB."""
_KEPT = 256
"""Cases, and their answers, that are kept for another engine."""
Table = Callable[[str, OperationGraph], str | None]
"""What the engine of that name may refuse in a graph; None for a graph that it must run."""


@dataclass
class Report:
    """What became of the cases.

    Parameters
    ----------
    refused
        How often each reason of the table of refusals was given.
    unrefused
        Cases that the table lets the engine refuse, and that it ran all the same, and right.
    failures
        Number of the case → what is wrong, and how to repeat it.
    largest
        Largest error in terms of its bound, by operation and dtype.
    """

    seed: int
    engine: str
    family: str = CONVOLUTION
    ran: int = 0
    exact: int = 0
    refused: collections.Counter[str] = field(default_factory=collections.Counter)
    unrefused: int = 0
    failures: dict[int, str] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0

    def __str__(self) -> str:
        lines = [
            f"{self.family}, seed {self.seed} on {self.engine}: {self.ran} ran in {self.seconds:.0f} s, "
            f"{self.exact} of them bit for bit; {self.refused.total()} refused, {len(self.failures)} failed"
        ]
        lines += [f"  refused {count:5}  {what}" for what, count in self.refused.most_common()]
        lines += (
            [f"  not refused {self.unrefused}, though the table would allow it"] if self.unrefused else []
        )
        lines += [f"  largest error / bound  {name:24} {v:.3f}" for name, v in sorted(self.largest.items())]
        return "\n".join([*lines, *self.failures.values()])


def fuzz(
    engine: Engine,
    seed: int,
    numbers: Iterable[int],
    *,
    family: str = CONVOLUTION,
    processes: int = 0,
    seconds: float = math.inf,
    table: Table = may_refuse,
    show: Callable[[Report], object] = lambda _report: None,
) -> Report:
    """Run cases of a family on an open engine, which may refuse what `table` says. `show` follows each.

    None begins after so many seconds.

    Plans are built as a service has them built: apart, where the engine has a builder for that. A dead
    context ends it early, as the failure that it is.
    """
    report, start, tested = Report(seed, engine.name, family), time.monotonic(), FAMILIES[family]
    with builder_of(engine) as builder, _truths(family, seed, numbers, processes) as answers:
        for number, answer in answers:
            case = drawn_case(family, seed, number)
            try:
                problem = _try(partial(tested.run, engine, builder=builder), case, answer, report, table)
            except StickyError as error:
                report.failures[number] = _failure(case, report, number, repr(error))
                break
            except Exception as error:  # noqa: BLE001 - whatever it is, it is this case's failure
                problem = repr(error)
            if problem is not None:
                report.failures[number] = _failure(case, report, number, problem)
            report.seconds = time.monotonic() - start
            show(report)
            if report.seconds > seconds:
                break
    report.seconds = time.monotonic() - start
    return report


def _try(run: Callable[[Any], Any], case: Any, answer: Any, report: Report, table: Table) -> str | None:
    """Run one case and count it; what is wrong with it, if anything is."""
    allowed = table(report.engine, case.graph())
    try:
        ran = run(case)
    except UnsupportedGraph as refusal:
        if allowed is None:
            return f"refused: {refusal.detail}"
        report.refused[allowed] += 1
        return None
    report.ran += 1
    report.unrefused += allowed is not None
    error = FAMILIES[report.family].error(case, ran.values, answer)
    report.exact += error == 0.0
    if not error <= 1.0:
        return f"error is {error:.3g} times its bound, by {ran.plan}"
    report.largest[case.label] = max(error, report.largest.get(case.label, 0.0))
    return None


def _failure(case: Any, report: Report, number: int, problem: str) -> str:
    options = "" if report.engine == "cuda" else f" --engine {report.engine}"
    options += f" --operations {report.family}"
    again = f"python -m tests.gpu.fuzz --seed {report.seed} --only {number}{options}"
    return f"case {number}: {problem}\n  {case}\n  to repeat it: {again}"


@functools.lru_cache(_KEPT)
def drawn_case(family: str, seed: int, number: int) -> Any:
    """Case `number` of a seed and a family, as `fuzz` draws it. The last ones are kept."""
    return FAMILIES[family].draw(seed, number)


@functools.lru_cache(_KEPT)
def _answer(family: str, seed: int, number: int) -> Any:
    return FAMILIES[family].truth(drawn_case(family, seed, number))


@contextmanager
def _truths(
    family: str, seed: int, numbers: Iterable[int], processes: int
) -> Iterator[Iterator[tuple[int, Any]]]:
    """Numbers with their truths, in order, computed ahead where there are processes to do so."""
    answer = partial(_answer, family, seed)
    if not processes:
        yield ((number, answer(number)) for number in numbers)
        return
    spawning = multiprocessing.get_context("spawn")  # a fork would inherit a CUDA context that it cannot use
    with _single_threaded(), concurrent.futures.ProcessPoolExecutor(processes, spawning) as pool:
        yield _ahead(pool, answer, iter(numbers), _AHEAD * processes)
        pool.shutdown(cancel_futures=True)


def _ahead(
    pool: concurrent.futures.Executor, answer: Callable[[int], Any], numbers: Iterator[int], most: int
) -> Iterator[tuple[int, Any]]:
    waiting: collections.deque[tuple[int, concurrent.futures.Future[Any]]] = collections.deque()
    for number in numbers:
        waiting.append((number, pool.submit(answer, number)))
        if len(waiting) >= most:
            first, future = waiting.popleft()
            yield first, future.result()
    for first, future in waiting:
        yield first, future.result()


@contextmanager
def _single_threaded() -> Iterator[None]:
    """Each process with one BLAS thread: they read this when they are started."""
    names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ |= dict.fromkeys(names, "1")
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def main(arguments: list[str] | None = None) -> int:
    """The command line; 1 where any case failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.fuzz", description=__doc__)
    parser.add_argument("--engine", choices=FUZZED, default="cuda")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 32))
    parser.add_argument("--count", type=int, default=2000, help="cases of each family")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no case of a family later")
    parser.add_argument("--only", type=int, metavar="N", help="run case N alone")
    parser.add_argument("--operations", choices=FAMILIES, nargs="+", default=[*FAMILIES], metavar="FAMILY")
    parser.add_argument("--processes", type=int, default=min(12, (os.cpu_count() or 2) - 1))
    parser.add_argument("--graphs", action="store_true", help="whole graphs, not single operations")
    parser.add_argument("--jobs", type=int, default=min(12, (os.cpu_count() or 2) - 1), help="of graphs")
    given = parser.parse_args(arguments)
    if (why := why_not(given.engine)) is not None:
        parser.error(why)
    if given.graphs:
        return _fuzz_graphs(given)
    engine = factory(given.engine)()
    engine.open()
    failed = False
    for family in given.operations:
        if given.only is not None:
            print(FAMILIES[family].draw(given.seed, given.only))  # noqa: T201 - a command line
            report = fuzz(engine, given.seed, [given.only], family=family)
        else:
            report = fuzz(
                engine,
                given.seed,
                range(given.count),
                family=family,
                processes=given.processes,
                seconds=given.seconds,
                show=_Told(given.count),
            )
        print(report, flush=True)  # noqa: T201 - as above
        failed |= bool(report.failures)
    engine.close()
    return failed


class _Told:
    """Tells on stderr of each failure, and now and then how far it is. `count`: how many cases there are."""

    def __init__(self, count: int) -> None:
        self._count, self._at, self._shown = count, time.monotonic(), set[int]()

    def __call__(self, report: Report | GraphReport) -> None:
        for number in sorted(report.failures.keys() - self._shown):
            self._shown.add(number)
            print(report.failures[number], file=sys.stderr, flush=True)  # noqa: T201 - a command line
        if time.monotonic() - self._at > _TOLD_EVERY_S:
            self._at = time.monotonic()
            line = f"{report.ran} of {self._count} in {report.seconds:.0f} s, {len(report.failures)} failed"
            print(line, file=sys.stderr, flush=True)  # noqa: T201 - as above


def _fuzz_graphs(given: argparse.Namespace) -> bool:
    """Whether a graph failed."""
    numbers = range(given.count) if given.only is None else [given.only]
    if given.only is not None:
        print(draw_graph(given.seed, given.only))  # noqa: T201 - a command line
    jobs = min(given.jobs, len(numbers))
    with _single_threaded():
        report = fuzz_in_processes(given.engine, given.seed, numbers, jobs, show=_Told(given.count))
    print(report, flush=True)  # noqa: T201 - as above
    return bool(report.failures)


if __name__ == "__main__":
    sys.exit(main())
