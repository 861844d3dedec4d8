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
