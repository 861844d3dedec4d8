"""The record of what a worker has, and of what the next one is given first."""

from __future__ import annotations

import pytest

from cudnn_actor.actors import Envelope
from cudnn_actor.protocol import Ping
from cudnn_actor.workers.ledger import Flight, Ledger, Violation


class Page:
    """Claims of a worker that begins nothing."""

    def withdraw(self, place: int, number: int) -> bool:
        return True

    def has_begun(self, place: int, number: int) -> bool:
        return False

    def finished(self, place: int, number: int) -> None:
        return None


def flight(number: int, *, suspect: bool = False) -> Flight:
    envelope = Envelope(Ping())
    envelope.number = number
    made = Flight(envelope, b"")
    made.suspect = suspect
    return made


def air(ledger: Ledger, *numbers: int) -> list[Flight]:
    flights = [flight(number) for number in numbers]
    for one in flights:
        ledger.hand_over(one, Page())
    return flights


def test_a_flight_has_a_place_until_it_lands() -> None:
    ledger = Ledger(2)
    one, two = air(ledger, 1, 2)
    assert ledger.room == 0
    assert one.place != two.place
    ledger.land(ledger.find(1, one.place))
    assert ledger.room == 1


@pytest.mark.parametrize(("number", "place"), [(9, 0), (1, 7)])
def test_an_answer_to_what_is_not_in_the_air_is_a_violation(number: int, place: int) -> None:
    ledger = Ledger(2)
    air(ledger, 1)
    with pytest.raises(Violation):
        ledger.find(number, place)


def test_what_goes_first_goes_before_all_that_is_new() -> None:
    ledger = Ledger(4)
    air(ledger, 1, 2)
    ledger.first(ledger.ground())
    assert ledger.room == 0
    assert [again.number for again in iter(ledger.next_again, None)] == [1, 2]
    assert ledger.room == 4


def test_a_suspect_flies_alone() -> None:
    ledger = Ledger(4)
    ledger.first([flight(1, suspect=True), flight(2, suspect=True), flight(3)])
    one = ledger.next_again()
    assert one is not None
    place = ledger.hand_over(one, Page())
    assert ledger.next_again() is None
    assert ledger.room == 0
    ledger.land(ledger.find(1, place))
    two = ledger.next_again()
    assert two is not None
    assert two.number == 2


def test_a_suspect_waits_until_the_air_is_empty() -> None:
    ledger = Ledger(4)
    (other,) = air(ledger, 5)
    ledger.first([flight(1, suspect=True)])
    assert ledger.next_again() is None
    ledger.land(other)
    assert ledger.next_again() is not None


def test_a_crash_on_top_of_a_crash_keeps_the_order() -> None:
    ledger = Ledger(4)
    air(ledger, 1, 2, 3)
    ledger.first(ledger.ground())
    again = ledger.next_again()
    assert again is not None
    ledger.hand_over(again, Page())
    ledger.first(ledger.ground())
    assert [flight.number for flight in ledger.give_up()] == [1, 2, 3]


def test_older_ones_are_waited_for_in_the_air_and_on_the_ground() -> None:
    ledger = Ledger(4)
    air(ledger, 3)
    assert (ledger.waits_for(4), ledger.waits_for(3)) == (True, False)
    ledger.first(ledger.ground())
    assert (ledger.waits_for(4), ledger.waits_for(3)) == (True, False)


def test_a_suspect_cannot_be_withdrawn() -> None:
    ledger = Ledger(4)
    (fresh,) = air(ledger, 1)
    assert fresh.withdraw()
    ledger.land(fresh)
    suspect = flight(2, suspect=True)
    ledger.hand_over(suspect, Page())
    assert not suspect.withdraw()
