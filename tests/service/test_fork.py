"""A forked child has nothing of its parent's services, and takes nothing from them.

The programs run in processes of their own (`fork_programs`), since a child has a copy of all that pytest has.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .. import forked_programs
from ..patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
HERE = "tests.service.fork_programs"

both = pytest.mark.parametrize("isolation", ["thread", "process"])


def run(*command: str, **environment: str) -> None:
    """Run a program of the rigs: it has to end well, and to say nothing."""
    # Python 3.12 and later warn of each fork beside threads: that is what these tests do.
    filters = ["-W", "error", "-W", "ignore:This process:DeprecationWarning"]
    environment = {**os.environ, **environment}
    done = forked_programs.run(
        [*filters, "-m", HERE, *command], cwd=ROOT, env=environment, timeout=PATIENCE_S, spare=True
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr


@both
def test_children_are_refused_everything_and_their_parent_s_load_goes_on(isolation: str) -> None:
    run("children_look_around", isolation)


@both
def test_children_on_uvloop_are_refused_everything_too(isolation: str) -> None:
    pytest.importorskip("uvloop")
    run("children_look_around", isolation, "uvloop")


@both
def test_whatever_the_other_threads_are_at_when_a_child_is_forked(isolation: str) -> None:
    run("many_children", isolation)


@pytest.mark.parametrize(
    ("isolation", "ways"), [("thread", ["fork"]), ("process", ["fork", "fork_and_exit", "multiprocessing"])]
)
def test_a_child_has_services_of_its_own_beside_its_parent_s(isolation: str, ways: list[str]) -> None:
    run("children_serve_themselves", isolation, *ways)


@both
def test_a_child_that_is_forked_in_the_body_leaves_it_at_once(isolation: str) -> None:
    run("fork_in_a_body", isolation)


@both
def test_locks_that_other_threads_hold_when_a_child_is_forked_do_not_stop_it(isolation: str) -> None:
    run("locks_are_held", isolation)


@both
def test_a_child_of_a_process_that_starts_and_stops_services(isolation: str) -> None:
    run("services_come_and_go", isolation)


def test_a_child_s_end_leaves_its_parent_s_directory_of_plans(tmp_path: Path) -> None:
    run("directory_of_plans", TMPDIR=str(tmp_path))
    assert not list(tmp_path.glob("cudnn-actor-plans-*"))


def test_what_a_child_does_to_its_copies_of_requests_does_not_reach_them() -> None:
    run("child_gives_up_its_copies")
