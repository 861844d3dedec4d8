"""Cases that are run as one test: all of them are run, and a failure names those that failed."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import pytest

from .in_one_test import cases_in_one_test, in_one_test
from .whole import WHOLE


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


class Bench:
    """A fixture that is told when a case begins."""

    def __init__(self) -> None:
        self.begun = 0

    def begin_case(self) -> None:
        self.begun += 1


@cases_in_one_test
@pytest.mark.parametrize("a", [1, 2])
@pytest.mark.parametrize(("b", "c"), [pytest.param("x", "y", id="letters"), (True, None)], ids=["", "others"])
def every_of_a_product(bench: Bench, a: int, b: object, c: object) -> None:
    assert a == bench.begun


def test_a_test_s_parameters_are_cases_and_a_fixture_is_told_of_each(request: pytest.FixtureRequest) -> None:
    bench = Bench()
    with pytest.raises(BaseExceptionGroup, match="2 of 4 cases failed: others, 1; others, 2"):
        every_of_a_product(bench=bench, request=request)
    assert bench.begun == 4
    assert [*inspect.signature(every_of_a_product).parameters] == ["bench", "request"]
    assert not getattr(every_of_a_product, "pytestmark", [])


SEEN: list[tuple[int, int, int]] = []


@cases_in_one_test
@pytest.mark.pairwise
@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b", range(3))
@pytest.mark.parametrize("c", range(3))
def run_pairs(a: int, b: int, c: int) -> None:
    SEEN.append((a, b, c))


def test_of_a_product_with_the_marker_a_part_is_run(request: pytest.FixtureRequest) -> None:
    SEEN.clear()
    run_pairs(request=request)
    assert len(SEEN) == (27 if WHOLE else 10)
    pairs = {pair for row in SEEN for pair in itertools.combinations(enumerate(row), 2)}
    assert len(pairs) == 27


@pytest.mark.parametrize("new_engine", ["exact"])
def test_of_the_engine_that_evaluates_definitions_each_value_is_run(
    request: pytest.FixtureRequest, new_engine: str
) -> None:
    SEEN.clear()
    run_pairs(request=request)
    assert len(SEEN) == (27 if WHOLE else 3)
    assert all({*column} == {0, 1, 2} for column in zip(*SEEN, strict=True))


def test_a_case_with_a_mark_or_that_a_fixture_is_to_be_given_is_refused() -> None:
    def test(a: int) -> None:
        raise AssertionError(a)

    marked: Any = pytest.mark.parametrize("a", [pytest.param(1, marks=pytest.mark.gpu)])(test)
    with pytest.raises(TypeError, match="would be of all cases"):
        cases_in_one_test(marked)

    def other(a: int) -> None:
        raise AssertionError(a)

    indirect: Any = pytest.mark.parametrize("a", [1], indirect=True)(other)
    with pytest.raises(TypeError, match="is a fixture's"):
        cases_in_one_test(indirect)
