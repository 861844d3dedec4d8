"""What `conftest.py` watches for in every test is noticed."""

from __future__ import annotations

from pathlib import Path
from types import CodeType
from typing import Literal

import pytest

import cudnn_actor
from cudnn_actor.actors.logs import Log

from .conftest import LINES, is_news

OURS = Path(cudnn_actor.__file__).with_name("made_up.py")


def sleeping(path: Path) -> CodeType:
    """Code that sleeps, as if it stood in a file."""
    return compile("import time; time.sleep(0)", str(path), "exec")


async def test_a_call_of_ours_that_can_block_raises_where_an_event_loop_runs() -> None:
    blocking = pytest.importorskip("blockbuster").BlockingError
    with pytest.raises(blocking, match="sleep"):
        exec(sleeping(OURS))
    exec(sleeping(Path(__file__)))  # tests may


def test_a_call_of_ours_may_block_where_none_runs() -> None:
    exec(sleeping(OURS))


def test_lines_that_a_test_logs_are_kept_for_its_report(request: pytest.FixtureRequest) -> None:
    Log("cudnn_actor.test").info("guards.checked", number=7)
    assert "guards.checked number=7" in "\n".join(request.node.stash[LINES])


def reported(
    when: Literal["setup", "call", "teardown"], outcome: Literal["passed", "failed", "skipped"]
) -> bool:
    return is_news(
        pytest.TestReport("test_x.py::test_y", ("test_x.py", 1, "test_y"), {}, outcome, None, when)
    )


def test_whatever_fails_or_is_skipped_is_reported_by_the_processes_that_run_tests() -> None:
    for outcome in ("failed", "skipped"):
        assert all(reported(when, outcome) for when in ("setup", "call", "teardown"))
    assert reported("call", "passed")
    assert not reported("setup", "passed")
    assert not reported("teardown", "passed")
