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


def test_a_case_that_skips_itself_is_named_and_hides_no_failure() -> None:
    def run_three() -> None:
        with all_cases() as case:
            for end in (pytest.fail, pytest.skip, pytest.xfail):
                with case(end):
                    end("of this case")

    with pytest.raises(BaseExceptionGroup, match="3 cases failed"):
        run_three()


def test_behind_a_case_that_takes_too_long_none_runs() -> None:
    """The plugin would not interrupt the next one."""
    run = []

    def run_two() -> None:
        with all_cases() as case:
            for number in range(2):
                with case(number):
                    run.append(number)
                    pytest.fail("Timeout (>1200.0s) from pytest-timeout.")

    with pytest.raises(pytest.fail.Exception, match="Timeout"):
        run_two()
    assert run == [0]


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
