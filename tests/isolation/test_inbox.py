"""A worker's inbox: it waits for requests, asleep or looking for them."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from cudnn_actor import BufferRef, TensorSpec
from cudnn_actor.isolation.process.child.decoders import FROM_PARENT
from cudnn_actor.isolation.process.child.inbox import Inbox
from cudnn_actor.isolation.process.child.outbox import Outbox
from cudnn_actor.isolation.process.cores import PROMPT_S
from cudnn_actor.isolation.process.status import StatusPage
from cudnn_actor.isolation.process.wire import (
    FROM_WORKER,
    ReadStaged,
    Request,
    Requests,
    Staged,
    WriteStaged,
    encode_message,
)
from cudnn_actor.messages import Ping
from cudnn_actor.processes.channel import Channel, channel_pair

from ..patience import PATIENCE_S

Ends = tuple[Inbox, Channel]
REF = BufferRef(slot=1, generation=2, spec=TensorSpec.packed((4,), "float32"), device="cpu")


@pytest.fixture(params=[False, True], ids=["asleep", "looking"])
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    """An inbox, and the parent's end of its socket."""
    ours, theirs = channel_pair()
    page, parent, channel = StatusPage.create(4), Channel(ours, FROM_WORKER), Channel(theirs, FROM_PARENT)
    inbox = Inbox(channel, Outbox(channel, page), page, "cpu", 1 << 20, find=lambda _: pytest.fail("no run"))
    inbox.looks = request.param
    yield inbox, parent
    parent.close()
    channel.close()
    page.close()
    os.close(inbox.wake_event)  # a worker's ends with its process


def send(parent: Channel, number: int) -> None:
    parent.send(Requests([Request(number, 0, encode_message(Ping()))]))
    assert parent.flush()


def test_each_request_is_taken_whenever_it_comes(ends: Ends) -> None:
    inbox, parent = ends
    with ThreadPoolExecutor(1) as threads:
        for number in range(300):
            sent = threads.submit(send, parent, number)
            if number % 3:  # else it comes before the inbox waits, as it looks, or as it sleeps
                sent.result()
            assert [task.number for task in inbox.take(64)] == [number]
            sent.result()


class Selects:
    """Stands in for the module `select`: notes the timeouts, and says when it is about to sleep."""

    def __init__(self) -> None:
        self.timeouts: list[float | None] = []
        self.sleeps = threading.Event()

    def select(self, *arguments: Any) -> Any:
        self.timeouts.append(arguments[3] if len(arguments) > 3 else None)
        if self.timeouts[-1] is None:
            self.sleeps.set()
        return select.select(*arguments)


def test_a_worker_that_looks_does_so_after_each_request_and_then_sleeps(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    inbox, parent = ends
    first = []
    with ThreadPoolExecutor(1) as threads:
        for number in range(4):
            selects = Selects()
            monkeypatch.setattr("cudnn_actor.isolation.process.child.inbox.select", selects)
            taken = threads.submit(inbox.take, 64)
            assert selects.sleeps.wait(PATIENCE_S)
            first.append(selects.timeouts[0])
            send(parent, number)
            assert [task.number for task in taken.result(PATIENCE_S)] == [number]
    assert first == [0.0 if inbox.looks else None] * 4


class Clock:
    """Stands in for two modules. A look for a request takes 10 us, and a sleep as long as it is told."""

    def __init__(self) -> None:
        self.now, self.looked_s, self.slept_s = 1000.0, 0.0, 0.0

    def monotonic(self) -> float:
        return self.now

    def select(self, *arguments: Any) -> Any:
        """Nothing can be read before it sleeps."""
        sleeps = len(arguments) == 3
        self.now += self.slept_s if sleeps else 10e-6
        self.looked_s += 0.0 if sleeps else 10e-6
        ready: Any = select.select(arguments[0], (), (), 0.0)
        return ready if sleeps else ([], [], [])


def test_a_worker_looks_for_longer_after_a_request_that_came_soon_or_wrote_values(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    inbox, parent = ends
    clock = Clock()
    for module in ("select", "time"):
        monkeypatch.setattr(f"cudnn_actor.isolation.process.child.inbox.{module}", clock)

    def looked_after(message: Any, *, slept_s: float) -> float:
        """For how long it looks for a request after one with this message, for which it slept so long."""
        looked = []
        for number, sent in enumerate((message, Ping())):
            parent.send(Requests([Request(number, 0, encode_message(sent))]))
            assert parent.flush()
            clock.looked_s, clock.slept_s = 0.0, slept_s
            assert len(inbox.take(64)) == 1
            looked.append(clock.looked_s)
        return looked[1]

    briefly, longer = (pytest.approx(each if inbox.looks else 0.0, abs=20e-6) for each in (150e-6, PROMPT_S))
    read, write = ReadStaged(src=REF, values=Staged(0, 0)), WriteStaged(dst=REF, values=Staged(0, 0))
    assert looked_after(read, slept_s=1.0) == briefly
    assert looked_after(write, slept_s=1.0) == longer
    assert looked_after(read, slept_s=1.0) == briefly
    assert looked_after(read, slept_s=0.0) == longer
    assert looked_after(read, slept_s=1.0) == briefly
    parent.send(Requests([]))  # it says that another is to be sent soon
    assert parent.flush()
    clock.slept_s = 1.0
    assert not inbox.take(64)
    clock.looked_s = 0.0
    parent.send(Requests([Request(1, 0, encode_message(Ping()))]))
    assert parent.flush()
    assert len(inbox.take(64)) == 1
    assert clock.looked_s == longer


def test_a_copy_that_comes_again_is_not_decoded_again(ends: Ends) -> None:
    inbox, parent = ends
    copies = [WriteStaged(dst=REF, values=Staged(0, at, 512)) for at in (0, 256)]
    taken = []
    for number, copy in enumerate([copies[0], copies[1], copies[0]]):
        parent.send(Requests([Request(number, 0, encode_message(copy))]))
        assert parent.flush()
        taken += [task.message for task in inbox.take(64)]
    assert taken == [copies[0], copies[1], copies[0]]
    assert taken[0] is taken[2]


def test_a_nudge_ends_a_wait_without_a_request(ends: Ends) -> None:
    inbox, parent = ends
    send(parent, 1)
    assert len(inbox.take(64)) == 1
    with ThreadPoolExecutor(1) as threads:
        threads.submit(inbox.nudge)
        assert not inbox.take(64)
    send(parent, 2)
    assert [task.number for task in inbox.take(64)] == [2]


def test_the_end_of_the_parent_ends_a_wait(ends: Ends) -> None:
    inbox, parent = ends
    send(parent, 1)
    assert len(inbox.take(64)) == 1
    with ThreadPoolExecutor(1) as threads:
        threads.submit(parent.close)
        with pytest.raises(SystemExit):
            inbox.take(64)
