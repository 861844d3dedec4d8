from __future__ import annotations

import gc
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


def open_descriptors() -> int:
    """How many there are, not counting mappings that only garbage holds: tracebacks of expected errors do."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture(scope="session", params=list(engines_here()))
def new_engine(request: pytest.FixtureRequest) -> EngineFactory:
    """Makes engines that are not open yet."""
    return engines_here()[request.param]


@pytest.fixture(scope="module")
def engine(new_engine: EngineFactory, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """An open engine, shared by a module's tests: closing it must give back every descriptor."""
    before, failures = open_descriptors(), request.session.testsfailed
    engine = new_engine()
    engine.open()
    yield engine
    engine.close()
    # A CUDA context keeps descriptors of its own; the traceback of a failure keeps the arrays that it shows.
    if engine.device == "cpu" and request.session.testsfailed == failures:
        assert open_descriptors() == before


@pytest.fixture
def bench(engine: Engine) -> Iterator[Workbench]:
    """A fresh arena of the shared engine."""
    with workbench(engine) as bench:
        yield bench
