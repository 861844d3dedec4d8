from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

import pytest

from cudnn_actor.serving import fronts

from ..forked_programs import Program
from ..whole import WHOLE


@pytest.fixture
def forked_fronts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Serving processes of this process are forked, which costs no interpreter's imports.

    In `make test-all` they are started as users' are. So they always are where the owner is a program of its
    own, as in `test_life` and `test_end`.
    """
    if not WHOLE:
        monkeypatch.setattr(fronts, "start_module", _fork_module)


def _fork_module(
    module: str, *arguments: str, descriptors: Sequence[int], executable: None
) -> tuple[Program, int]:
    """Do what `interpreter.start_module` does, by a fork."""
    program = Program(
        ["-c", f"from {module} import main; main()", *arguments],
        stdin=subprocess.DEVNULL,
        pass_fds=descriptors,
        start_new_session=True,
    )
    return program, os.pidfd_open(program.pid)
