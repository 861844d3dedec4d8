"""Draws models of every operator and version of ONNX, and compares what they give here with ONNX Runtime.

    python -m tests.onnx.fuzzing                          30 cases of each version
    python -m tests.onnx.fuzzing --only Conv --count 300
    python -m tests.onnx.fuzzing --case Conv-11/1/17      one case again, with its model
    python -m tests.onnx.fuzzing --page                   writes docs/onnx-differences.md

ONNX's reference evaluator answers, too. What differs is ours, theirs, or left open by ONNX: `known` says
which, with the sentence of the standard.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
from onnx import printer

from benchmarks.recording import ends_at_sigterm, write_found
from cudnn_actor.onnx import backend

from .cases import drawn
from .differences_page import PAGE, render
from .others import Others
from .verdicts import Outcome, Verdict, judged, ours
from .versions import Version, every_version

__all__ = ["outcomes"]


def outcomes(versions: list[Version], seed: int, numbers: range, device: str = "CPU") -> Iterator[Outcome]:
    """The outcome of each case: the first of every version, then the second, and so on."""
    with Others() as others:
        for number, version in itertools.product(numbers, versions):
            yield judged(drawn(version, seed, number), others, device)


def _show(name: str, device: str) -> None:
    version_name, seed, number = name.rsplit("/", 2)
    (version,) = (each for each in every_version() if each.name == version_name)
    case = drawn(version, int(seed), int(number))
    print(case, printer.to_text(case.model), sep="\n")
    print({each: np.asarray(value).tolist() for each, value in case.inputs.items()})
    mine = ours(case, device)
    print("ours:", mine.reason if mine.outputs is None else mine.outputs)
    with Others() as others:
        answers = others.answers(case.model.SerializeToString(), case.given)
        for who, each in zip(("ONNX Runtime:", "the reference:"), answers, strict=True):
            print(who, each.reason if each.outputs is None else each.outputs)
        outcome = judged(case, others, device)
    print(f"{outcome.verdict}: {outcome.reason}")


def _record(found: list[Outcome]) -> dict[str, object]:
    """What a run has found: of each version how many cases became what, why, and those that are ours."""
    counts: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
    for each in found:
        counts[each.name.split("/")[0]][each.verdict] += 1
    named = (Verdict.THEIRS, Verdict.OPEN, Verdict.REFUSED)
    why = collections.Counter(
        f"{each.verdict}: {each.operator}: {each.reason}" for each in found if each.verdict in named
    )
    return {
        "versions": counts,
        "why": dict(sorted(why.items())),
        "ours": [each._asdict() for each in found if each.verdict is Verdict.OURS],
    }


def main() -> None:
    """Print what differs, and the counts."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--case", help="show one case, by its name")
    parser.add_argument("--count", type=int, default=30, help="cases of each version")
    parser.add_argument("--device", default="CPU", help='"CPU" or "CUDA"')
    parser.add_argument("--only", default="", help="operators, separated by commas")
    parser.add_argument("--out", type=Path, help="directory for the JSON")
    parser.add_argument("--page", action="store_true", help="write the page of known differences")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--show", default=Verdict.OURS.value, help="print those of this verdict")
    args = parser.parse_args()
    if args.page:
        PAGE.write_text(render())
        return
    if args.case:
        _show(args.case, args.device)
        return
    chosen = [each for each in every_version() if not args.only or each.operator in args.only.split(",")]
    start, found = time.monotonic(), list[Outcome]()
    ends_at_sigterm()
    with contextlib.suppress(KeyboardInterrupt):  # what was found until then is kept
        for outcome in outcomes(chosen, args.seed, range(args.count), args.device):
            found.append(outcome)
            if outcome.verdict == args.show:
                print(f"{outcome.reason[:400]}\n    {outcome.shown[:600]}\n    {outcome.theirs}", flush=True)
    total = collections.Counter(each.verdict.value for each in found)
    seconds = round(time.monotonic() - start)
    print(f"{len(found)} cases of {len(chosen)} versions in {seconds} s: {dict(total)}")
    if args.out is not None:
        import onnxruntime

        about = {"device": args.device, "seed": args.seed, "count": args.count, "seconds": seconds}
        about |= {"onnx": onnx.__version__, "onnxruntime": onnxruntime.__version__, "verdicts": dict(total)}
        write_found(args.out, "fuzzing", _record(found), **about)


if __name__ == "__main__":
    try:
        main()
    finally:
        backend.close()
