from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import pytest

from cudnn_actor.engines.base import Engine
from cudnn_actor.engines.cuda.checking import evaluated_reference, self_check_memory

from ..left_out import left_out
from . import host_cuda
from .devices import ENGINES, EXACT, SESSIONS, EngineFactory, factory, why_not
from .workbench import Workbench, workbench


def open_descriptors() -> int:
    """How many there are, not counting mappings that only garbage holds: tracebacks of expected errors do."""
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what this machine has no engine for: in one place, so that the report has one line for it."""
    if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
        why = why_not(str(item.callspec.params.get("new_engine", "cpu")))
        if why is not None:
            pytest.skip(why)


@pytest.fixture(scope="session", autouse=True)
def kernels_have_a_place(tmp_path_factory: pytest.TempPathFactory) -> None:
    """For those that are compiled for the host."""
    host_cuda.PATHS[:] = [tmp_path_factory]
    host_cuda.forget_unused()


@pytest.fixture
def on_the_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels are compiled for the host, those of self-checks, too, which are forgotten afterwards."""
    host_cuda.stand_in(monkeypatch)
    yield
    for function in (
        self_check_memory.kernel_named,
        self_check_memory.kernels_module,
        evaluated_reference.product_kernel,
    ):
        function.cache_clear()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run the contract on each engine. What computes nothing is the same code in all of the CPU's engines.

    With sessions only what mainly computes has plans of its own. Cases for a GPU are made if `-m` may want
    them: there are thousands.
    """
    if "new_engine" not in metafunc.fixturenames:
        return
    subject = metafunc.module.__name__.rpartition("_")[2]
    without = set()
    if subject not in ("forward", "epilogue", "gradients"):
        without.add(SESSIONS)
    if subject in ("memory", "shared"):
        without.add(EXACT)
    if left_out("gpu", metafunc.config.option.markexpr):
        without.add("cuda")
    names = [name for name in ENGINES if name not in without]
    params = [pytest.param(name, marks=[pytest.mark.gpu] if name == "cuda" else []) for name in names]
    metafunc.parametrize("new_engine", params, indirect=True, scope="session")


@pytest.fixture(scope="session")
def new_engine(request: pytest.FixtureRequest) -> EngineFactory:
    """Makes engines that are not open yet: each that this machine can run passes the whole contract."""
    return factory(request.param)


@pytest.fixture(scope="session", autouse=True)
def gpu_is_looked_for() -> None:
    """Before descriptors are counted: the driver opens some, and keeps them."""
    for name in ENGINES:
        why_not(name)


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
