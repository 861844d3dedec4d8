"""The answer of a run that a device has alone is made while the device works, and sent as soon as it ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from cudnn_actor.execution.executor import Enqueued, Executor
from cudnn_actor.isolation.process.child.decoders import FROM_PARENT
from cudnn_actor.isolation.process.child.outbox import Outbox
from cudnn_actor.isolation.process.child.task import WorkerTask
from cudnn_actor.isolation.process.status import StatusPage
from cudnn_actor.isolation.process.wire import FROM_WORKER, Answers, Done, Logged
from cudnn_actor.memory import MemoryTable
from cudnn_actor.messages import Ping
from cudnn_actor.processes.channel import Channel, channel_pair
from tests.service.rigs import AsynchronousEngine, Device

STARTED_NS = 5_000_000


class Clock:
    """Stands in for `time` in the outbox."""

    def __init__(self) -> None:
        self.now_ns = STARTED_NS

    def perf_counter_ns(self) -> int:
        return self.now_ns


@pytest.fixture
def ends() -> Iterator[tuple[Outbox, Channel, StatusPage]]:
    ours, theirs = channel_pair()
    page, parent, worker = StatusPage.create(4), Channel(ours, FROM_WORKER), Channel(theirs, FROM_PARENT)
    yield Outbox(worker, page), parent, page
    for end in (page, parent, worker):
        end.close()


@pytest.mark.parametrize("number", [1, 200, 70_000, 1 << 40])
@pytest.mark.parametrize("took_ns", [0, 1, 345_678, 10**12])
def test_it_says_how_long_the_run_took(
    number: int,
    took_ns: int,
    ends: tuple[Outbox, Channel, StatusPage],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    outbox, parent, page = ends
    clock = Clock()
    monkeypatch.setattr("cudnn_actor.isolation.process.child.outbox.time", clock)
    task = WorkerTask(Ping(), number, 3, None, page, started_ns=STARTED_NS)
    send = outbox.done_ahead(task, "a plan")
    assert parent.receive() == []
    clock.now_ns = STARTED_NS + took_ns
    send()
    assert parent.receive() == [Answers([Done(number, 3, "a plan", STARTED_NS, took_ns / 1e3)])]


def test_earlier_answers_and_lines_go_first(ends: tuple[Outbox, Channel, StatusPage]) -> None:
    outbox, parent, page = ends
    earlier, line = (
        Done(1, 0, "earlier", STARTED_NS, 1.0),
        Logged(0, "cudnn_actor", "info", "before.the_answer", {}),
    )
    send = outbox.done_ahead(WorkerTask(Ping(), 2, 1, None, page, started_ns=STARTED_NS), "later")
    outbox.note_done(earlier)
    outbox.log(line)
    send()
    outbox.flush()
    first, second, third = parent.receive()
    assert (first, second) == (line, Answers([earlier]))
    assert [each.number for each in third.answers] == [2]


def executor_on(device: Device) -> Executor[str]:
    return Executor(AsynchronousEngine(device), MemoryTable("cpu"))


def test_it_is_given_once_when_the_fence_has_passed_and_the_work_is_still_known() -> None:
    device, given = Device(), list[int]()
    executor = executor_on(device)
    executor.defer(Enqueued("task", "tag", ()))
    executor.fence()

    def answer() -> None:
        given.append(executor.unfinished_count)

    assert not executor.has_passed(answer)
    assert given == []
    device.fences[-1].set()
    assert executor.has_passed(answer)
    assert given == [1], "a crash in it would find the work unfinished"
    assert (executor.take_done(), executor.first_late(), executor.busy) == (None, None, False)
    assert not executor.has_passed(answer)
    assert given == [1]


@pytest.mark.parametrize("also", ["behind one fence", "behind another", "not fenced", "with a value", "late"])
def test_it_is_not_for_work_beside_other_work_or_with_another_answer(also: str) -> None:
    executor = executor_on(Device())
    others: dict[str, dict[str, Any]] = {"with a value": {"reply": 1}, "late": {"late": lambda: 1}}
    work = Enqueued("task", "tag", (), **others.get(also, {}))
    executor.defer(work)
    if also == "behind one fence":
        executor.defer(Enqueued("other", "tag", ()))
    executor.fence()
    if also in ("behind another", "not fenced"):
        assert executor.only_work is work
        executor.defer(Enqueued("other", "tag", ()))
        if also == "behind another":
            executor.fence()
    assert executor.only_work is None
