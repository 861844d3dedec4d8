"""What threads and processes compute, and where those of a service are."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from cudnn_actor.service.client import CudnnRef

__all__ = ["actor_thread", "of_workers", "process_cpu_s", "thread_cpu_s", "worker_cpu_s"]

_CPU_FIELDS = slice(11, 15)
"""Of `/proc/PID/stat`, behind the name: user and system time, its own and of children that it has reaped."""
_ALL_THREADS = 2
"""CPUCLOCK_SCHED of the kernel's linux/posix-timers.h: nanoseconds of all threads of a process."""


def actor_thread() -> threading.Thread:
    """The actor's thread of the one service of this process that has it here."""
    return next(thread for thread in threading.enumerate() if thread.name.startswith("CudnnActor-"))


def thread_cpu_s(thread: threading.Thread) -> float:
    """Seconds that a thread has computed."""
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0))


def process_cpu_s(pid: int) -> float:
    """Seconds that a process has computed, all of its threads, those that have ended too.

    The clock's number is made as `clock_getcpuclockid(3)` makes it. Raises `OSError` when it has gone.
    """
    return time.clock_gettime(~pid << 3 | _ALL_THREADS)


def worker_cpu_s(gpu: CudnnRef) -> float:
    """Seconds computed by where the actor of a service is: its worker process, or its thread of this one."""
    pid = gpu.worker_pid
    return thread_cpu_s(actor_thread()) if pid is None else process_cpu_s(pid)


@contextlib.contextmanager
def of_workers() -> Iterator[list[float]]:
    """Measure, during the block, which share of all cores workers used: the list's only item.

    They are children of this process's children, which reap them, and so count only once they have ended.
    """
    began, before = time.monotonic(), _descendants_s()
    share = [0.0]
    yield share
    share[0] = (_descendants_s() - before) / (time.monotonic() - began) / (os.cpu_count() or 1)


def _descendants_s() -> float:
    """Seconds that this process's children have computed, and those of theirs that have ended."""
    ticks = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread has ended meanwhile, or a child of it
            for child in (task / "children").read_text().split():
                fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                ticks += sum(int(field) for field in fields[_CPU_FIELDS])
    return ticks / os.sysconf("SC_CLK_TCK")
