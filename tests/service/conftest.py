from __future__ import annotations

from collections.abc import Iterator

import pytest
import structlog
from structlog.testing import capture_logs
from structlog.typing import EventDict


@pytest.fixture(autouse=True)
def logs() -> Iterator[list[EventDict]]:
    """What was logged, with the context variables of the thread that logged it."""
    with capture_logs(processors=[structlog.contextvars.merge_contextvars]) as entries:
        yield entries
    entries.clear()  # the errors in them have frames, and the frames arrays
