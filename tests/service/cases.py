"""Many cases on one service, in one test: a service of its own takes longer than such a case."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Final

import pytest

__all__ = ["all_cases"]

_FAILURES: Final = (Exception, pytest.fail.Exception)
"""The second is what `pytest.raises` raises where nothing is raised."""
Case = Callable[[object], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def all_cases() -> Iterator[Case]:
    """Give what a case runs in: `with case(name): ...`. All run, and those that fail are named at the end."""
    failures: list[BaseException] = []

    @contextlib.contextmanager
    def case(name: object) -> Iterator[None]:
        try:
            yield
        except _FAILURES as error:
            error.add_note(f"in the case: {name}")
            failures.append(error)

    yield case
    if failures:
        raise BaseExceptionGroup(f"{len(failures)} cases failed", failures)
