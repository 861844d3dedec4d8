from __future__ import annotations

import pytest

from cudnn_actor.processes.launching import Launcher

from ..isolation.crash_rigs import start_forkserver


@pytest.fixture(autouse=True, scope="session")
def forkservers_are_ready() -> None:
    """Start both forkservers before the first test: for scripted workers, and for all others."""
    Launcher.of_process(("cudnn_actor.isolation.process.child.main", "cudnn_actor.engines.cpu.engine")).warm()
    start_forkserver()
