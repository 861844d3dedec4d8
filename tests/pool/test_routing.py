"""Where the requests of a pool are, whatever happens to its members."""

from __future__ import annotations

import gc
import weakref
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from cudnn_actor.pool.choosing import Loads, least_time_of
from cudnn_actor.pool.routing import Ended, Given, MemberState, NoMember, Routing

from ..whole import more

UP, RESTARTING, REMOVED = MemberState.UP, MemberState.RESTARTING, MemberState.REMOVED


def test_the_member_with_the_least_to_do_gets_a_request() -> None:
    routing = Routing[int](3)
    assert [routing.submit(each, cost) for each, cost in enumerate((50, 20, 10, 5, 100))] == [0, 1, 2, 2, 2]
    assert routing.device_us == (50, 20, 115)


def test_of_many_members_two_are_looked_at_and_one_member_is_never_compared_with_itself() -> None:
    loads = Loads(up=(0, 1), device_us=(9, 1), requests=((), ()))
    assert {least_time_of(2)(loads, Random(seed)) for seed in range(50)} == {1}
    wide = Loads(up=range(100), device_us=range(100), requests=[()] * 100)
    chosen = {least_time_of(2)(wide, Random(seed)) for seed in range(200)}
    assert len(chosen) > 30
    assert 99 not in chosen


def test_nothing_is_kept_of_a_request_that_no_member_can_get() -> None:
    class Request:
        """A request that can be referred to weakly."""

    routing = Routing[Request](1)
    routing.remove(0)
    request = Request()
    kept = weakref.ref(request)
    with pytest.raises(NoMember):
        routing.submit(request, 10, max_losses=2)
    del request
    gc.collect()
    assert kept() is None


def test_requests_of_a_lost_member_are_given_to_others_in_their_order() -> None:
    routing = Routing[int](2)
    assert [routing.submit(each, 10) for each in range(4)] == [0, 1, 0, 1]
    assert routing.note_loss(0) == [Given(0, 1), Given(2, 1)]
    assert routing.of(1) == (1, 3, 0, 2)
    assert routing.device_us == (0, 40)


def test_a_request_waits_while_no_member_is_up_and_goes_to_the_first_that_is() -> None:
    routing = Routing[int](1)
    assert routing.submit(0, 10) == 0
    assert routing.note_loss(0) == []
    assert routing.submit(1, 10) is None
    assert list(routing.waiting) == [0, 1]
    assert routing.back(0) == [Given(0, 0), Given(1, 0)]
    assert not routing.waiting


def test_a_paused_member_keeps_what_it_has_and_gets_nothing_new() -> None:
    routing = Routing[int](2)
    assert routing.submit(0, 10) == 0
    routing.pause(0)
    assert [routing.submit(each, 10) for each in (1, 2)] == [1, 1]
    assert routing.of(0) == (0,)
    assert routing.end_answered(0, 0)
    assert routing.back(0) == []
    assert routing.submit(3, 10) == 0


def test_a_restarting_member_keeps_what_it_will_have_run_sooner_than_another() -> None:
    routing = Routing[int](2)
    assert [routing.submit(each, 10) for each in range(6)] == [0, 1, 0, 1, 0, 1]
    assert routing.submit(6, 100) == 0
    # It is back in 25 us. Its first would wait for 30 elsewhere, and stays. So its second waits for 35 here,
    # and moves; its third for 35, and for 40 elsewhere; its fourth for 45.
    assert routing.pause(0, back_us=25) == [Given(2, 1), Given(6, 1)]
    assert routing.of(0) == (0, 4)
    assert routing.of(1) == (1, 3, 5, 2, 6)
    assert routing.back(0) == []
    routing.pause(1)
    assert routing.pause(0, back_us=10**9) == []  # there is no other


def test_a_request_that_was_moved_from_too_many_restarting_members_ends() -> None:
    routing = Routing[int](3)
    assert routing.submit(0, 10, max_losses=2) == 0
    assert routing.pause(0, back_us=1000) == [Given(0, 1)]
    assert routing.pause(1, back_us=1000) == [Ended(0, 2)]


def test_an_answer_that_comes_after_the_request_was_given_to_another_is_refused() -> None:
    routing = Routing[int](2)
    assert routing.submit(0, 10) == 0
    assert routing.note_loss(0) == [Given(0, 1)]
    assert not routing.end_answered(0, 0)
    assert routing.end_answered(0, 1)
    assert not routing.end_answered(0, 1)


def test_a_request_that_was_lost_with_too_many_members_ends_and_the_others_go_on() -> None:
    routing = Routing[int](3, max_losses=2)
    assert routing.submit(0, 10) == 0
    assert routing.note_loss(0) == [Given(0, 1)]
    assert routing.submit(1, 100) == 2
    assert routing.submit(2, 1) == 1
    assert routing.note_loss(1) == [Ended(0, 2), Given(2, 2)]


def test_all_requests_end_when_the_last_member_is_removed() -> None:
    routing = Routing[int](2)
    routing.note_loss(0)
    assert routing.submit(0, 10) == 1
    assert routing.remove(1) == []
    assert routing.waiting == (0,)
    assert routing.remove(0) == [Ended(0, 1)]
    assert routing.remove(0) == []
    with pytest.raises(NoMember):
        routing.submit(1, 10)


def test_a_withdrawn_request_is_nobodys() -> None:
    routing = Routing[int](1)
    assert routing.submit(0, 10) == 0
    assert routing.withdraw(0) == 0
    routing.note_loss(0)
    assert routing.submit(1, 10) is None
    assert routing.withdraw(1) is None
    assert routing.back(0) == []
    assert routing.device_us == (0,)


class Anything(RuleBasedStateMachine):
    """Whatever happens in whatever order: each request is in one place, or has ended once."""

    @initialize(members=st.integers(1, 5), choices=st.integers(0, 4), seed=st.integers(0, 9))
    def begin(self, members: int, choices: int, seed: int) -> None:
        choose = least_time_of(choices) if choices else None
        self.routing = Routing[int](members, choose=choose, seed=seed, max_losses=3)
        self.members, self.choices = list(range(members)), choices
        self.costs: dict[int, int] = {}
        self.at: dict[int, int | None] = {}
        self.ended: list[int] = []

    @rule(cost=st.integers(0, 1000), max_losses=st.sampled_from([None, None, 2]))
    def submit(self, cost: int, max_losses: int | None) -> None:
        request = len(self.costs)
        if all(state is REMOVED for state in self.routing.states):
            with pytest.raises(NoMember):
                self.routing.submit(request, cost)
            return
        self.costs[request] = max(1, cost)
        before_us, up = self.routing.device_us, [each for each in self.members if self.routing.is_up(each)]
        self.at[request] = member = self.routing.submit(request, cost, max_losses)
        self.check_up(member)
        if member is not None and not self.choices:
            assert before_us[member] == min(before_us[each] for each in up)

    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        if self.costs:
            request = data.draw(st.integers(0, len(self.costs) - 1))
            member = data.draw(st.sampled_from(self.members))
            expected = request in self.at and self.at[request] == member
            assert self.routing.end_answered(request, member) == expected
            if expected:
                self.end(request)

    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        if self.at:
            request = data.draw(st.sampled_from(sorted(self.at)))
            assert self.routing.withdraw(request) == self.at[request]
            self.end(request)

    @rule(data=st.data(), what=st.sampled_from(["note_loss", "pause", "move", "back", "remove"]))
    def member(self, data: st.DataObject, what: str) -> None:
        member = data.draw(st.sampled_from(self.members))
        state = self.routing.states[member]
        allowed = {
            "note_loss": (UP, RESTARTING),
            "pause": (UP,),
            "move": (UP,),
            "back": (RESTARTING,),
            "remove": tuple(MemberState),
        }
        if state not in allowed[what]:
            with pytest.raises(ValueError, match=f"member {member} is {state}"):
                self.happens(what, member, 0)
            return
        waited = {request for request, at in self.at.items() if at is None}
        had = {request for request, at in self.at.items() if at == member and what in ("note_loss", "remove")}
        back_us = data.draw(st.integers(0, 3000)) if what == "move" else 0
        moved = self.happens(what, member, back_us)
        if what == "move":
            had = {each.request for each in moved}
            assert all(self.at[request] == member for request in had)
        for request in had:
            self.at[request] = None
        for each in moved:
            assert self.at[each.request] is None
            assert each.request in had | waited
            if isinstance(each, Given):
                self.check_up(each.member)
                self.at[each.request] = each.member
            else:
                self.end(each.request)

    def happens(self, what: str, member: int, back_us: int) -> list[Given[int] | Ended[int]]:
        if what == "move":
            return self.routing.pause(member, back_us)
        moved: list[Given[int] | Ended[int]] = getattr(self.routing, what)(member)
        return moved

    def check_up(self, member: int | None) -> None:
        up = [each for each in self.members if self.routing.is_up(each)]
        assert (member in up) if up else member is None

    def end(self, request: int) -> None:
        del self.at[request]
        self.ended.append(request)

    @precondition(lambda self: hasattr(self, "routing"))
    @invariant()
    def every_request_is_in_one_place(self) -> None:
        assert sorted([*self.at, *self.ended]) == list(self.costs)
        placed = {request: member for member in self.members for request in self.routing.of(member)}
        assert placed == {request: member for request, member in self.at.items() if member is not None}
        assert sorted(self.routing.waiting) == sorted(r for r, member in self.at.items() if member is None)
        for member in self.members:
            assert self.routing.device_us[member] == sum(
                self.costs[request] for request in self.routing.of(member)
            )
        if any(self.routing.is_up(member) for member in self.members):
            assert not self.routing.waiting


TestAnything = Anything.TestCase
TestAnything.settings = settings(max_examples=more(60), stateful_step_count=30, deadline=None)
