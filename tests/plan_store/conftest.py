from __future__ import annotations

from pathlib import Path

import pytest

from cudnn_actor.plan_store.store import PlanStore


@pytest.fixture
def store(tmp_path: Path) -> PlanStore:
    """A store in a directory that is not there yet."""
    return PlanStore(tmp_path / "plans")
