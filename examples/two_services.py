"""Two services, each with its own worker process, under your own supervisor.

    python examples/two_services.py

A service replaces its worker by itself, and its buffers stay. It gives up only when it has used up its
restarts. Then your supervisor decides: `one_for_one` starts only that service anew; `one_for_all` starts
both, for services whose buffers depend on each other. A service that is started anew has no buffers.
"""

from __future__ import annotations

import os
import queue
import select
import signal
from typing import Any

import numpy as np

from cudnn_actor import BufferRef, CudnnService, StaleBufferError, TensorSpec, child_spec, logging
from cudnn_actor.messages import Allocate, Download, Message, Ping
from cudnn_actor.supervision import LifecycleEvent, Restarted, Strategy, Supervisor

PATIENCE_S = 60.0
VALUES = np.arange(6, dtype=np.float32).reshape(1, 1, 2, 3)
MESSAGE = Allocate(spec=TensorSpec.packed(VALUES.shape, "float32"), data=VALUES)


def main() -> None:
    """The same two kills under both strategies."""
    for strategy in (Strategy.ONE_FOR_ONE, Strategy.ONE_FOR_ALL):
        print(f"{strategy}:")
        show(strategy)


def show(strategy: Strategy) -> None:
    """Kill the left service's worker twice, once more than the service's restarts allow."""
    events: queue.SimpleQueue[LifecycleEvent] = queue.SimpleQueue()
    # With two GPUs: device="cuda:0" and "cuda:1". Workers work on the CPU too, so this runs anywhere.
    first, left = child_spec("left", device="cpu", isolation="process", max_restarts=1)
    second, right = child_spec("right", device="cpu", isolation="process", max_restarts=1)
    supervisor = Supervisor.start([first, second], strategy=strategy, listener=events.put)
    try:
        buffers: dict[CudnnService, BufferRef] = {}
        for service in (left, right):
            service.started.result(timeout=PATIENCE_S)
            buffers[service] = ask(service, MESSAGE)

        kill(left)
        generation = ask(left, Ping())
        kept = np.array_equal(ask(left, Download(src=buffers[left])), VALUES)
        print(f"  first kill: left itself replaces its worker, generation {generation}; buffer kept: {kept}")

        kill(left)
        for _ in range(2 if strategy is Strategy.ONE_FOR_ALL else 1):
            print(f"  second kill: the supervisor starts {restarted(events)} anew")
        for name, service in (("left", left), ("right", right)):
            print(f"  {name}'s buffer: {fate(service, buffers[service])}")
    finally:
        supervisor.stop()


def ask(service: CudnnService, message: Message) -> Any:
    """Ask a service through its pykka reference: blocks, and raises typed errors."""
    return service.actor_ref.ask(message, block=True, timeout=PATIENCE_S)


def kill(service: CudnnService) -> None:
    """SIGKILL a service's worker, and wait until it has ended."""
    pid = service.worker_pid
    assert pid is not None  # it has just answered
    process = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    select.select([process], [], [], PATIENCE_S)
    os.close(process)


def restarted(events: queue.SimpleQueue[LifecycleEvent]) -> str:
    """Wait until a child of the supervisor is ready again. Returns its name."""
    while True:
        event = events.get(timeout=PATIENCE_S)
        if isinstance(event, Restarted):
            return event.child


def fate(service: CudnnService, buffer: BufferRef) -> str:
    """The state of a buffer that was there before the kills."""
    try:
        ask(service, Download(src=buffer))
    except StaleBufferError as error:
        return f"gone ({error.reason})"
    return "kept"


if __name__ == "__main__":
    logging.configure()  # the services' log lines, on stderr
    main()
