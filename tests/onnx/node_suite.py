"""ONNX's own node suite, counted by a loop of our own: `python -m tests.onnx.node_suite` prints what failed.

Its own runner counts what a backend refuses as passed.
"""

from __future__ import annotations

import argparse
import collections
import enum
import time
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import numpy_helper

from cudnn_actor.models import InvalidModel, UnsupportedModel
from cudnn_actor.onnx import backend
from cudnn_actor.protocol.errors import CudnnActorError

__all__ = ["Outcome", "Verdict", "cases", "counts", "judged"]


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
    """Every case of the suite."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        from onnx.backend.test.loader import load_model_tests

        return list(load_model_tests(kind="node"))


def operators_of(every: Sequence[Any]) -> dict[str, str]:
    """What each case is about, by its name: its last node's operator; of an expanded one, its original's."""
    direct = {case.name: str(case.model.graph.node[-1].op_type) for case in every if not _expanded(case)}
    return {case.name: direct.get(case.name.partition("_expanded")[0], _unknown(case)) for case in every}


def _unknown(case: Any) -> str:
    return str(case.model.graph.node[-1].op_type)


def _expanded(case: Any) -> bool:
    return "_expanded" in case.name


def judged(every: Sequence[Any], device: str = "CPU") -> list[Outcome]:
    """Run each case on each of its sets of data."""
    operators = operators_of(every)
    return [
        Outcome(case.name, operators[case.name], _expanded(case), *_judged(case, device)) for case in every
    ]


def _judged(case: Any, device: str) -> tuple[Verdict, str]:
    try:
        model = backend.prepare(case.model, device)
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
        try:
            np.testing.assert_allclose(one, other, rtol=rtol, atol=case.atol)
        except AssertionError as error:
            return " ".join(str(error).split())[:300]
    return ""


def counts(outcomes: Iterable[Outcome]) -> dict[tuple[bool, Verdict], int]:
    """How many cases became what, direct ones (False) and expanded ones (True)."""
    return collections.Counter((each.expanded, each.verdict) for each in outcomes)


def main() -> None:
    """Print the outcomes that are not right, and the counts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="CPU")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--verdict", default="")
    parser.add_argument("--time", action="store_true")
    args = parser.parse_args()
    outcomes, slow = [], []
    for case in cases():
        if args.only in case.name:
            start = time.perf_counter()
            outcomes += judged([case], args.device)
            slow.append((time.perf_counter() - start, case.name))
    for each in outcomes:
        if each.verdict != Verdict.RIGHT and args.verdict in each.verdict:
            print(f"{each.verdict}: {each.name}: {each.reason[:300]}")
    if args.time:
        print(f"{sum(seconds for seconds, _ in slow):.1f} s; slowest:", sorted(slow)[-20:])
    for (expanded, verdict), count in sorted(counts(outcomes).items()):
        print("expanded" if expanded else "direct", verdict, count)
    backend.close()


if __name__ == "__main__":
    main()
