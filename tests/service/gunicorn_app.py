"""An application that has a service before gunicorn forks its workers (`--preload`): in the master alone.

The master's load goes on beside its workers, and says on a board, a page that all of them have, how it does.
A worker answers 503 to those who ask for the master's service, and has one of its own for the others.
"""

from __future__ import annotations

import functools
import json
import mmap
import os
import threading
from collections.abc import Callable, Iterable
from typing import Any

from cudnn_actor import BufferRef, CudnnService, ServiceStopped, start
from cudnn_actor.messages import Allocate, Download, Fill
from cudnn_actor.protocol.types.tensor import TensorSpec
from tests.patience import PATIENCE_S
from tests.service.fork_rigs import Load, look_around

ISOLATION: Any = os.environ["TEST_ISOLATION"]
_ROUNDS, _WRONG, _RESTARTS, _WORKER = range(4)

MASTER = os.getpid()
BOARD = memoryview(mmap.mmap(-1, mmap.PAGESIZE)).cast("Q")
SERVICE = start(device="cpu", isolation=ISOLATION)
LOAD = Load(SERVICE)


def _report() -> None:
    """Say on the board how the load does, for as long as the master lives."""
    while True:
        LOAD.goes_on(1)
        BOARD[_WRONG] = len(LOAD.wrong)
        BOARD[_RESTARTS] = SERVICE.state.restarts
        BOARD[_WORKER] = SERVICE.worker_pid or 0
        BOARD[_ROUNDS] += 1  # last: what it stands for is there


threading.Thread(target=_report, name="report", daemon=True).start()


@functools.cache
def own() -> tuple[CudnnService, BufferRef]:
    """The worker's service, started at its first request, and a buffer in it."""
    service = start(device="cpu", isolation=ISOLATION)
    buffer: Any = service.actor_ref.ask(Allocate(spec=TensorSpec.packed((1, 1, 8, 8), "float32")))
    return service, buffer


def application(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
    """Answer with a status and JSON."""
    try:
        status, answer = "200 OK", ANSWERS[environ["PATH_INFO"]]()
    except ServiceStopped as error:
        status, answer = "503 Service Unavailable", {"error": str(error)}
    start_response(status, [("Content-Type", "application/json")])
    return [json.dumps({"pid": os.getpid(), **answer}).encode()]


def board() -> dict[str, int]:
    """What the master has said last."""
    return {
        "master": MASTER,
        "rounds": BOARD[_ROUNDS],
        "wrong": BOARD[_WRONG],
        "restarts": BOARD[_RESTARTS],
        "worker": BOARD[_WORKER],
    }


def ask_parent() -> dict[str, Any]:
    """Spoil the master's buffer, if that is to be had."""
    SERVICE.actor_ref.ask(Fill(dst=LOAD.kept, value=1000.0), timeout=PATIENCE_S)
    return {}


def look() -> dict[str, Any]:
    """Everything that is promised to a child."""
    try:
        look_around(SERVICE, LOAD.kept, rounds=1, alone=False)
    except AssertionError as error:
        return {"complaints": str(error)}
    return {"complaints": ""}


def ask_own() -> dict[str, Any]:
    """Values by the worker's own service."""
    service, buffer = own()
    service.actor_ref.ask(Fill(dst=buffer, value=float(os.getpid())))
    values: Any = service.actor_ref.ask(Download(src=buffer))
    return {"value": float(values.min()), "same": bool((values == values.min()).all())}


ANSWERS: dict[str, Callable[[], dict[str, Any]]] = {
    "/board": board,
    "/parent": ask_parent,
    "/look": look,
    "/own": ask_own,
}
