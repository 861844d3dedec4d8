from __future__ import annotations

from collections.abc import Iterator

import pytest
from structlog.typing import EventDict

from cudnn_actor.workers.launching import Launcher

from ..log_lines import capture_logs
from ..workers.crash_rigs import start_forkserver


@pytest.fixture(autouse=True)
def logs() -> Iterator[list[EventDict]]:
    """What was logged."""
    with capture_logs() as entries:
        yield entries
    entries.clear()  # the errors in them have frames, and the frames arrays


@pytest.fixture(autouse=True, scope="session")
def forkservers_are_ready() -> None:
    """That of the workers that stop where a test says, and that of all others."""
    Launcher.shared(("cudnn_actor.workers.process.main", "cudnn_actor.engines.cpu")).warm()
    start_forkserver()
