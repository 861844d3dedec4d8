"""The record of what a worker has, and of what the next one is given first."""

from __future__ import annotations

import pytest

from cudnn_actor.actors import Envelope
from cudnn_actor.isolation.process.parent.in_flight import InFlightTable, Violation, WorkerRequest
from cudnn_actor.protocol import Ping


class Page:
    """Claims of a worker that begins nothing."""

    def withdraw(self, place: int, number: int) -> bool:
        return True

    def has_begun(self, place: int, number: int) -> bool:
        return False

    def finished_record(self, place: int, number: int) -> None:
        return None


def request(number: int, *, suspect: bool = False) -> WorkerRequest:
    envelope = Envelope(Ping())
    envelope.number = number
    made = WorkerRequest(envelope, envelope.number, envelope.message)
    made.suspect = made.alone = suspect
    return made


def air(table: InFlightTable, *numbers: int) -> list[WorkerRequest]:
    requests = [request(number) for number in numbers]
    for one in requests:
        table.hand_over(one, Page())
    return requests


def test_a_flight_has_a_place_until_it_lands() -> None:
    table = InFlightTable(2)
    one, two = air(table, 1, 2)
    assert table.room == 0
    assert one.place != two.place
    table.complete(table.find(1, one.place))
    assert table.room == 1


@pytest.mark.parametrize(("number", "place"), [(9, 0), (1, 7)])
def test_an_answer_to_what_is_not_in_the_air_is_a_violation(number: int, place: int) -> None:
    table = InFlightTable(2)
    air(table, 1)
    with pytest.raises(Violation):
        table.find(number, place)


def test_what_goes_first_goes_before_all_that_is_new() -> None:
    table = InFlightTable(4)
    air(table, 1, 2)
    table.first(table.take_back())
    assert table.room == 0
    assert [again.number for again in iter(table.next_again, None)] == [1, 2]
    assert table.room == 4


def test_a_suspect_flies_alone() -> None:
    table = InFlightTable(4)
    table.first([request(1, suspect=True), request(2, suspect=True), request(3)])
    one = table.next_again()
    assert one is not None
    place = table.hand_over(one, Page())
    assert table.next_again() is None
    assert table.room == 0
    table.complete(table.find(1, place))
    two = table.next_again()
    assert two is not None
    assert two.number == 2


def test_a_suspect_waits_until_the_air_is_empty() -> None:
    table = InFlightTable(4)
    (other,) = air(table, 5)
    table.first([request(1, suspect=True)])
    assert table.next_again() is None
    table.complete(other)
    assert table.next_again() is not None


def test_a_crash_on_top_of_a_crash_keeps_the_order() -> None:
    table = InFlightTable(4)
    air(table, 1, 2, 3)
    table.first(table.take_back())
    again = table.next_again()
    assert again is not None
    table.hand_over(again, Page())
    table.first(table.take_back())
    assert [request.number for request in table.give_up()] == [1, 2, 3]


def test_older_ones_are_waited_for_in_flight_and_to_be_handed_again() -> None:
    table = InFlightTable(4)
    air(table, 3)
    assert (table.waits_for(4), table.waits_for(3)) == (True, False)
    table.first(table.take_back())
    assert (table.waits_for(4), table.waits_for(3)) == (True, False)


def test_a_suspect_cannot_be_withdrawn() -> None:
    table = InFlightTable(4)
    (fresh,) = air(table, 1)
    assert fresh.withdraw()
    table.complete(fresh)
    suspect = request(2, suspect=True)
    table.hand_over(suspect, Page())
    assert not suspect.withdraw()
