"""What became of a case, and whose fault a difference is."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cudnn_actor.onnx import backend
from cudnn_actor.onnx.operators import RANDOM
from cudnn_actor.protocol.errors import CudnnActorError

from .cases import Case
from .comparing import difference
from .known import documented, explained, summed
from .others import Answer, Others

__all__ = ["Outcome", "Verdict", "judged"]

NOT_IMPLEMENTED = "NOT_IMPLEMENTED"
"""What ONNX Runtime says of valid models that it has no kernel for."""


class Verdict(enum.StrEnum):
    """What became of a case."""

    RIGHT = "right"
    """Ours is what ONNX Runtime gives or, where it gives nothing, what the reference evaluator gives."""
    INVALID = "refused by all"
    UNSURE = "answered by us alone"
    """Nothing to compare with."""
    REFUSED = "refused, as documented"
    THEIRS = "a fault of theirs"
    OPEN = "left open by ONNX"
    OURS = "ours"


class Outcome(NamedTuple):
    """A case, what became of it, and why."""

    name: str
    operator: str
    verdict: Verdict
    reason: str
    shown: str = ""
    theirs: tuple[str, str] = ("", "")
    """What ONNX Runtime and the reference evaluator said instead of an answer."""


def ours(case: Case, device: str) -> Answer:
    """Our answer. A reason that begins with "!" is no error of this package."""
    try:
        model = backend.prepare(case.model, device)
        try:
            found = model.run(dict(case.given))
        finally:
            model.close()
    except CudnnActorError as error:
        return Answer(None, f"{type(error).__name__}: {error}")
    except Exception as error:  # noqa: BLE001 - a fault, which must not end the loop
        return Answer(None, f"! {type(error).__name__}: {error}")
    return Answer([np.asarray(each) for each in found])


def judged(case: Case, others: Others, device: str = "CPU") -> Outcome:
    """Run a case three times, and compare. Blocks."""
    mine = ours(case, device)
    runtime, reference = (_typed(case, each) for each in _asked(case, others))
    verdict, reason = _verdict(case, mine, runtime, reference)
    if verdict is not Verdict.RIGHT and NOT_IMPLEMENTED in runtime.reason:
        wide = case.in_float32()  # for which ONNX Runtime may have a kernel
        if wide.dtypes != case.dtypes and (answer := _asked(wide, others)[0]).outputs is not None:
            verdict, reason = _verdict(case, mine, _narrowed(answer, mine), reference)
    return Outcome(
        case.name, case.version.operator, verdict, reason, str(case), (runtime.reason, reference.reason)
    )


def _asked(case: Case, others: Others) -> tuple[Answer, Answer]:
    return others.answers(case.model.SerializeToString(), case.given)


def _typed(case: Case, answer: Answer) -> Answer:
    """An answer, but none if it has other dtypes than the schema says of its outputs."""
    if answer.outputs is None:
        return answer
    for name, array, dtype in zip(case.outputs, answer.outputs, case.output_dtypes, strict=True):
        if not isinstance(array, np.ndarray) or (array.dtype != dtype and array.dtype.kind not in "OU"):
            return Answer(None, f"{name} is {getattr(array, 'dtype', type(array).__name__)}, not {dtype}")
    return answer


def _narrowed(answer: Answer, mine: Answer) -> Answer:
    """An answer of float32 with the dtypes of ours."""
    if answer.outputs is None or mine.outputs is None:
        return answer
    with np.errstate(all="ignore"):
        pairs = zip(answer.outputs, mine.outputs, strict=True)
        return Answer([a.astype(m.dtype) if a.dtype == np.float32 else a for a, m in pairs])


def _verdict(case: Case, mine: Answer, runtime: Answer, reference: Answer) -> tuple[Verdict, str]:
    answers = {"ONNX Runtime": runtime.outputs, "the reference": reference.outputs}
    answered = {who: outputs for who, outputs in answers.items() if outputs is not None}
    if mine.outputs is None:
        valid = runtime.outputs is not None or NOT_IMPLEMENTED in runtime.reason
        return _refused(case, mine.reason, list(answered) if valid else [])
    if case.version.operator in RANDOM:
        return Verdict.OPEN, "its numbers are those of a generator that ONNX does not define"
    if not answered:
        return Verdict.UNSURE, runtime.reason
    scale = summed(case)
    differences = {
        who: difference(mine.outputs, outputs, case.outputs, scale) for who, outputs in answered.items()
    }
    who, found = next(iter(differences.items()))
    if found is None:
        return Verdict.RIGHT, ""
    if (known := explained(case, who, found)) is not None:
        return Verdict(known.kind), known.sentence
    others = {other: "as ours" if each is None else each.text for other, each in differences.items()}
    return Verdict.OURS, "; ".join(f"{other}: {text}" for other, text in others.items())


def _refused(case: Case, reason: str, answered: Sequence[str]) -> tuple[Verdict, str]:
    if reason.startswith("!"):
        return Verdict.OURS, reason
    if not answered:
        return Verdict.INVALID, reason
    if (page := documented(case, reason, answered)) is not None:
        return Verdict(page.kind), page.sentence
    return Verdict.OURS, f"refused, and {' and '.join(answered)} gave an answer: {reason}"
