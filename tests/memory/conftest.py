from __future__ import annotations

from collections.abc import Iterator

import pytest

from .memory_fixtures import Grown


@pytest.fixture
def grown() -> Iterator[Grown]:
    """A table of 2 MiB arenas without a limit; closing it must close every descriptor."""
    service = Grown()
    yield service
    service.table.close()
    assert service.descriptors.open_count() == 0
