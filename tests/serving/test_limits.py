"""Bounds that hold for several processes, and errors that go from one to another. None is started here."""

from __future__ import annotations

import os
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudnn_actor.errors import InvalidRequest, MailboxFull
from cudnn_actor.models import InvalidModel
from cudnn_actor.protocol.errors import CudnnActorError
from cudnn_actor.serving.failures import Busy, NotOffered, NotServed, Refused, TooLarge
from cudnn_actor.serving.front_wire import ErrorOnWire
from cudnn_actor.serving.limits import SharedLimits, shared_table

ROWS, MOST, MOST_BYTES = 3, 4, 100


@pytest.fixture
def descriptor() -> Iterator[int]:
    made = os.memfd_create("limits")
    yield made
    os.close(made)


def test_processes_see_each_others_rows(descriptor: int) -> None:
    one, other = (SharedLimits(1, 10, shared_table(descriptor, 2), row) for row in range(2))
    assert one.begin()
    assert not other.begin()
    assert one.take(7)
    assert not one.take(4)
    one.end(7)
    assert other.begin()
    assert other.take(10)
    assert (one.bytes, other.bytes) == (0, 10)


class Begun:
    def __init__(self, limits: SharedLimits) -> None:
        self.limits, self.nbytes = limits, 0


@given(st.lists(st.tuples(st.integers(0, ROWS - 1), st.integers(-1, MOST_BYTES)), max_size=40))
def test_no_more_is_under_way_than_the_bounds_and_all_is_given_back(steps: list[tuple[int, int]]) -> None:
    """A step of a row: -1 ends its oldest inference, 0 begins one, more takes so many bytes for the last."""
    table = np.zeros((ROWS, 2), np.int64)
    limits = [SharedLimits(MOST, MOST_BYTES, table, row) for row in range(ROWS)]
    begun: list[list[Begun]] = [[] for _ in limits]
    for row, step in steps:
        mine = begun[row]
        running, nbytes = sum(map(len, begun)), sum(each.nbytes for of in begun for each in of)
        if step == 0:
            assert limits[row].begin() == (running < MOST)
            mine += [Begun(limits[row])] if running < MOST else []
        elif step > 0 and mine:
            fits = nbytes + step <= MOST_BYTES
            assert limits[row].take(step) == fits
            mine[-1].nbytes += step * fits
        elif step < 0 and mine:
            ended = mine.pop(0)
            ended.limits.end(ended.nbytes)
        assert table[:, 0].sum() == sum(map(len, begun))
        assert table[:, 1].sum() == sum(each.nbytes for of in begun for each in of)


@pytest.mark.parametrize(
    "error",
    [
        Refused(problem="it is wrong", fix="mend it"),
        TooLarge(problem="it is large", fix="send less"),
        NotServed(model="m", version="1", problem="is being loaded", passing=True),
        NotOffered(what="that"),
        Busy(most=7),
        MailboxFull(capacity=3),
        InvalidModel(where="node 3", problem="is wrong"),
        InvalidRequest(field="x", value=3, problem="is wrong", fix="mend it"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_arrives_as_it_was_sent(error: CudnnActorError) -> None:
    found = ErrorOnWire.of(error).to_error()
    assert type(found) is type(error)
    assert (str(found), found.to_record()) == (str(error), error.to_record())
    assert found.retry_safe == error.retry_safe


def test_of_an_unknown_error_the_text_arrives() -> None:
    for record in (ErrorOnWire("ListenError", {}, "why"), ErrorOnWire("NotServed", {"other": 1}, "why")):
        assert (type(record.to_error()), str(record.to_error())) == (CudnnActorError, "why")
