"""A program that raises at every place in turn where a signal's handler could, in a blocking call.

Run as `python -m tests.blocking.interrupted_program`; writes as JSON, for each kind of call, how often it
raised, and how many buffers were left. After each, a call of another thread must be answered.
"""

from __future__ import annotations

import asyncio
import faulthandler
import inspect
import json
import logging
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

import cudnn_actor
from cudnn_actor import BufferRef, TensorSpec
from cudnn_actor.blocking import BlockingRef, spawn
from cudnn_actor.blocking.methods import nothing
from cudnn_actor.messages import Allocate
from cudnn_actor.operations import MaxPool, Window

from ..inside import portal_of
from ..patience import PATIENCE_S
from ..service.injection_program import Injected, Injector

ONES = np.ones((1, 1, 4, 4), np.float32)
POOL = Window.symmetric(2, size=2)
PLACES = (f"{cudnn_actor.__path__[0]}/blocking/", f"{cudnn_actor.__path__[0]}/actors/pykka_future.py")


def calls(gpu: BlockingRef, x: BufferRef) -> dict[str, Callable[[], Any]]:
    """What is interrupted, by name; each gives a buffer, or a future of one."""
    return {
        "upload": lambda: gpu.upload(ONES),
        "ask": lambda: gpu.ask(Allocate(spec=TensorSpec.packed((3,)))),
        "apply": lambda: gpu.apply(MaxPool(x=x, window=POOL)),
        "submit": lambda: gpu.submit(Allocate(spec=TensorSpec.packed((3,)))),
    }


def waits(gpu: BlockingRef, other: ThreadPoolExecutor) -> int:
    """How often a wait for a future was interrupted. Afterwards it still gets its answer, as others do."""
    injector, raised, clean, at = Injector(inspect.getfile(Future), threading.__file__), 0, 0, 0
    inner: list[asyncio.Future[int]] = []

    def send() -> asyncio.Future[int]:
        inner.append(asyncio.get_running_loop().create_future())
        return inner[-1]

    async def answer() -> None:
        inner[-1].set_result(5)

    while clean < 3:
        at += 1
        future = portal_of(gpu).submit(send, nothing)
        try:
            with injector.armed(at):
                future.result(0.01)
        except TimeoutError:
            clean += 1
        except (Injected, RuntimeError):  # the second: of a lock that `Condition.wait` has released
            raised += 1
        other.submit(portal_of(gpu).call, answer).result(PATIENCE_S)
        assert future.result(PATIENCE_S) == 5
    return raised


def buffers(gpu: BlockingRef) -> int:
    """How many there are once all earlier requests have ended."""
    gpu.drain()
    return gpu.statistics().live_buffers


def main() -> dict[str, Any]:
    logging.getLogger("asyncio").setLevel(logging.CRITICAL + 1)
    told: dict[str, Any] = {}
    with spawn(device="cpu") as gpu, ThreadPoolExecutor(1) as other:
        x = gpu.upload(ONES)
        for name, call in calls(gpu, x).items():
            injector, raised, clean, at = Injector(*PLACES), 0, 0, 0
            while clean < 3:
                at += 1
                try:
                    with injector.armed(at):
                        given = call()
                except Injected:
                    raised += 1
                else:
                    clean += 1
                    gpu.free(given.result(PATIENCE_S) if isinstance(given, Future) else given)
                other.submit(gpu.ping).result(PATIENCE_S)
            deadline = time.monotonic() + PATIENCE_S
            while (left := buffers(gpu) - 1) and time.monotonic() < deadline:
                continue  # what had started when it was interrupted is freed once it has ended
            told[name] = {"raised": raised, "left": left, "files": sorted(injector.files)}
        told["waits"] = waits(gpu, other)
    return told


if __name__ == "__main__":
    faulthandler.dump_traceback_later(PATIENCE_S, exit=True)
    sys.stdout.write(json.dumps(main()) + "\n")
