"""A process with a builder process, for the test to kill: `python -m tests.engines.remote.family STAGE MODE`.

MODE is what goes on when it is killed: "idle", "building", or "copied": a process that it has forked, whose
id it prints, is there too while a plan is built.
"""

from __future__ import annotations

import os
import signal
import sys

from cudnn_actor.engines.remote import BuilderHost, RemoteBuilder

from ...patience import PATIENCE_S
from .craft import MAKE, Craft, graph


def main(address: str, mode: str) -> None:
    builder = RemoteBuilder(MAKE, (address,), Craft(), BuilderHost())
    builder.open()
    assert builder.wait_ready(PATIENCE_S)
    if mode == "copied":
        copy = os.fork()
        if not copy:
            signal.pause()
        print(copy, flush=True)  # noqa: T201 - the test reads it
    if mode == "idle":
        signal.pause()
    builder.build(graph(), workspace_limit=None)


if __name__ == "__main__":
    main(*sys.argv[1:])
