from __future__ import annotations

from collections.abc import Iterator

import pytest

from .crash_rigs import start_forkserver
from .simulated import Office


@pytest.fixture(scope="module")
def a_forkserver() -> None:
    """The forkserver of `crash_rigs`, ready before a test compares processes and descriptors."""
    start_forkserver()


@pytest.fixture(params=[True, False], ids=["host arenas", "device arenas"])
def office(request: pytest.FixtureRequest) -> Iterator[Office]:
    """A parent process's side of a worker, with a simulated one that has started."""
    office = Office(host=request.param)
    office.attach()
    yield office
    office.close()
