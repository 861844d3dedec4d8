"""Random problems of each family, random graphs, and none of them wrong."""

from __future__ import annotations

import os

import pytest

from cudnn_actor.engines.base import Engine

from .families import FAMILIES
from .fuzz import fuzz
from .graphs.fuzzing import fuzz_in_processes

COUNT = int(os.environ.get("CUDNN_ACTOR_FUZZ", "2000"))
GRAPHS = int(os.environ.get("CUDNN_ACTOR_FUZZ_GRAPHS", "600"))
PROCESSES = max(1, min(12, (os.cpu_count() or 2) - 2))
PARTS = 5
"""Of a family's cases: the builds of some take a second each, and other tests can run beside a part."""


@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("family", FAMILIES)
def test_no_random_problem_is_wrong_or_refused_without_need(
    engine: Engine, family: str, part: int, seed: int
) -> None:
    numbers = range(part, COUNT, PARTS)
    report = fuzz(engine, seed, numbers, family=family, processes=-(-PROCESSES // PARTS))
    print(report)  # noqa: T201 - the seed, what was refused and why, and a command for each failure
    if report.failures:
        pytest.fail(str(report), pytrace=False)  # whole: an assertion would cut it
    assert report.ran + report.refused.total() == len(numbers)


@pytest.mark.timeout(1200)
def test_no_random_graph_is_wrong(engine: Engine, seed: int) -> None:
    report = fuzz_in_processes(engine.name, seed, range(GRAPHS), PROCESSES)
    print(report)  # noqa: T201 - as above
    if report.failures:
        pytest.fail(str(report), pytrace=False)  # whole: an assertion would cut it
    assert report.ran == GRAPHS
