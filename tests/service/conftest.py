from __future__ import annotations

from collections.abc import Iterator

import pytest

from .rigs import isolated


@pytest.fixture(params=["thread", "process"])
def isolation(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where the services of `rigs` have their actor: the same is promised in both.

    Modules whose tests hold in both use it by `pytestmark`; `rigs.THREAD_ONLY` stands where one does not.
    """
    with isolated(request.param):
        yield request.param
