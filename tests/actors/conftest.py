from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture
def hasty_switching() -> Iterator[None]:
    """Threads change places after every few instructions, so that races come out."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)
