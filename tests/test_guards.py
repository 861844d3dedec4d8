"""What `conftest.py` watches for in every test is noticed."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any, Literal

import pytest

import cudnn_actor
from cudnn_actor.actors.logs import Log

from . import conftest
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


async def test_a_call_of_ours_may_block_in_the_functions_that_are_named_for_it() -> None:
    blocking = pytest.importorskip("blockbuster").BlockingError
    text = "def {}():\n import time\n time.sleep(0)"
    for folder, name, may in (
        ("actors/pykka_future.py", "_wait", True),
        ("actors/pykka_future.py", "_other", False),
        ("actors/other.py", "_wait", False),
    ):
        names: dict[str, Any] = {}
        exec(compile(text.format(name), str(OURS.parent / folder), "exec"), names)
        for _ in range(2):  # the second time, it is known what the code is
            with contextlib.nullcontext() if may else pytest.raises(blocking, match="sleep"):
                names[name]()


async def test_what_cannot_block_is_no_blocking_call() -> None:
    code = "import threading; lock = threading.Lock(); lock.acquire(); taken = lock.acquire(blocking=False)"
    exec(compile(code, str(OURS), "exec"))


def test_lines_that_a_test_logs_are_kept_for_its_report(request: pytest.FixtureRequest) -> None:
    Log("cudnn_actor.test").info("guards.checked", number=7)
    assert "guards.checked number=7" in "\n".join(request.node.stash[LINES])


async def test_an_error_of_a_future_that_nobody_takes_is_noted_and_fails_the_test() -> None:
    future = asyncio.get_running_loop().create_future()
    future.set_exception(ValueError("nobody takes it"))
    del future
    assert "nobody takes it" in conftest._UNTAKEN.pop()


When = Literal["setup", "call", "teardown"]
How = Literal["passed", "failed", "skipped"]


def report_of(when: When, outcome: How) -> pytest.TestReport:
    return pytest.TestReport("test_x.py::test_y", ("test_x.py", 1, "test_y"), {}, outcome, None, when)


def test_whatever_fails_or_is_skipped_is_reported_by_the_processes_that_run_tests() -> None:
    for outcome in ("failed", "skipped"):
        assert all(is_news(report_of(when, outcome)) for when in ("setup", "call", "teardown"))
    assert is_news(report_of("call", "passed"))
    assert not is_news(report_of("setup", "passed"))
    assert not is_news(report_of("teardown", "passed"))


@pytest.mark.parametrize(
    ("outcomes", "sent"),
    [
        (["passed", "passed", "passed"], ["end of teardown", "call passed"]),
        (["passed", "skipped", "passed"], ["end of teardown", "call skipped"]),
        (["skipped", "passed"], ["end of teardown", "setup skipped"]),
        (
            ["passed", "failed", "passed"],
            ["call failed", "end of teardown", "setup passed", "teardown passed"],
        ),
        (
            ["passed", "passed", "failed"],
            ["teardown failed", "end of teardown", "setup passed", "call passed"],
        ),
        (["failed", "failed"], ["setup failed", "teardown failed", "end of teardown"]),
    ],
)
def test_a_failure_is_sent_before_the_teardown_and_the_rest_of_its_test_behind_it(
    outcomes: list[How], sent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A teardown may end the process, and what it prints is for the reader of the failure."""
    seen: list[str] = []
    hooks = SimpleNamespace(
        pytest_runtest_logstart=lambda **_: None,
        pytest_runtest_logfinish=lambda **_: None,
        pytest_runtest_logreport=lambda report: seen.append(f"{report.when} {report.outcome}"),
    )
    config = SimpleNamespace(workerinput={}, getoption=lambda *_: None)
    item: Any = SimpleNamespace(config=config, ihook=hooks, stash=pytest.Stash(), nodeid="", location=())

    def made(when: When, outcome: How) -> pytest.TestReport:
        call: Any = None
        hook = conftest.pytest_runtest_makereport(item, call)
        next(hook)
        with pytest.raises(StopIteration) as ended:
            hook.send(report_of(when, outcome))
        found: pytest.TestReport = ended.value.value
        return found

    def run(item: object, *, log: bool, nextitem: object) -> list[pytest.TestReport]:
        assert not log
        whens: list[When] = ["setup", "call", "teardown"] if len(outcomes) == 3 else ["setup", "teardown"]
        reports = [made(*each) for each in zip(whens, outcomes, strict=True)]
        seen.append("end of teardown")
        return reports

    monkeypatch.setattr(conftest, "runtestprotocol", run)
    assert conftest.pytest_runtest_protocol(item, None) is True
    assert seen == sent
