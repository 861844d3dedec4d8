"""ONNX's own node suite, counted by a loop of our own: `python -m tests.onnx.node_suite` prints what failed.

Its own runner counts what a backend refuses as passed. `make test` runs the cases that `chosen` gives, and
`make test-all` runs all.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import enum
import functools
import inspect
import multiprocessing
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import onnx
from onnx import numpy_helper

from benchmarks.gpu.setting import gpu_versions
from benchmarks.recording import write_found
from cudnn_actor.models import InvalidModel, UnsupportedModel
from cudnn_actor.onnx import ModelLimits, backend
from cudnn_actor.onnx.operators import RANDOM
from cudnn_actor.protocol.errors import CudnnActorError

from ..kept import kept
from ..whole import WHOLE
from . import node_cases

__all__ = ["REFUSED", "Outcome", "Verdict", "cases", "chosen", "counts", "judged", "recorded"]
__all__ += ["refused_names", "write_refused"]

REFUSED = Path(__file__).with_name("refused_cases.txt")
"""The names of the cases that are refused. `python -m tests.onnx.operators_page` writes it."""

_OF_NOISE = frozenset({"test_dft_inverse", "test_dft_inverse_opset19"})
"""Cases that want rounding errors of float32, 1.9e-7, where the result is 0; their tolerance is 1e-7."""


class Verdict(enum.StrEnum):
    """What became of a case."""

    RIGHT = "right"
    REFUSED = "refused"
    WRONG = "wrong"
    ERROR = "error"


class Outcome(NamedTuple):
    """A case, what became of it, and why."""

    name: str
    operator: str
    expanded: bool
    verdict: Verdict
    reason: str


def cases() -> list[Any]:
    """Every case of the suite. ONNX takes seconds to compute their results, so they are kept."""
    versions = "-".join(f"{each.__name__}-{each.__version__}" for each in (onnx, np, ml_dtypes))
    code = zlib.crc32(inspect.getsource(node_cases).encode())
    return kept(f"node-suite-{versions}-{code:08x}{'-whole' if WHOLE else ''}", node_cases.computed_cases)


def operators_of(every: Sequence[Any]) -> dict[str, str]:
    """What each case is about, by its name: its last node's operator; of an expanded one, its original's."""
    direct = {case.name: str(case.model.graph.node[-1].op_type) for case in every if not _expanded(case)}
    return {case.name: direct.get(case.name.partition("_expanded")[0], _unknown(case)) for case in every}


def chosen(every: Sequence[Any]) -> list[Any]:
    """The cases that are run, in their order.

    All of them, but for the expanded ones that are not refused. These have other operators, each of which has
    cases of its own: every fourth of them is run, and the first of each operator. Of the others, none is left
    out: `count_include_pad` with `ceil_mode`, and `gqa` with `causal`, have branches of their own, and many
    pairs of such words have one case.
    """
    refused, operators = refused_names(), operators_of(every)
    expanded = dict[str, list[Any]]()
    for case in every:
        if _expanded(case) and case.name not in refused:
            expanded.setdefault(operators[case.name], []).append(case)
    left_out = {case.name for of in expanded.values() for place, case in enumerate(of) if place % 4}
    return [case for case in every if WHOLE or case.name not in left_out]


def refused_names() -> frozenset[str]:
    """The names of the cases that are refused, as they were written."""
    return frozenset(REFUSED.read_text().split())


def write_refused(outcomes: Iterable[Outcome]) -> None:
    """Write down the names of the cases that are refused."""
    names = sorted(each.name for each in outcomes if each.verdict is Verdict.REFUSED)
    REFUSED.write_text("".join(f"{name}\n" for name in names))


def recorded(every: Sequence[Any], outcomes: Iterable[Outcome]) -> list[Outcome]:
    """The outcome of each case, where those that were not run are right: all that are refused were run."""
    of = {each.name: (each.verdict, each.reason) for each in outcomes}
    operators = operators_of(every)  # of an expanded case, the original's, which may not have been run
    return [
        Outcome(case.name, operators[case.name], _expanded(case), *of.get(case.name, (Verdict.RIGHT, "")))
        for case in every
    ]


def _unknown(case: Any) -> str:
    return str(case.model.graph.node[-1].op_type)


def _expanded(case: Any) -> bool:
    return "_expanded" in case.name


def judged(every: Sequence[Any], device: str = "CPU", limits: ModelLimits | None = None) -> list[Outcome]:
    """Run each case on each of its sets of data. `limits`: those of the import."""
    operators = operators_of(every)
    return [
        Outcome(case.name, operators[case.name], _expanded(case), *_judged(case, device, limits))
        for case in every
    ]


def _judged(case: Any, device: str, limits: ModelLimits | None) -> tuple[Verdict, str]:
    try:
        model = backend.prepare(case.model, device, limits=limits)
    except (UnsupportedModel, InvalidModel) as error:
        return Verdict.ERROR if "does not fit its operator" in str(error) else Verdict.REFUSED, str(error)
    except Exception as error:  # noqa: BLE001 - a case must not end the loop
        return Verdict.ERROR, f"{type(error).__name__}: {error}"
    try:
        for inputs, wanted in case.data_sets:
            results = model.run([_array(each) for each in inputs])
            if problem := _difference(results, [_array(each) for each in wanted], case):
                return Verdict.WRONG, problem
    except CudnnActorError as error:
        mistake = "does not fit its operator" in str(error)  # what our own mistakes look like, too
        return Verdict.ERROR if mistake else Verdict.REFUSED, f"{type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001 - a case must not end the loop
        return Verdict.ERROR, f"{type(error).__name__}: {error}"
    finally:
        model.close()
    return Verdict.RIGHT, ""


def _is_random(case: Any) -> bool:
    """Whether its results are random numbers."""
    drawn = any(node.op_type in RANDOM for node in case.model.graph.node)
    return drawn or (case.name.startswith("test_training_dropout") and "zero_ratio" not in case.name)


def _array(value: Any) -> Any:
    return numpy_helper.to_array(value) if isinstance(value, onnx.TensorProto) else value


def _difference(results: Sequence[Any], wanted: Sequence[Any], case: Any) -> str:
    """What is wrong with results; empty if nothing is. As the suite's own runner compares."""
    if len(results) != len(wanted):
        return f"{len(results)} results, and {len(wanted)} are wanted"
    for number, (result, reference) in enumerate(zip(results, wanted, strict=True)):
        of = f"result {number} of {result.dtype} {result.shape}"
        if not isinstance(reference, np.ndarray | np.generic):
            return f"{of}, and a {type(reference).__name__} is wanted"
        if result.shape != reference.shape or result.dtype != reference.dtype:
            return f"{of}, wanted {reference.dtype} {reference.shape}"
        bfloat16 = result.dtype.name == "bfloat16"
        rtol = max(case.rtol, 2**-6) if bfloat16 else case.rtol
        one, other = (
            np.asarray(each.astype(np.float32) if bfloat16 else each) for each in (result, reference)
        )
        if _is_random(case):  # which generator it is, ONNX does not say
            continue
        try:
            if np.array_equal(one, other):
                continue
            atol = 1e-6 if case.name in _OF_NOISE else case.atol
            np.testing.assert_allclose(one, other, rtol=rtol, atol=atol)
        except AssertionError as error:
            return " ".join(str(error).split())[:300]
    return ""


def counts(outcomes: Iterable[Outcome]) -> dict[tuple[bool, Verdict], int]:
    """How many cases became what, direct ones (False) and expanded ones (True)."""
    return collections.Counter((each.expanded, each.verdict) for each in outcomes)


def timed(device: str, only: str, part: int, parts: int) -> list[tuple[Outcome, float]]:
    """The outcomes of a part of the cases whose name holds `only`, and seconds, by a service of their own."""
    found = []
    for case in [case for case in cases() if only in case.name][part::parts]:
        start = time.perf_counter()
        (outcome,) = judged([case], device)
        found.append((outcome, round(time.perf_counter() - start, 3)))
    backend.close()
    return found


def by_processes(device: str, only: str, jobs: int) -> Iterator[list[tuple[Outcome, float]]]:
    """The same of all of them, in the order in which parts are done."""
    if jobs == 1:
        yield timed(device, only, 0, 1)
        return
    parts = 2 * jobs
    run = functools.partial(timed, device, only, parts=parts)
    with concurrent.futures.ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        for done in concurrent.futures.as_completed([pool.submit(run, part) for part in range(parts)]):
            yield done.result()


def main() -> None:
    """Print the outcomes that are not right, and the counts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="CPU", help='"CPU" or "CUDA"')
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--verdict", default="", help="print those of this verdict alone")
    parser.add_argument("--time", action="store_true", help="print the slowest")
    parser.add_argument("--jobs", type=int, default=1, help="processes, each with a service of its own")
    parser.add_argument("--out", type=Path, help="directory for the JSON")
    args = parser.parse_args()
    start, found = time.perf_counter(), list[tuple[Outcome, float]]()
    for part in by_processes(args.device, args.only, args.jobs):
        found += part
        for each, _ in part:
            if each.verdict != Verdict.RIGHT and args.verdict in each.verdict:
                print(f"{each.verdict}: {each.name}: {each.reason[:300]}", flush=True)
    seconds = round(time.perf_counter() - start, 1)
    if args.time:
        print(f"{seconds} s; slowest:", sorted((each, outcome.name) for outcome, each in found)[-20:])
    outcomes = [outcome for outcome, _ in found]
    for (expanded, verdict), count in sorted(counts(outcomes).items()):
        print("expanded" if expanded else "direct", verdict, count)
    if args.out is not None:
        about = {"device": args.device, "onnx": onnx.__version__, "seconds": seconds}
        about |= {} if args.device == "CPU" else {"versions": gpu_versions()}
        by_name = {each.name: [each.verdict, each.reason[:200]] for each in sorted(outcomes)}
        write_found(args.out, "node-suite", by_name, **about)


if __name__ == "__main__":
    main()
