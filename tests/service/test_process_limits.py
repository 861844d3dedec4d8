"""What the system refuses this process (`ulimit -v`, `ulimit -n`) costs one request, and no other."""

from __future__ import annotations

import pytest

from .. import forked_programs
from ..patience import PATIENCE_S

PLACES = ["thread", "process", "apart"]


@pytest.mark.parametrize("place", PLACES)
def test_requests_past_a_limit_of_the_process_are_refused_alone(place: str) -> None:
    run("check", place)


@pytest.mark.parametrize("place", PLACES)
def test_a_service_that_starts_under_a_limit_refuses_what_is_past_it(place: str) -> None:
    run("fill_up", place)


@pytest.mark.parametrize("place", PLACES)
def test_a_worker_goes_on_where_there_is_no_memory_for_what_it_says(place: str) -> None:
    run("starve", place)


def run(*arguments: str) -> None:
    """Run a program of `limited`, which fails where anything is not as it should be. Blocks."""
    done = forked_programs.run(["-m", "tests.service.limited", *arguments], timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
