"""What becomes of a request that was running at a crash: the table of `broker.recovery`."""

from __future__ import annotations

import itertools
import re

import pytest

from cudnn_actor.broker import recovery
from cudnn_actor.broker.recovery import Interrupted, Outcome, graph_is_cause, verdict_on

ROWS = {
    "memory does not outlive the device context": (Interrupted(), {"memory_survives": False}, "ContextLost"),
    "it was running at a crash before": (Interrupted(crashes=2), {}, "QuarantinedRequest"),
    "it writes, and the process may still write": (
        Interrupted(),
        {"may_still_write": True},
        "OutcomeUnknown",
    ),
    "it has staging memory, and the process may still write": (
        Interrupted(writes=False, has_staging=True),
        {"may_still_write": True},
        "OutcomeUnknown",
    ),
    "a later running request writes what it reads": (
        Interrupted(is_input_overwritten=True),
        {},
        "OutcomeUnknown",
    ),
    "it is a run with `again=False`": (Interrupted(again=False), {}, "OutcomeUnknown"),
    "it is not pure: it reads what it writes": (Interrupted(pure=False), {}, "OutcomeUnknown"),
    "none of these": (Interrupted(), {}, "it runs again, first and alone"),
}
ANSWERS = {
    Outcome.CONTEXT_LOST: "ContextLost",
    Outcome.QUARANTINE: "QuarantinedRequest",
    Outcome.OUTCOME_UNKNOWN: "OutcomeUnknown",
    Outcome.RUN_AGAIN: "it runs again, first and alone",
}


def documented() -> dict[str, str]:
    """The first table of the module's docstring: what is known of a request, and its answer."""
    assert recovery.__doc__ is not None
    lines = recovery.__doc__.splitlines()
    first, second, last = [place for place, line in enumerate(lines) if line.startswith("===")][:3]
    columns = [match.span() for match in re.finditer("=+", lines[first])]
    rows: list[list[str]] = []
    for line in lines[second + 1 : last]:
        known, answer, written = (line[start:end].strip() for start, end in columns)
        if written or not rows:
            rows.append([known, answer])
        else:  # the row before goes on
            rows[-1] = [f"{old} {new}".strip() for old, new in zip(rows[-1], (known, answer), strict=True)]
    return {known: answer.strip("`") for known, answer in rows}


def test_the_table_has_each_row_once() -> None:
    assert documented() == {known: answer for known, (_, _, answer) in ROWS.items()}


@pytest.mark.parametrize("row", ROWS)
def test_a_request_gets_the_answer_of_its_row(row: str) -> None:
    request, process, answer = ROWS[row]
    verdict = verdict_on(request, **{"memory_survives": True, "may_still_write": False} | process)
    assert ANSWERS[verdict.outcome] == answer
    assert bool(verdict.why) is (answer == "OutcomeUnknown")


def test_the_first_row_that_holds_decides() -> None:
    for memory, may_write, crashes, pure, again, writes, staging, overwritten in itertools.product(
        (False, True), (False, True), (1, 2, 3), *((False, True),) * 5
    ):
        request = Interrupted(crashes, pure, again, writes, staging, overwritten)
        outcome = verdict_on(request, memory_survives=memory, may_still_write=may_write).outcome
        unknown = (may_write and (writes or staging)) or overwritten or not again or not pure
        expected = Outcome.OUTCOME_UNKNOWN if unknown else Outcome.RUN_AGAIN
        expected = expected if crashes == 1 else Outcome.QUARANTINE
        assert outcome is (expected if memory else Outcome.CONTEXT_LOST)


def test_the_reason_is_said_of_what_is_so() -> None:
    """A download writes nothing: it must not be told that what it writes may still be written."""
    download = Interrupted(writes=False, is_input_overwritten=True)
    verdict = verdict_on(download, memory_survives=True, may_still_write=True)
    assert verdict.why == "a later request may have overwritten its input"


@pytest.mark.parametrize("finished", [False, True])
def test_a_graph_that_has_run_before_is_given_one_more_crash(finished: bool) -> None:
    causes = [graph_is_cause(crashes=crashes, finished=finished) for crashes in (1, 2, 3)]
    assert causes == [False, not finished, True]
