"""Many tiny cases as one test: reports, fixtures and looks for leaks take longer than such a case."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import pytest

__all__ = ["in_one_test"]

Test = Callable[..., None]
_FAILURES: Final = (Exception, pytest.fail.Exception, pytest.skip.Exception, pytest.xfail.Exception)
"""What pytest raises for an outcome is no `Exception`: `pytest.raises` does where nothing is raised."""


def in_one_test(
    names: str, cases: Iterable[Any], ids: Callable[[Any], object] = repr
) -> Callable[[Test], Test]:
    """Run a test with each of the cases, as `pytest.mark.parametrize` does, but as one test.

    All cases are run. A failure names each that failed, with its error. The cases share the test's fixtures.
    A case that skips itself, or expects its failure, is one that failed: the report would say it of all.

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

    def decorate(test: Test) -> Test:
        of_test = inspect.signature(test)
        if inspect.iscoroutinefunction(test) or inspect.isgeneratorfunction(test):
            raise TypeError(f"{test.__name__} would run nothing when it is called")
        if missing := {*wanted} - {*of_test.parameters}:
            raise TypeError(f"{test.__name__} does not take {', '.join(sorted(missing))}")

        @functools.wraps(test)
        def every(**fixtures: Any) -> None:
            failures: list[BaseException] = []
            failed: list[str] = []
            for row in rows:
                try:
                    test(**fixtures, **dict(zip(wanted, row, strict=True)))
                except _FAILURES as error:
                    failed.append(", ".join(str(ids(value)) for value in row))
                    error.add_note(f"in the case: {failed[-1]}")
                    failures.append(error)
                    if "from pytest-timeout" in str(error):
                        break  # it interrupts a test once: another case that hangs would do so for ever
            if failures:
                raise BaseExceptionGroup(
                    f"{len(failed)} of {len(rows)} cases failed: {'; '.join(failed)}", failures
                )

        kept = [each for name, each in of_test.parameters.items() if name not in wanted]
        every.__signature__ = of_test.replace(parameters=kept)  # type: ignore[attr-defined]
        return every

    return decorate
