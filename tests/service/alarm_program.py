"""A program whose main thread is hit by alarms while it sends, and a thread that asks all the while.

Run as `python -m tests.service.alarm_program ISOLATION ENTRY HITS SECONDS`; writes what has come of it as
JSON. An alarm is set for some microseconds ahead, the entry is called, and the handler raises wherever the
main thread happens to be. The entries are those of a plain main thread, and of an event loop on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import json
import logging
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import cudnn_actor
from cudnn_actor import ConvFwd, ConvSpec, CudnnActorError, CudnnRef
from cudnn_actor.messages import Ping

from ..patience import PATIENCE_S

_SHORTEST_S, _LONGEST_S = 1e-4, 1e-2
"""Between these lies the longest time that an alarm is set for."""


_LOST_S = 0.3
"""After this a call is hit again. asyncio loses callbacks when its own code is interrupted, and waits for
them; there is nothing that a library could do about that."""


class Alarm(Exception):
    """What the handler raises."""


class Hits:
    """Alarms, one for each call."""

    def __init__(self) -> None:
        self.count = self.calls = 0
        self.lost = 0
        """Calls that had to be hit twice: asyncio waited for a callback that it had lost to the first hit."""
        self._hit = False
        self._armed = False
        self._longest_s = _SHORTEST_S
        self._chance = random.Random(7)
        signal.signal(signal.SIGALRM, self._raise)

    def _raise(self, *_: object) -> None:
        if self._armed:
            self.count += not self._hit
            self.lost += self._hit
            self._hit = True
            raise Alarm

    def during(self, call: Callable[[], Any]) -> bool:
        """Make a call, with an alarm in the midst of it; whether the call came through.

        About half of them do, so that each part of a call is hit, however fast the machine is.
        """
        self.calls += 1
        try:
            self._hit = False
            self._armed = True
            signal.setitimer(signal.ITIMER_REAL, self._chance.uniform(1e-6, self._longest_s), _LOST_S)
            call()
            self._armed = False
        except RuntimeError:  # asyncio's, of a loop that it believes to be running still
            self._armed = False
            raise
        except Alarm:
            self._armed = False
            self._longest_s = min(self._longest_s * 1.02, _LONGEST_S)
            return False
        self._longest_s = max(self._longest_s / 1.02, _SHORTEST_S)
        return True


class Bystander:
    """Another thread, with a loop of its own, that asks again and again."""

    def __init__(self, gpu: CudnnRef) -> None:
        self.answers = 0
        self.longest_s = 0.0
        self.error = ""
        self._gpu = gpu
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._ask()), daemon=True)
        self._thread.start()

    async def _ask(self) -> None:
        try:
            while not self._over.is_set():
                began = time.monotonic()
                async with asyncio.timeout(PATIENCE_S):
                    await self._gpu.ping()
                self.answers += 1
                self.longest_s = max(self.longest_s, time.monotonic() - began)
                await asyncio.sleep(0.001)
        except Exception as error:  # noqa: BLE001 - reported
            self.error = repr(error)

    def stop(self) -> None:
        self._over.set()
        self._thread.join(PATIENCE_S)
        if self._thread.is_alive():
            faulthandler.dump_traceback(all_threads=True)
            raise AssertionError("the bystander hangs")


class Loop:
    """The main thread's loop, which is made anew when an alarm has broken asyncio's own."""

    def __init__(self) -> None:
        self.broken = 0
        self._loop = asyncio.new_event_loop()

    def run(self, coroutine: Any) -> Any:
        return self._loop.run_until_complete(coroutine)

    def renew(self) -> None:
        self.broken += 1
        asyncio._set_running_loop(None)
        self._loop = asyncio.new_event_loop()

    def ask(self, gpu: CudnnRef, message: Any) -> None:
        async def one() -> Any:
            return await gpu.ask(message)

        self.run(one())

    def submit(self, gpu: CudnnRef, message: Any) -> None:
        async def one() -> Any:
            return await gpu.submit(message)

        self.run(one())

    def tell(self, gpu: CudnnRef, message: Any) -> None:
        async def one() -> None:
            gpu.tell(message)

        self.run(one())


@contextlib.contextmanager
def quiet_loops() -> Iterator[None]:
    """asyncio writes of each callback that an alarm has ended; of tasks that nobody awaits any more, too."""
    logging.getLogger("asyncio").setLevel(logging.CRITICAL + 1)
    yield


def main(isolation: Any, entry: str, hits: int, seconds: float) -> dict[str, Any]:
    service = cudnn_actor.start(device="cpu", isolation=isolation, mailbox=1_000_000)
    gpu = CudnnRef(service)
    ref, loop = service.actor_ref, Loop()
    one = np.ones((1, 1, 1, 1), "float32")
    x, w, y = (loop.run(gpu.upload(one * value)) for value in (1.0, 1.0, 0.0))
    grow = ConvFwd(x=x, w=w, y=y, conv=ConvSpec.symmetric(2), beta=1.0)
    entries: dict[str, Callable[[Any], Any]] = {
        "ref.ask": lambda message: ref.ask(message, timeout=PATIENCE_S),
        "ref.tell": ref.tell,
        "ask": lambda message: loop.ask(gpu, message),
        "submit": lambda message: loop.submit(gpu, message),
        "tell": lambda message: loop.tell(gpu, message),
    }
    call, alarms, acknowledged = entries[entry], Hits(), 0
    bystander = Bystander(gpu)
    until = time.monotonic() + seconds
    while alarms.count < hits and time.monotonic() < until and not bystander.error:
        try:
            acknowledged += alarms.during(lambda: call(grow))
        except RuntimeError:
            loop.renew()
        except CudnnActorError as error:
            return {"error": repr(error)}
    signal.setitimer(signal.ITIMER_REAL, 0)
    bystander.stop()
    # Nothing was done to these: they must be answered.
    again = ref.ask(Ping(), timeout=PATIENCE_S)
    loop.renew()
    loop.run(gpu.drain())
    applied = float(loop.run(gpu.download(y)).item())
    statistics = loop.run(gpu.statistics())
    told = {
        "hits": alarms.count,
        "calls": alarms.calls,
        "acknowledged": acknowledged,
        "applied": applied,
        "lost": alarms.lost,
        "broken_loops": loop.broken - 1,
        "bystander": bystander.answers,
        "bystander_error": bystander.error,
        "longest_s": round(bystander.longest_s, 3),
        "queued": statistics.queued,
        "failed": statistics.failed,
        "live_buffers": statistics.live_buffers,
        "restarts": statistics.restarts,
        "generation": again,
    }
    service.stop(PATIENCE_S)
    return told


if __name__ == "__main__":
    faulthandler.dump_traceback_later(float(sys.argv[4]) + PATIENCE_S, exit=True)
    with quiet_loops():
        result = main(sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
    sys.stdout.write(json.dumps(result) + "\n")
