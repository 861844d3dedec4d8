from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Generator, Iterator

import pykka
import pytest
import structlog
from blockbuster import blockbuster_ctx
from structlog.testing import capture_logs
from structlog.typing import EventDict

from .rigs import mapped_arenas

SETTLED_WITHIN_S = 5.0
FAILED = pytest.StashKey[bool]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note for the fixtures whether the test itself failed."""
    report = yield
    if report.when == "call":
        item.stash[FAILED] = report.failed
    return report


@pytest.fixture(autouse=True)
def nothing_leaks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Every thread, descriptor, arena and actor of a test is gone when the test is.

    Compared are sets, not counts, so that one leak cannot hide behind one loss. Two tolerances, both for the
    interpreter's sake: a service says that it has stopped on the thread that stopped it, which then needs a
    moment to end, so the look is repeated for 5 s; and what only garbage holds (tracebacks of expected
    errors have the frames, and the frames the arrays) is no leak, so it is collected first.
    """
    threads, descriptors, arenas = set(threading.enumerate()), _descriptors(), mapped_arenas()
    yield
    if request.node.stash.get(FAILED, False):
        return  # a test that failed keeps its frames, for the report
    looks = {
        "threads": lambda: sorted(str(thread) for thread in set(threading.enumerate()) - threads),
        "descriptors": lambda: sorted(_descriptors() - descriptors),
        "arenas": lambda: sorted(mapped_arenas() - arenas),
        "actors": lambda: [str(ref) for ref in pykka.ActorRegistry.get_all()],
    }
    left = {what: _what_stays(look) for what, look in looks.items()}
    assert not any(left.values()), f"leaked: {left}"


@pytest.fixture(autouse=True)
def no_loop_is_blocked() -> Iterator[None]:
    """A call of ours that could block raises in a thread whose event loop is running.

    Only stacks with our own code in them count: tests may wait for their own gates.
    """
    with blockbuster_ctx("cudnn_actor"):
        yield


@pytest.fixture(autouse=True)
def logs() -> Iterator[list[EventDict]]:
    """What was logged, with the context variables of the thread that logged it."""
    with capture_logs(processors=[structlog.contextvars.merge_contextvars]) as entries:
        yield entries


def _what_stays(look: Callable[[], list[str]]) -> list[str]:
    deadline = time.monotonic() + SETTLED_WITHIN_S
    while left := look():
        gc.collect()
        if time.monotonic() > deadline:
            return left
        threading.Event().wait(0.002)
    return []


def _descriptors() -> set[str]:
    """Number and target of each, but for the one that lists them."""
    found = set()
    for number in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{number} -> {os.readlink(f'/proc/self/fd/{number}')}")
        except FileNotFoundError:
            continue
    return found
