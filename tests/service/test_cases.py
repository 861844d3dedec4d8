"""Cases of one test all run, and each that fails is named."""

from __future__ import annotations

import pytest

from .cases import all_cases


def test_cases_behind_one_that_fails_run_and_each_failure_names_its_case() -> None:
    run = []

    def run_four() -> None:
        with all_cases() as case:
            for number in range(4):
                with case(number):
                    run.append(number)
                    assert number != 1
                    if number == 2:
                        pytest.fail("as `pytest.raises` does")

    with pytest.raises(BaseExceptionGroup, match="2 cases failed") as caught:
        run_four()
    assert run == [0, 1, 2, 3]
    assert [error.__notes__ for error in caught.value.exceptions] == [["in the case: 1"], ["in the case: 2"]]


def test_cases_that_all_hold_raise_nothing() -> None:
    with all_cases() as case, case("this"):
        pass


def test_an_error_outside_of_the_cases_is_raised_as_it_is() -> None:
    def fail() -> None:
        with all_cases() as case, case("this"):
            pass
        raise KeyError

    with pytest.raises(KeyError):
        fail()
