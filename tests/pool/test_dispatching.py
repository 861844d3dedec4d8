"""A pool's requests on their way, with members that the test plays itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import pytest

from cudnn_actor.actors import Deadline
from cudnn_actor.errors import DeadlineExceeded, InvalidRequest, QuarantinedRequest, ServiceStopped
from cudnn_actor.pool.costs import Costs
from cudnn_actor.pool.dispatching import Dispatching
from cudnn_actor.pool.requests import PoolRequests
from cudnn_actor.pool.restart_times import RestartTimes

from ..patience import PATIENCE_S


@pytest.fixture(params=["run", "call"], autouse=True)
def way(request: pytest.FixtureRequest) -> str:
    """How `Members` sends requests: by `Dispatching.run`, or by `Pool.call`, which takes fewer steps."""
    way: str = request.param
    Members.way = way
    return way


class Member:
    """As much of a member as `Pool.call` uses."""

    def __init__(self, number: int) -> None:
        self.number, self.name, self.gpu = number, f"pool-{number}", number


class Members:
    """Members that do what they are told."""

    way = "run"

    def __init__(self, count: int) -> None:
        self.now_s = 0.0
        self.dispatching = Dispatching(count, clock=lambda: self.now_s)
        self.now_s = 0.5  # what the start of each takes
        self.has: list[dict[str, asyncio.Future[str]]] = [{} for _ in range(count)]
        members: Any = [Member(number) for number in range(count)]
        self.pool = PoolRequests("pool", members, self.dispatching)
        for member in range(count):
            self.dispatching.up(member)

    def asks(self, name: str, timeout: float | None = None) -> asyncio.Task[str]:
        """A caller's task."""

        async def work(member: Any, _: object) -> str:
            answer = self.has[member][name] = asyncio.get_running_loop().create_future()
            try:
                given: str = await answer
            finally:
                del self.has[member][name]
            return given

        if self.way == "call":
            return asyncio.ensure_future(self.pool.call(work, kind="kind", timeout=timeout))
        return asyncio.ensure_future(self.dispatching.run("kind", work, Deadline(timeout)))

    def ends(self, member: int) -> None:
        """A member's process has ended: its connection fails all requests, and the pool is told."""
        for answer in self.has[member].values():
            answer.set_exception(ServiceStopped(reason="its process has ended"))
        self.dispatching.note_loss(member)


async def turns(count: int = 4) -> None:
    """Let tasks that can run do so."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_member_says_itself_what_it_answers_on_an_event_loop_of_another_thread_or_process() -> None:
    """In a forked child, it refuses all requests."""
    members = Members(1)

    async def ask() -> str:
        asking = members.asks("a")
        await turns()
        members.has[0]["a"].set_exception(ServiceStopped(reason="this is a forked child"))
        return await asking

    for _ in range(2):  # at first, the kind is not known
        with pytest.raises(ServiceStopped, match="this is a forked child"):
            await asyncio.to_thread(asyncio.run, ask())
    assert members.dispatching.routing.is_idle


async def test_a_lost_members_requests_are_sent_to_others_and_answered_once() -> None:
    members = Members(2)
    callers = [members.asks(name) for name in "abcd"]
    await turns()
    assert [set(has) for has in members.has] == [{"a", "c"}, {"b", "d"}]
    members.ends(0)
    await turns()
    assert [set(has) for has in members.has] == [set(), set("abcd")]
    for name, answer in members.has[1].items():
        answer.set_result(f"answer to {name}")
    assert await asyncio.gather(*callers) == [f"answer to {name}" for name in "abcd"]
    assert members.dispatching.finished == [0, 4]
    assert members.dispatching.moved == 2
    assert members.dispatching.routing.device_us == (0, 0)


async def test_an_answer_that_was_on_its_way_when_its_member_was_lost_counts() -> None:
    members = Members(2)
    caller = members.asks("a")
    await turns()
    members.has[0]["a"].set_result("answered")
    members.dispatching.note_loss(0)
    assert await caller == "answered"
    await turns()
    assert members.has == [{}, {}]
    assert members.dispatching.routing.of(1) == ()


async def test_an_error_of_a_living_member_is_the_requests_own() -> None:
    members = Members(2)
    caller = members.asks("a")
    await turns()
    members.has[0]["a"].set_exception(InvalidRequest(field="x", value=1, problem="is wrong", fix="mend it"))
    with pytest.raises(InvalidRequest):
        await caller
    assert members.dispatching.routing.of(0) == ()


async def test_a_request_that_was_with_four_lost_members_is_quarantined() -> None:
    members = Members(1)
    caller = members.asks("a")
    for _ in range(4):
        await turns()
        members.ends(0)
        members.dispatching.up(0)
    with pytest.raises(QuarantinedRequest, match="4 members of the pool ended or restarted"):
        await caller


async def test_a_request_waits_for_a_member_until_its_deadline() -> None:
    members = Members(1)
    members.dispatching.note_loss(0)
    late, caller = members.asks("late", timeout=0.001), members.asks("a")
    with pytest.raises(DeadlineExceeded):
        await late
    assert len(members.dispatching.routing.waiting) == 1
    members.dispatching.up(0)
    await turns()
    members.has[0]["a"].set_result("answered")
    assert await caller == "answered"


async def test_a_cancelled_request_is_nobodys_and_what_waits_for_the_end_goes_on() -> None:
    members = Members(1)
    caller = members.asks("a")
    await turns()
    drained = asyncio.ensure_future(members.dispatching.drain())
    await turns()
    assert not drained.done()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    await drained
    assert members.dispatching.routing.of(0) == ()
    caller = members.asks("b")
    await turns()
    drained = asyncio.ensure_future(members.dispatching.drain())
    await turns()
    members.has[0]["b"].set_result("answered")
    assert await caller == "answered"
    await asyncio.wait_for(drained, PATIENCE_S)


@pytest.mark.parametrize(
    "end", [lambda it: it.close("closed"), lambda it: it.remove(0)], ids=["closed", "given up"]
)
async def test_all_requests_end_with_the_pool(end: Callable[[Dispatching], None]) -> None:
    members = Members(1)
    members.dispatching.pause(0)
    waiting = members.asks("a")
    await turns()
    end(members.dispatching)
    with pytest.raises(ServiceStopped):
        await waiting
    with pytest.raises(ServiceStopped):
        await members.asks("b")


async def test_a_paused_member_gets_nothing_and_one_that_was_removed_never_comes_back() -> None:
    members = Members(2)
    members.dispatching.pause(0)
    members.dispatching.pause(0)
    members.dispatching.remove(1)
    members.dispatching.up(1)
    caller = members.asks("a")
    await turns()
    assert members.has == [{}, {}]
    members.dispatching.up(0)
    await turns()
    members.has[0]["a"].set_result("answered")
    assert await caller == "answered"


def test_the_costs_of_kinds_are_found_out_from_answers_alone() -> None:
    """Long and short requests, all given at once, answered one after the other."""
    costs, now_s = Costs(1), 50.0
    assert costs.of("long").us == costs.of("short").us == 1000
    for kind in ["long", "short", "short", "long"] * 10:
        now_s += {"long": 0.010, "short": 0.001}[kind]
        costs.note_answer(costs.of(kind), 0, given_s=50.0, now_s=now_s)
    assert costs.of("long").us == 10_000
    assert costs.of("short").us == 1000
    costs.note_answer(costs.of("short"), 0, given_s=now_s + 5.0, now_s=now_s + 5.001)  # it was idle for 5 s
    assert costs.of("short").us == 1000


def test_few_kinds_are_kept() -> None:
    costs = Costs(1)
    often = costs.of("often")
    for kind in range(5000):
        costs.note_answer(costs.of(kind), 0, given_s=kind, now_s=kind + 0.5)
        costs.of("often")
    assert costs.of("often") is often
    assert costs.of(4999).us == 500_000
    assert costs.of(0).us == 1000


async def test_what_a_restarting_member_would_answer_later_runs_elsewhere_and_is_withdrawn_there() -> None:
    members = Members(2)
    callers = [members.asks(name) for name in "abcd"]
    await turns()
    members.dispatching.pause(0)  # its worker takes some 0.5 s, and a request 1 ms
    await turns()
    assert [set(has) for has in members.has] == [set(), set("abcd")]
    for name, answer in members.has[1].items():
        answer.set_result(f"answer to {name}")
    assert await asyncio.gather(*callers) == [f"answer to {name}" for name in "abcd"]
    assert members.dispatching.finished == [0, 4]
    assert members.dispatching.moved == 2
    assert not any(caller.cancelled() or caller.cancelling() for caller in callers)


async def test_a_member_that_is_back_sooner_keeps_its_requests() -> None:
    members = Members(2)
    for member in (0, 1):  # their workers are back in no time
        members.dispatching.pause(member)
        members.dispatching.up(member)
    caller = members.asks("a")
    await turns()
    assert set(members.has[0]) == {"a"}
    members.dispatching.pause(0)
    await turns()
    assert set(members.has[0]) == {"a"}
    members.has[0]["a"].set_result("answered")
    assert await caller == "answered"
    assert members.dispatching.moved == 0


async def test_an_answer_that_was_on_its_way_from_a_restarting_member_is_given_once() -> None:
    """Its caller has been woken by the answer, and is then told of the restart: another member answers."""
    members = Members(2)
    caller = members.asks("a")
    await turns()
    members.has[0]["a"].set_result("early")
    members.dispatching.pause(0)
    await turns()
    members.has[1]["a"].set_result("answered")
    assert await caller == "answered"
    assert members.dispatching.finished == [0, 1]
    assert members.dispatching.routing.of(0) == members.dispatching.routing.of(1) == ()


async def test_an_answer_that_comes_in_spite_of_a_restart_counts_and_the_caller_is_not_cancelled() -> None:
    """The function that sends suppresses the cancellation by which its request is withdrawn."""
    members = Members(2)

    async def stubborn(_member: Any, _: object) -> str:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return "answered"

    async def ask() -> int:
        assert await members.pool.call(stubborn) == "answered"
        task = asyncio.current_task()
        assert task is not None
        return task.cancelling()

    caller = asyncio.ensure_future(ask())
    await turns()
    members.dispatching.pause(0)
    assert await caller == 0
    assert members.dispatching.routing.is_idle


async def test_requests_that_were_moved_leave_nothing_behind() -> None:
    members = Members(2)
    caller, other = members.asks("a"), members.asks("b")
    await turns()
    members.ends(0)
    await turns()
    for answer in members.has[1].values():
        answer.set_result("answered")
    assert list(await asyncio.gather(caller, other)) == ["answered"] * 2
    assert members.dispatching.routing.device_us == (0, 0)
    assert members.dispatching.routing.is_idle
    assert members.dispatching.finished == [0, 2]
    members.dispatching.up(0)
    again = members.asks("a")
    await turns()
    members.ends(0)
    await turns()
    members.has[1]["a"].set_result("answered")
    assert await again == "answered"


async def test_after_the_close_a_request_is_refused_though_members_are_up() -> None:
    members = Members(1)
    earlier = members.asks("a")  # so that the pool knows the kind
    await turns()
    members.has[0]["a"].set_result("answered")
    await earlier
    members.dispatching.close("closed")
    for _ in range(2):
        assert members.dispatching.routing.is_up(0)
        with pytest.raises(ServiceStopped, match="closed"):
            await asyncio.wait_for(members.asks("b"), PATIENCE_S)
        members.dispatching.up(0)
    assert members.has == [{}]


async def test_a_caller_that_is_cancelled_as_its_request_is_moved_is_cancelled() -> None:
    members = Members(2)
    caller = members.asks("a")
    await turns()
    members.dispatching.pause(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert members.has == [{}, {}]
    assert members.dispatching.routing.of(1) == ()


async def test_a_timeout_around_a_request_that_is_moved_is_a_timeout() -> None:
    members = Members(2)

    async def ask() -> str:
        async with asyncio.timeout(0.01):
            return await members.asks("a")

    caller = asyncio.ensure_future(ask())
    await turns()
    members.dispatching.pause(0)
    with pytest.raises(TimeoutError):
        await caller


async def test_a_held_member_gets_nothing_new_as_long_as_another_is_up() -> None:
    members = Members(2)
    kept = members.asks("kept")
    await turns()
    with members.dispatching.holding(0):
        callers = [members.asks(name) for name in "abc"]
        await turns()
        assert [set(has) for has in members.has] == [{"kept"}, set("abc")]
        members.ends(1)
        await turns()
        assert set(members.has[0]) == {"kept", *"abc"}
        members.dispatching.up(1)
        assert members.dispatching.routing.states == ("restarting", "up")
        with members.dispatching.holding(1):  # both: they are up
            assert members.dispatching.routing.states == ("up", "up")
    for answer in members.has[0].values():
        answer.set_result("answered")
    assert await asyncio.gather(kept, *callers) == ["answered"] * 4
    assert members.dispatching.routing.states == ("up", "up")


def test_how_long_a_worker_takes_to_be_back_is_each_members_own_history() -> None:
    times = RestartTimes(2, now_s=10.0)
    times.up(0, 12.0)
    times.up(1, 11.0)
    assert (times.worker_s(0), times.worker_s(1)) == (2.0, 1.0)
    times.down(0, 20.0, process=False)
    times.up(0, 20.25)
    assert times.worker_s(0) == 0.25
    times.down(0, 30.0, process=False)
    times.down(0, 30.1, process=False)  # its worker failed to start, too
    times.up(0, 30.75)
    assert times.worker_s(0) == 0.5
    times.down(0, 40.0, process=False)
    times.down(0, 45.0, process=True)  # its process ended, which says nothing of workers
    times.up(0, 49.0)
    times.up(0, 50.0)
    assert (times.worker_s(0), times.worker_s(1)) == (0.5, 1.0)
