"""A service says which cuDNN it has loaded."""

from __future__ import annotations

import pytest

from cudnn_actor import CudnnService
from cudnn_actor.engines import EngineChoice, WorkerEngine
from cudnn_actor.engines.cpu import CpuEngine
from cudnn_actor.options import make_options
from cudnn_actor.service import Spawning

from .rigs import isolation_option

pytestmark = pytest.mark.usefixtures("isolation")


class LoadedEngine(CpuEngine):
    """A CPU engine that says it has loaded a version of cuDNN."""

    cudnn_version = "9.99.1"


def spawned_on(engine: type[CpuEngine]) -> Spawning:
    worker = WorkerEngine(f"{engine.__module__}:{engine.__name__}")
    choice = EngineChoice("cpu", engine, CpuEngine.outlives_context, host_arenas=True, worker=worker)
    return Spawning(CudnnService(make_options({"device": "cpu", **isolation_option()}), engine=choice))


@pytest.mark.parametrize(("engine", "version"), [(LoadedEngine, "9.99.1"), (CpuEngine, None)])
async def test_statistics_have_the_version_of_the_engine_s_cudnn(
    engine: type[CpuEngine], version: str | None
) -> None:
    async with spawned_on(engine) as gpu:
        assert (await gpu.statistics()).cudnn_version == version
