"""ONNX's own node suite, counted, and the page that says so."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from cudnn_actor.onnx import ModelLimits, backend
from cudnn_actor.onnx.loops import is_loop

from .node_suite import Verdict, cases, chosen, counts, judged, recorded, refused_names
from .operators_page import PAGE, render


@pytest.fixture(autouse=True)
def the_shared_service_ends() -> Iterator[None]:
    yield
    backend.close()


def test_every_case_is_right_or_refused_and_the_page_says_which() -> None:
    """Of what is not run, the page says what a run of all cases has found: see `node_suite`."""
    every = cases()
    run = chosen(every)
    judgements = judged(run)
    assert [each for each in judgements if each.verdict in (Verdict.WRONG, Verdict.ERROR)] == []
    refused = {each.name for each in judgements if each.verdict is Verdict.REFUSED}
    assert refused == refused_names(), "run: python -m tests.onnx.operators_page"
    outcomes = recorded(every, judgements)
    of = counts(outcomes)
    assert of[False, Verdict.RIGHT] >= 1200
    assert of[True, Verdict.RIGHT] >= 420
    assert PAGE.read_text() == render(outcomes), "run: python -m tests.onnx.operators_page"
    loops = [case for case in every if any(map(is_loop, case.model.graph.node))]
    verdicts = {each.name: each.verdict for each in outcomes}
    as_loops = judged(loops, limits=ModelLimits(unrolled=0))
    assert {each.name: each.verdict for each in as_loops} == {
        each.name: verdicts[each.name] for each in as_loops
    }
    assert sum(each.verdict is Verdict.RIGHT for each in as_loops) >= 20
