from __future__ import annotations

from collections.abc import Iterator

import pytest
from structlog.typing import EventDict

from ..log_lines import capture_logs
from .rigs import isolated


@pytest.fixture(autouse=True)
def logs() -> Iterator[list[EventDict]]:
    """What was logged, with the context variables of the thread that logged it."""
    with capture_logs() as entries:
        yield entries
    entries.clear()  # the errors in them have frames, and the frames arrays


@pytest.fixture(params=["thread", "process"])
def isolation(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where the services of `rigs` have their actor: the same is promised in both.

    Modules whose tests hold in both use it by `pytestmark`; `rigs.THREAD_ONLY` stands where one does not.
    """
    with isolated(request.param):
        yield request.param
