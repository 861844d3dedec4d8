"""Many tiny cases as one test: reports, fixtures and looks for leaks take longer than such a case."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import pytest

from .whole import PRODUCTS, WHOLE, covering, together_for

__all__ = ["FAILURES", "cases_in_one_test", "ends_all", "in_one_test"]

Test = Callable[..., None]
_PARAM: Final = type(pytest.param())
_LONGEST: Final = 200
"""Characters of a value in the name of a case."""
FAILURES: Final = (Exception, pytest.fail.Exception, pytest.skip.Exception, pytest.xfail.Exception)
"""What pytest raises for an outcome is no `Exception`: `pytest.raises` does where nothing is raised."""


class _Case(NamedTuple):
    """The values of a case by the names of their parameters, and functions that return the parts of its name.

    `labels` are called only if the case has failed: to name all cases would take longer than to run them.
    """

    values: Mapping[str, Any]
    labels: tuple[Callable[[], object], ...]

    def name(self) -> str:
        """The name of the case, for a failure."""
        return ", ".join(str(label()) for label in self.labels)


def in_one_test(
    names: str, cases: Iterable[Any], ids: Callable[[Any], object] = repr
) -> Callable[[Test], Test]:
    """Run a test with each of the cases, as `pytest.mark.parametrize` does, but as one test.

    All cases are run. A failure names each that failed, with its error. A case that skips itself, or that
    expects to fail, counts as failed, because pytest would report that of the whole test. The cases share the
    test's fixtures. If a fixture has a method `begin_case`, that is called before each case.

    Parameters
    ----------
    names
        Of the parameters that a case gives, with commas between them. With one name, a case is a value.
    cases
        The values: for several names, a tuple of them.
    ids
        What a failure calls a value.
    """
    wanted = [name.strip() for name in names.split(",")]
    rows: list[Sequence[Any]] = [(case,) if len(wanted) == 1 else tuple(case) for case in cases]
    if not rows:
        raise ValueError(f"no case of {names}")
    every_case = [
        _Case(dict(zip(wanted, row, strict=True)), tuple(functools.partial(ids, value) for value in row))
        for row in rows
    ]

    def decorate(test: Test) -> Test:
        signature = _signature_without(wanted, test)

        @functools.wraps(test)
        def every(**fixtures: Any) -> None:
            _run(test, every_case, fixtures)

        every.__signature__ = signature  # type: ignore[attr-defined]
        return every

    return decorate


def cases_in_one_test(test: Test) -> Test:
    """Run all cases of the `pytest.mark.parametrize` below this decorator as one test, as `in_one_test` does.

    With a marker of `tests.whole.PRODUCTS`, too, `make test` runs the part of them that `tests.whole` says.
    The test of a GPU runs all of them.
    """
    marks: list[pytest.Mark] = list(getattr(test, "pytestmark", ()))
    columns = [list(_cases_of(mark)) for mark in marks if mark.name == "parametrize"]
    every_case = [
        _Case(
            {name: value for part in parts for name, value in part.values.items()},
            tuple(label for part in parts for label in part.labels),
        )
        for parts in itertools.product(*columns)  # as pytest: those of the highest mark change first
    ]
    products = [mark for mark in marks if mark.name in PRODUCTS]
    signature = _signature_without([*every_case[0].values], test)
    request = inspect.Parameter("request", inspect.Parameter.KEYWORD_ONLY)

    @functools.wraps(test)
    def every(request: pytest.FixtureRequest, **fixtures: Any) -> None:
        cases = every_case
        if products and not WHOLE and not request.node.get_closest_marker("gpu"):
            together = together_for(request.node, products[0])
            rows = [tuple(case.values.values()) for case in every_case]
            cases = [every_case[place] for place in covering(rows, together=together)]
        _run(test, cases, fixtures)

    every.pytestmark = [  # type: ignore[attr-defined]
        mark for mark in marks if mark.name not in ("parametrize", *PRODUCTS)
    ]
    every.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*signature.parameters.values(), request]
    )
    return every


def _cases_of(mark: pytest.Mark) -> Iterator[_Case]:
    """The cases that a `pytest.mark.parametrize` names."""
    names, rows = mark.args[0], [*mark.args[1]]
    wanted = [name.strip() for name in names.split(",")] if isinstance(names, str) else [*names]
    if mark.kwargs.get("indirect"):
        raise TypeError(f"{names} is a fixture's")
    ids = mark.kwargs.get("ids")
    texts = [None] * len(rows) if ids is None or callable(ids) else [*ids]
    for row, text in zip(rows, texts, strict=True):
        case = row if isinstance(row, _PARAM) else pytest.param(*(row if len(wanted) > 1 else [row]))
        if case.marks:
            raise TypeError(f"a case of {names} has a mark, which would be of all cases")
        known = case.id or text
        labels = [functools.partial(ids if callable(ids) else _repr, each) for each in case.values]
        if known:
            labels = [functools.partial(str, known)]
        yield _Case(dict(zip(wanted, case.values, strict=True)), tuple(labels))


def ends_all(error: BaseException) -> bool:
    """Whether pytest-timeout says so.

    It interrupts a test once: another case that hangs would do so for ever.
    """
    return "from pytest-timeout" in str(error)


def _repr(value: object) -> str:
    try:
        return repr(value)[:_LONGEST]
    except ValueError:  # an int of more digits than Python writes
        return f"<{type(value).__name__}>"


def _signature_without(names: Sequence[str], test: Test) -> inspect.Signature:
    """What pytest is to give the test that runs the cases: the fixtures."""
    signature = inspect.signature(test)
    if inspect.iscoroutinefunction(test) or inspect.isgeneratorfunction(test):
        raise TypeError(f"{test.__name__} would run nothing when it is called")
    if missing := {*names} - {*signature.parameters}:
        raise TypeError(f"{test.__name__} does not take {', '.join(sorted(missing))}")
    kept = [each for name, each in signature.parameters.items() if name not in names]
    return signature.replace(parameters=kept)


def _run(test: Test, cases: Sequence[_Case], fixtures: Mapping[str, Any]) -> None:
    """Run every case, and raise a group of what the failed ones raised."""
    failures: list[BaseException] = []
    failed: list[str] = []
    beginnings = [each.begin_case for each in fixtures.values() if hasattr(each, "begin_case")]
    for case in cases:
        try:
            for begin_case in beginnings:
                begin_case()
            test(**fixtures, **case.values)
        except FAILURES as error:
            failed.append(case.name())
            error.add_note(f"in the case: {failed[-1]}")
            failures.append(error)
            if ends_all(error):
                break
    if failures:
        raise BaseExceptionGroup(f"{len(failed)} of {len(cases)} cases failed: {'; '.join(failed)}", failures)
