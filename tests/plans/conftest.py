from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from structlog.typing import EventDict

from cudnn_actor.plan_store import PlanStore

from ..log_lines import capture_logs


@pytest.fixture
def store(tmp_path: Path) -> PlanStore:
    """A store in a directory that is not there yet."""
    return PlanStore(tmp_path / "plans")


@pytest.fixture
def logs() -> Iterator[list[EventDict]]:
    """What was logged."""
    with capture_logs() as entries:
        yield entries
    entries.clear()  # the errors in them have frames, and the frames arrays
