"""Cases that are run as one test: all of them are run, and a failure names those that failed."""

from __future__ import annotations

import inspect

import pytest

from .in_one_test import in_one_test


def test_each_case_is_run_with_the_fixtures() -> None:
    seen = []

    @in_one_test("a, b", [(1, "x"), (2, "y")])
    def every(fixture: str, a: int, b: str) -> None:
        seen.append((fixture, a, b))

    every(fixture="f")
    assert seen == [("f", 1, "x"), ("f", 2, "y")]
    assert [*inspect.signature(every).parameters] == ["fixture"]


def test_a_failure_names_each_case_that_failed_and_the_others_are_run() -> None:
    seen = []

    @in_one_test("n", range(4), ids=lambda n: f"number {n}")
    def every(n: int) -> None:
        seen.append(n)
        assert n % 2 == 0

    with pytest.raises(ExceptionGroup, match="2 of 4 cases failed: number 1; number 3") as raised:
        every()
    assert seen == [0, 1, 2, 3]
    assert [error.__notes__ for error in raised.value.exceptions] == [
        ["in the case: number 1"],
        ["in the case: number 3"],
    ]


def test_without_a_case_there_is_no_test() -> None:
    with pytest.raises(ValueError, match="no case of n"):
        in_one_test("n", [])


def test_a_case_in_which_nothing_is_raised_or_that_skips_itself_is_named_and_the_others_are_run() -> None:
    seen = []

    @in_one_test("how", ["raises", "skips", "fails as expected", "passes"])
    def every(how: str) -> None:
        seen.append(how)
        if how == "raises":
            with pytest.raises(ValueError):
                pass
        elif how == "skips":
            pytest.skip("it need not be run")
        elif how == "fails as expected":
            pytest.xfail("it is known")

    with pytest.raises(BaseExceptionGroup, match="3 of 4 cases failed: 'raises'; 'skips'; 'fails") as raised:
        every()
    assert seen == ["raises", "skips", "fails as expected", "passes"]
    assert raised.value.exceptions[0].__notes__ == ["in the case: 'raises'"]


def test_after_a_case_that_takes_too_long_none_is_run() -> None:
    """The plugin would not interrupt the next one."""
    seen = []

    @in_one_test("n", range(3))
    def every(n: int) -> None:
        seen.append(n)
        pytest.fail("Timeout (>1200.0s) from pytest-timeout.")

    with pytest.raises(BaseExceptionGroup, match="1 of 3 cases failed: 0"):
        every()
    assert seen == [0]


def test_what_would_run_nothing_or_lacks_a_parameter_is_refused() -> None:
    async def coroutine(n: int) -> None:
        raise AssertionError(n)

    def other(m: int) -> None:
        raise AssertionError(m)

    with pytest.raises(TypeError, match="coroutine would run nothing"):
        in_one_test("n", [1])(coroutine)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="other does not take n"):
        in_one_test("n", [1])(other)
