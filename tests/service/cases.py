"""Many cases on one service, in one test: a service of its own takes longer than such a case."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from ..in_one_test import FAILURES, ends_all

__all__ = ["all_cases"]

Case = Callable[[object], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def all_cases() -> Iterator[Case]:
    """Give what a case runs in: `with case(name): ...`. All run, and those that fail are named at the end.

    As in `tests.in_one_test`, a case that skips itself is one that failed, and behind one that takes too long
    none runs.
    """
    failures: list[BaseException] = []

    @contextlib.contextmanager
    def case(name: object) -> Iterator[None]:
        try:
            yield
        except FAILURES as error:
            error.add_note(f"in the case: {name}")
            failures.append(error)
            if ends_all(error):
                raise

    yield case
    if failures:
        raise BaseExceptionGroup(f"{len(failures)} cases failed", failures)
