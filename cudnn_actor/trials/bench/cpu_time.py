"""CPU time of threads, of processes and of the machine, and where a service's actor runs."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from cudnn_actor.service.client import CudnnRef

__all__ = ["actor_thread", "others_cpu", "process_cpu_s", "thread_cpu_s", "worker_cpu_s"]

_CPU_FIELDS = slice(11, 15)
"""Fields of `/proc/PID/stat` after the name: user and system time, its own and of children it has reaped."""
_ALL_THREADS = 2
"""CPUCLOCK_SCHED of the kernel's linux/posix-timers.h: nanoseconds of all threads of a process."""


def actor_thread() -> threading.Thread:
    """The actor's thread of this process's only service in thread isolation."""
    return next(thread for thread in threading.enumerate() if thread.name.startswith("CudnnActor-"))


def thread_cpu_s(thread: threading.Thread) -> float:
    """CPU seconds of a thread."""
    return time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0))


def process_cpu_s(pid: int) -> float:
    """CPU seconds of a process: of all its threads, ended ones included.

    The clock's id is computed as `clock_getcpuclockid(3)` does. Raises `OSError` if the process has ended.
    """
    return time.clock_gettime(~pid << 3 | _ALL_THREADS)


def worker_cpu_s(gpu: CudnnRef) -> float:
    """CPU seconds of a service's worker process, or of its actor's thread in this process."""
    pid = gpu.worker_pid
    return thread_cpu_s(actor_thread()) if pid is None else process_cpu_s(pid)


@contextlib.contextmanager
def others_cpu() -> Iterator[list[float]]:
    """Yields a list whose only item, after the block, is the share of all cores that other processes used.

    This process and its workers do not count. Workers are children of this process's children, and their time
    is known only after they have been reaped. So a worker that still runs after the block counts as another.
    """
    began, own, busy, workers = time.monotonic(), time.process_time(), _busy_s(), _descendants_s()
    share = [0.0]
    yield share
    others = (_busy_s() - busy) - (time.process_time() - own) - (_descendants_s() - workers)
    all_s = (time.monotonic() - began) * (os.cpu_count() or 1)
    share[0] = min(max(0.0, others / all_s), 1.0)  # time is counted in ticks, too coarse for a short block


def _busy_s() -> float:
    """Busy seconds of all cores together: user, nice, system, interrupts."""
    try:
        with open("/proc/stat", encoding="ascii") as file:
            fields = [int(field) for field in file.readline().split()[1:]]
    except OSError:
        return time.process_time()
    return sum(fields[:3] + fields[5:7]) / os.sysconf("SC_CLK_TCK")


def _descendants_s() -> float:
    """CPU seconds of this process's children, and of their ended children."""
    ticks = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # the thread, or a child of it, has ended meanwhile
            for child in (task / "children").read_text().split():
                fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                ticks += sum(int(field) for field in fields[_CPU_FIELDS])
    return ticks / os.sysconf("SC_CLK_TCK")
