"""`cudnn-actor chaos` on the engine that works as a GPU does.

python -m tests.isolation.device_chaos --seconds 60 --standby 1 --faults kill,memory,poison --kill-every 0.12
"""

from __future__ import annotations

import sys
from typing import Any

from cudnn_actor import CudnnService
from cudnn_actor.cli import main
from cudnn_actor.engines import EngineChoice, WorkerEngine
from cudnn_actor.engines.cpu import CpuEngine
from cudnn_actor.options import make_options
from cudnn_actor.service import Spawning
from cudnn_actor.trials.chaos import one_run

ENGINES = "tests.isolation.device_engine"


def spawn(**options: Any) -> Spawning:
    """A service whose workers have it."""
    worker = WorkerEngine(f"{ENGINES}:DeviceEngine")
    choice = EngineChoice("cpu", CpuEngine, True, worker=worker, preload=(ENGINES,), host_arenas=False)
    return Spawning(CudnnService(make_options(options), engine=choice))


if __name__ == "__main__":
    one_run.spawn = spawn  # type: ignore[attr-defined]
    sys.exit(main(["chaos", *sys.argv[1:]]))
