"""What several tests of kernels share."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest


@pytest.fixture
def small_buffers() -> Iterator[None]:
    """NumPy converts types in buffers of 1024 elements in a run, of whatever tensor: here they have 16."""
    before = np.setbufsize(16)
    yield
    np.setbufsize(before)
