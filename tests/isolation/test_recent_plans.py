"""The plans with which a standby is warmed, where a signal's handler interrupts their noting."""

from __future__ import annotations

import functools
import itertools
from types import CodeType

import pytest

from cudnn_actor.isolation.process.parent import recent_plans
from cudnn_actor.isolation.process.parent.in_flight import WorkerRequest
from cudnn_actor.isolation.process.parent.recent_plans import RecentPlans
from cudnn_actor.protocol import Allocate, ConvFwd, ConvSpec, TensorSpec

from ..instructions import functions_in, instructions
from .simulated import Office

MOST = 2


@functools.cache
def codes() -> list[CodeType]:
    """Looked for among all objects: by the first test, not by each process that collects the tests."""
    return functions_in("parent/recent_plans.py")


class HandlerError(Exception):
    """What the handler raises."""


def requests_of_plans(office: Office, count: int) -> list[WorkerRequest]:
    """Requests in flight, each with a plan of its own."""
    w = office.ask(Allocate(spec=TensorSpec.packed((1, 1, 1, 1))))
    specs = [TensorSpec.packed((1, 1, 1, width)) for width in range(2, count + 2)]
    buffers = [[office.ask(Allocate(spec=spec)) for _ in range(2)] for spec in specs]
    for x, y in buffers:
        office.send(ConvFwd(x=x, w=w, y=y, conv=ConvSpec.symmetric(2)))
    office.turn()
    return list(office.host.in_flight.requests.values())


def note(recent: RecentPlans, request: WorkerRequest) -> str:
    """Note a request. Returns the digest of its graph."""
    assert request.cached is not None
    recent.note(request, request.cached)
    return request.cached.lowered.graph.digest()


def interrupted(recent: RecentPlans, request: WorkerRequest, at: int) -> bool:
    """Note a request, and raise before the `at`-th instruction. Returns whether there was one."""
    count = itertools.count()

    def hear(_code: CodeType, _offset: int) -> None:
        if next(count) == at:
            raise HandlerError

    try:
        with instructions(codes(), hear):
            note(recent, request)
    except HandlerError:
        return True
    return False


def test_a_plan_is_noted_within_the_bounds_wherever_its_noting_is_interrupted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The interrupted noting is repeated. A plan that was dropped meanwhile is noted when it runs again."""
    monkeypatch.setattr(recent_plans, "MOST_RECENT", MOST)
    office = Office(host=False)
    office.attach()
    first, second, third = requests_of_plans(office, MOST + 1)
    for at in itertools.count():
        recent = RecentPlans(kept=True, nbytes=1 << 30)
        told: list[int] = []
        recent.on_new = lambda told=told: told.append(1)  # type: ignore[misc]
        for request in (first, second, third):
            assert request.cached is not None
            request.cached.recent = None
        oldest, kept = note(recent, first), note(recent, second)
        told.clear()
        happened = interrupted(recent, third, at)
        newest = note(recent, third)
        assert set(recent.plans) == {kept, newest}
        assert told, "the standby hears of it"
        assert note(recent, first) == oldest
        assert set(recent.plans) >= {oldest}
        assert len(recent.plans) == MOST
        if not happened:
            assert at > 1, "nothing was interrupted"
            break
    office.settle()
    office.close()
