"""A pool on a Ray cluster of two nodes, which is made once, in a process of its own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .outcomes import check, outcomes_of
from .scenarios import SCENARIOS


@pytest.fixture
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return outcomes_of(tmp_path_factory)


@pytest.mark.parametrize("name", SCENARIOS)
def test_on_a_cluster(name: str, outcomes: Path) -> None:
    check(name, outcomes)


def test_no_process_of_the_cluster_is_left(outcomes: Path) -> None:
    assert json.loads((outcomes / "left").read_text()) == {}
