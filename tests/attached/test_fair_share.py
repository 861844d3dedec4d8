"""Clients get equal shares of device time, and none starves, whatever they send."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cudnn_actor.attached.server.fair_share import QUANTUM_US, FairShare

from ..whole import more

COSTS = st.floats(100.0, 5_000.0)


@settings(max_examples=more(30))
@given(st.lists(COSTS, min_size=2, max_size=5), st.floats(0.5, 2.0))
def test_shares_of_busy_clients_are_equal_within_a_bound(costs: list[float], error: float) -> None:
    """However long their requests are, and although the estimates are wrong by a factor."""
    share: FairShare[int, float] = FairShare(window_us=1e9)
    for client, cost in enumerate(costs):
        share.join(client)
        for _ in range(2):
            share.put(client, cost, cost)
    taken = dict.fromkeys(range(len(costs)), 0.0)
    while max(taken.values()) < 20 * max(costs):
        turn = share.take()
        assert turn is not None
        client, cost, estimate = turn
        share.put(client, cost, cost)
        taken[client] += cost * error
        share.finish(client, estimate, cost * error)
    spread = max(taken.values()) - min(taken.values())
    assert spread <= 2 * max(costs) * error + 2 * QUANTUM_US


@settings(max_examples=more(50))
@given(st.lists(st.tuples(st.integers(0, 3), COSTS), max_size=60), st.data())
def test_every_request_gets_its_turn_in_the_order_of_its_client(
    requests: list[tuple[int, float]], data: st.DataObject
) -> None:
    share: FairShare[int, int] = FairShare()
    for client in range(4):
        share.join(client)
    waiting = iter(enumerate(requests))
    sent: list[tuple[int, float]] = []
    order: dict[int, list[int]] = {client: [] for client in range(4)}
    for number, (client, cost) in waiting:
        share.put(client, number, cost)
        if data.draw(st.booleans()) and (turn := share.take()) is not None:
            order[turn[0]].append(turn[1])
            sent.append((turn[0], turn[2]))
        elif sent:
            one, estimate = sent.pop(data.draw(st.integers(0, len(sent) - 1)))
            share.finish(one, estimate, data.draw(COSTS))
    while True:
        if (turn := share.take()) is not None:
            order[turn[0]].append(turn[1])
            sent.append((turn[0], turn[2]))
        elif sent:
            share.finish(sent[-1][0], sent.pop()[1], 1.0)
        else:
            break
    assert order == {
        client: [number for number, (of, _) in enumerate(requests) if of == client] for client in range(4)
    }
    assert share.outstanding_us == 0.0


def test_what_the_service_has_at_once_is_bounded_by_time_and_not_by_number() -> None:
    share: FairShare[str, int] = FairShare(window_us=1000.0)
    share.join("short")
    share.join("long")
    for number in range(1000):
        share.put("short", number, 10.0)
    taken = list(iter(share.take, None))
    assert len(taken) == 100
    for _, _, cost in taken:
        share.finish("short", cost, cost)
    share.leave("short")
    share.put("long", 0, 1e6)
    share.put("long", 1, 1e6)
    assert share.take() is not None  # one, whatever it takes
    assert share.take() is None


@pytest.mark.parametrize("idle", [1, 1000])
def test_an_idle_client_saves_up_no_credit(idle: int) -> None:
    share: FairShare[str, int] = FairShare(window_us=1e9)
    share.join("idle")
    share.join("busy")
    for number in range(idle):
        share.put("idle", number, 1.0)
        share.put("busy", number, 400.0)
        for _ in range(2):
            turn = share.take()
            assert turn is not None
            share.finish(turn[0], turn[2], turn[2])
    for number in range(200):
        share.put("idle", number, 400.0)
        share.put("busy", number, 400.0)
    turns = [share.take() for _ in range(100)]
    ahead = itertools.accumulate(1 if turn is not None and turn[0] == "idle" else -1 for turn in turns)
    assert max(map(abs, ahead)) <= 3


def test_a_client_that_leaves_takes_its_requests_and_no_ones_turn() -> None:
    share: FairShare[str, int] = FairShare()
    for name in ("a", "b"):
        share.join(name)
        share.put(name, 1, 100.0)
    assert share.leave("a") == [1]
    turn = share.take()
    assert turn is not None
    assert turn[:2] == ("b", 1)
    share.finish("a", 0.0, 5.0)  # of one that has left: no error


@settings(max_examples=more(100))
@given(st.lists(st.tuples(st.integers(0, 2), COSTS), max_size=40), st.data())
def test_what_passes_through_leaves_the_shares_as_if_it_had_waited(
    requests: list[tuple[int, float]], data: st.DataObject
) -> None:
    shares: list[FairShare[int, int]] = [FairShare(), FairShare()]
    for share, client in itertools.product(shares, range(3)):
        share.join(client)
    given: list[list[tuple[int, int, float]]] = [[], []]
    for number, (client, cost) in enumerate(requests):
        waits, passes = shares
        waits.put(client, number, cost)
        if passes.pass_through(client, cost):
            given[1].append((client, number, cost))
        else:
            passes.put(client, number, cost)
        for share, turns in zip(shares, given, strict=True):
            while (turn := share.take()) is not None:
                turns.append(turn)
        assert given[0] == given[1]
        assert waits.outstanding_us == passes.outstanding_us
        assert waits.waits == passes.waits
        if given[0]:
            place, actual = data.draw(st.integers(0, len(given[0]))), data.draw(COSTS)
            if place == len(given[0]):
                continue
            for share, turns in zip(shares, given, strict=True):
                one, _, estimate = turns.pop(place)
                share.finish(one, estimate, actual)
