from __future__ import annotations

import pytest

from .crash_rigs import start_forkserver


@pytest.fixture(scope="module")
def a_forkserver() -> None:
    """The forkserver of `crash_rigs`, ready before a test compares processes and descriptors."""
    start_forkserver()
