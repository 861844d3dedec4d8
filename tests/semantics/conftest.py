from __future__ import annotations

import pytest

from cudnn_actor.processes.launching import Launcher

from ..workers.crash_rigs import start_forkserver


@pytest.fixture(autouse=True, scope="session")
def forkservers_are_ready() -> None:
    """That of the workers that stop where a test says, and that of all others."""
    Launcher.shared(("cudnn_actor.workers.process.main", "cudnn_actor.engines.cpu")).warm()
    start_forkserver()
