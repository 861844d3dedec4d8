from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from cudnn_actor.engines.base import Engine
from cudnn_actor.engines.cpu import CpuEngine

from .workbench import Workbench, workbench

EngineFactory = Callable[[], Engine]


def engines_here() -> dict[str, EngineFactory]:
    """Every engine that this machine can run, by name: each passes the whole contract."""
    return {"cpu": CpuEngine}


@pytest.fixture(scope="session", params=list(engines_here()))
def new_engine(request: pytest.FixtureRequest) -> EngineFactory:
    """Makes engines that are not open yet."""
    return engines_here()[request.param]


@pytest.fixture(scope="module")
def engine(new_engine: EngineFactory) -> Iterator[Engine]:
    """An open engine, shared by a module's tests: closing it must give back every descriptor."""
    before = len(os.listdir("/proc/self/fd"))
    engine = new_engine()
    engine.open()
    yield engine
    engine.close()
    if engine.device == "cpu":  # a CUDA context keeps descriptors of its own for the rest of the process
        assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture
def bench(engine: Engine) -> Iterator[Workbench]:
    """A fresh arena of the shared engine."""
    with workbench(engine) as bench:
        yield bench
