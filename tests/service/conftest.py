from __future__ import annotations

from collections.abc import Iterator

import pytest

from cudnn_actor.supervision import supervisor

from ..engines.devices import why_not
from .rigs import SOON_S, isolated


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """The device of a service: each that there is here."""
    name: str = request.param
    if (why := why_not("cpu" if name == "cpu" else "cuda")) is not None:
        pytest.skip(why)
    return name


@pytest.fixture(params=["thread", "process"])
def isolation(request: pytest.FixtureRequest) -> Iterator[str]:
    """Where the services of `rigs` have their actor: the same is promised in both.

    Modules whose tests hold in both use it by `pytestmark`; `rigs.THREAD_ONLY` stands where one does not.
    """
    with isolated(request.param):
        yield request.param


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that hangs is given up soon. Not for processes: the end of one may take longer."""
    monkeypatch.setattr(supervisor, "KILL_GRACE_S", SOON_S)
