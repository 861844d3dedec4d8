"""Many cases in one test, where what they share takes longer than a case: a note names the one that fails."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

__all__ = ["noted"]


@contextlib.contextmanager
def noted(case: str) -> Iterator[None]:
    """Whatever is raised within has a note with the name of the case."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"in the case {case!r}")
        raise
