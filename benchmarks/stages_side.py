"""Stamps along a request, in the service's own process and in its worker's.

A worker is made with `engine`, and writes its stamps when it ends. The clock is the same in both processes.
Where a worker says that an answer is near, that is encoded and read first: the answer itself is then the
second that is.
"""

from __future__ import annotations

import bisect
import contextlib
import functools
import itertools
import json
import os
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from cudnn_actor import CudnnRef, CudnnService
from cudnn_actor.actors import LoopBridge
from cudnn_actor.actors.mailbox import Mailbox
from cudnn_actor.attached.server.session import Session
from cudnn_actor.engines.engine_choice import WorkerEngine, choose_engine
from cudnn_actor.execution.expected_runs import ExpectedRun
from cudnn_actor.execution.runner import Runner
from cudnn_actor.isolation.process.child.outbox import Outbox
from cudnn_actor.isolation.process.parent.late_copies import LateCopy
from cudnn_actor.options import make_options
from cudnn_actor.processes.channel import Channel
from cudnn_actor.processes.named_functions import function_named

__all__ = ["STAMPS", "engine", "stages_of", "stamped_caller", "stamped_server", "stamped_service"]

STAMPS: list[tuple[int, str]] = []
"""The stamps of this process: nanoseconds, and the stage that was reached."""
_NEARLY_ALL = 0.6
"""A stage is listed if it occurs in at least this share of the requests."""


def _stamp(
    owner: type, name: str, before: str = "", after: str = "", *, if_true: bool = False
) -> Callable[[], None]:
    """Stamp calls of a method, before and after them. With `if_true`, the stamp after is left out if they
    return something false. Returns a function that ends the stamping.
    """
    call: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(call)
    def stamping(*args: Any, **named: Any) -> Any:
        if before:
            STAMPS.append((time.perf_counter_ns(), before))
        result = call(*args, **named)
        if after and (result or not if_true):
            STAMPS.append((time.perf_counter_ns(), after))
        return result

    setattr(owner, name, stamping)
    return functools.partial(setattr, owner, name, call)


@contextlib.contextmanager
def stamped_caller() -> Iterator[None]:
    """While it lasts, requests of services in this process are stamped."""
    with contextlib.ExitStack() as ends:
        ends.callback(_stamp(CudnnRef, "ask", "asked"))
        ends.callback(_stamp(LoopBridge, "of_running_loop", "checked"))
        ends.callback(_stamp(Mailbox, "admit", after="in the mailbox"))  # not on a straight path
        ends.callback(_stamp(Channel, "_push", "request encoded", "request sent"))
        ends.callback(_stamp(Channel, "fetch", after="answer read", if_true=True))
        ends.callback(_stamp(LateCopy, "make", "values: copy begins", "values: copied"))
        yield


@contextlib.contextmanager
def stamped_server(folder: Path) -> Iterator[None]:
    """While it lasts, requests of clients that are attached to this process are stamped. The stamps are
    written to the folder at the end."""
    with contextlib.ExitStack() as ends:
        ends.callback(_stamp(Channel, "fetch", "server: awake", "server: read"))
        ends.callback(_stamp(Session, "_run_plan", "server: its turn"))
        ends.callback(_stamp(Channel, "_push", "server: encoded", "server: sent"))
        yield
    (folder / "server.json").write_text(json.dumps(STAMPS))


def stamped_service(device: str, folder: Path, **given: Any) -> CudnnService:
    """A service, not launched, whose worker writes its stamps to the folder when it ends. `given`: more
    options."""
    options = make_options({"device": device, "isolation": "process", "hang_after_s": 600.0, **given})
    chosen = choose_engine(device, apart=True)
    assert chosen.worker is not None
    made = WorkerEngine(f"{__name__}:engine", (str(folder), chosen.worker.make, *chosen.worker.arguments))
    return CudnnService(options, engine=chosen._replace(worker=made))


def engine(folder: str, make: str, *arguments: Any) -> Any:
    """The engine that a worker is to have. The worker stamps its requests from here on.

    Parameters
    ----------
    folder
        Where it writes its stamps, to a file named by its process id.
    make, arguments
        What makes the engine: "package.module:Name".
    """
    _stamp(Channel, "_push", "worker: answer encoded")
    _stamp(Channel, "fetch", after="worker: request read", if_true=True)
    _stamp(Runner, "run_model", "worker: run begins", "worker: run enqueued")
    _stamp(ExpectedRun, "enqueue", "worker: launch begins", "worker: launched")
    _stamp(Runner, "write", "worker: upload begins", "worker: upload enqueued")
    _stamp(Outbox, "note_done", "worker: answer made")
    close = Runner.close

    @functools.wraps(close)
    def closing(*args: Any, **named: Any) -> Any:
        Path(folder, f"{os.getpid()}.json").write_text(json.dumps(STAMPS))
        return close(*args, **named)

    Runner.close = closing  # type: ignore[method-assign]
    made = function_named(make)(*arguments)
    _stamp(type(made), "has_passed", after="worker: fence passed", if_true=True)
    return made


def stages_of(stamps: Iterable[tuple[int, str]]) -> dict[str, float]:
    """When requests reach each stage, in microseconds since they were asked: medians, in order of time.

    Requests came one at a time. The last is left out: nothing says where it ends.
    """
    ordered = sorted((at, what) for at, what in stamps)
    starts = [at for at, what in ordered if what == "asked"]
    reached: dict[str, list[float]] = defaultdict(list)
    seen: Counter[tuple[int, str]] = Counter()
    for at, what in ordered:
        number = bisect.bisect_right(starts, at) - 1
        if 0 <= number < len(starts) - 1:
            seen[number, what] += 1
            times = seen[number, what]
            name = what if times == 1 else f"{what}, {times}"
            reached[name].append((at - starts[number]) / 1e3)
    reached["next asked"] = [(after - before) / 1e3 for before, after in itertools.pairwise(starts)]
    del reached["asked"]
    enough = _NEARLY_ALL * (len(starts) - 1)
    medians = {name: statistics.median(each) for name, each in reached.items() if len(each) >= enough}
    return {name: round(at, 1) for name, at in sorted(medians.items(), key=lambda item: item[1])}
