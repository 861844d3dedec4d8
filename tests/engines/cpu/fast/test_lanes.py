"""Lanes: calls of a step run side by side, on one team of threads for all services of a process."""

from __future__ import annotations

import _thread
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cudnn_actor.engines.base import no_progress
from cudnn_actor.engines.cpu.fast.kernels import step_by_lane
from cudnn_actor.engines.cpu.fast.lanes import Lanes

from ....patience import PATIENCE_S


@pytest.fixture
def lanes() -> Iterator[Lanes]:
    lanes = Lanes(3)
    yield lanes
    lanes.close()


def team() -> set[str]:
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("cpu-lane-")}


def test_the_calls_of_a_step_run_at_the_same_time(lanes: Lanes) -> None:
    together = threading.Barrier(3, timeout=PATIENCE_S)
    lanes.run((together.wait, together.wait, together.wait), no_progress)


def test_a_step_begins_when_all_calls_of_the_one_before_are_done(lanes: Lanes) -> None:
    done: list[int] = []
    for turn in range(200):
        lanes.run(tuple(lambda turn=turn: done.append(turn) for _ in range(3)), no_progress)  # type: ignore[misc]
    assert done == [turn for turn in range(200) for _ in range(3)]


def test_a_lane_makes_its_calls_in_order_and_says_so(lanes: Lanes) -> None:
    made: list[int] = []
    heard: list[int] = []
    step = step_by_lane([[lambda number=number: made.append(number) for number in range(5)], []])  # type: ignore[misc]
    assert len(step) == 1
    lanes.run(step, lambda: heard.append(len(made)))
    assert (made, heard) == ([0, 1, 2, 3, 4], [1, 2, 3, 4, 5])


@pytest.mark.parametrize("which", [0, 1, 2])
def test_an_error_of_any_lane_is_raised_when_all_have_ended(lanes: Lanes, which: int) -> None:
    ended: list[int] = []

    def call(number: int) -> Callable[[], None]:
        def run() -> None:
            if number == which:
                raise MemoryError(f"lane {number}")
            ended.append(number)

        return run

    with pytest.raises(MemoryError, match=f"lane {which}"):
        lanes.run((call(0), call(1), call(2)), no_progress)
    assert sorted(ended) == [number for number in range(3) if number != which]
    lanes.run((lambda: ended.append(3), lambda: ended.append(4)), no_progress)
    assert {3, 4} <= set(ended)


class Stop(BaseException):
    """As Ctrl-C raises it."""


def test_a_signal_handler_that_raises_leaves_no_call_running_and_no_answer_behind(lanes: Lanes) -> None:
    begun, ended, turns = [0], [0], 200
    running, never = queue.SimpleQueue[bool](), threading.Event()

    def call() -> None:
        begun[0] += 1
        sum(range(2_000))
        ended[0] += 1

    def stop(*_: object) -> None:
        raise Stop

    def run_until_stopped() -> None:
        running.put(True)
        for _ in range(20):
            lanes.run((lambda: None, call), no_progress)
        never.wait(PATIENCE_S)

    def interrupt() -> None:
        for _ in range(turns):
            running.get()
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    lanes.run((lambda: None, lambda: None), no_progress)  # `Thread.start` may not be interrupted
    before = signal.signal(signal.SIGUSR1, stop)
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        for _ in range(turns):
            with pytest.raises(Stop):
                run_until_stopped()
            assert begun == ended
    finally:
        thread.join(PATIENCE_S)
        signal.signal(signal.SIGUSR1, before)
    together = threading.Barrier(3, timeout=PATIENCE_S)
    lanes.run((together.wait, together.wait, together.wait), no_progress)


def not_at_all(_thread: Any, _start: Callable[[Any], None]) -> None:
    """As if interrupted before the thread is started."""


def wholly(thread: Any, start: Callable[[Any], None]) -> None:
    """As if interrupted when the thread runs already."""
    start(thread)


def half(thread: Any, _start: Callable[[Any], None]) -> None:
    """As if interrupted in `Event.wait`, with its lock taken: the thread waits for that, and never runs."""
    thread._started._cond.acquire()
    vars(threading)["_limbo"][thread] = thread
    handle: Any = getattr(thread, "_handle", None)
    if handle is None:
        _thread.start_new_thread(thread._bootstrap, ())
    else:  # from Python 3.13 on
        start_joinable: Any = vars(_thread)["start_joinable_thread"]
        start_joinable(thread._bootstrap, handle=handle, daemon=True)


@pytest.mark.parametrize("begin", [not_at_all, wholly, half])
def test_a_thread_whose_start_is_interrupted_is_replaced(begin: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(threading.enumerate())
    lanes, interrupted, start = Lanes(3), list[Any](), threading.Thread.start

    def interrupted_start(thread: threading.Thread) -> None:
        interrupted.append(thread)
        begin(thread, start)
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", interrupted_start)
        with pytest.raises(Stop):
            lanes.run((lambda: None, lambda: None, lambda: None), no_progress)
    together = threading.Barrier(3, timeout=PATIENCE_S)
    for _ in range(3):
        lanes.run((together.wait, together.wait, together.wait), no_progress)
    lanes.close()
    if begin is half:
        interrupted[0]._started._cond.release()
    for thread in {*threading.enumerate(), *interrupted} - before:
        if thread.ident is not None or begin is half:
            thread._started.wait(PATIENCE_S)
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def test_while_one_service_has_the_team_another_makes_all_its_calls_itself(lanes: Lanes) -> None:
    other, own, threads = Lanes(3), threading.Event(), set[int]()

    def others() -> None:
        step = tuple(lambda: threads.add(threading.get_ident()) for _ in range(3))
        other.run(step, no_progress)
        own.set()

    thread = threading.Thread(target=others)

    def hold() -> None:
        thread.start()
        assert own.wait(PATIENCE_S)

    lanes.run((hold, lambda: None), no_progress)
    thread.join(PATIENCE_S)
    assert threads == {thread.ident}
    other.close()


def test_the_threads_end_with_the_last_service(lanes: Lanes) -> None:
    before = team()
    other = Lanes(2)
    for each in (lanes, other):
        each.run((lambda: None, lambda: None), no_progress)
    assert "cpu-lane-1" in team()
    lanes.close()
    other.run((lambda: None, lambda: None), no_progress)
    other.close()
    other.close()
    assert team() <= before


def test_a_forked_child_has_a_team_of_its_own(lanes: Lanes) -> None:
    lanes.run((lambda: None, lambda: None), no_progress)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            own, together = Lanes(2), threading.Barrier(2, timeout=PATIENCE_S)
            own.run((together.wait, together.wait), no_progress)
            own.close()
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
