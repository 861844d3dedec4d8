"""What the system refuses this process (`ulimit -v`, `ulimit -n`) costs one request, and no other."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

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
    """Run a program of `limited`, which fails where anything is not as it should be. Blocks.

    With one heap: each further one that the C library has for a thread has address space set aside.
    """
    command = [sys.executable, "-m", "tests.service.limited", *arguments]
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, check=False, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr
