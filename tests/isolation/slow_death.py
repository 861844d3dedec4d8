"""Workers that take long to die: the kernel stops a traced process on its way out, also after SIGKILL."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from cudnn_actor import CudnnRef
from tests.service.rigs import in_thread

__all__ = ["dying_slowly", "is_dying"]

_PTRACE_SEIZE, _TRACE_EXIT = 0x4206, 0x40


@asynccontextmanager
async def dying_slowly(gpu: CudnnRef) -> AsyncIterator[int]:
    """Until the end of the block, the worker that serves now does not get past its death. Gives its pid.

    Skips the test where this process may not trace it.
    """
    pid = gpu.worker_pid
    assert pid is not None
    leave, entered, errors = threading.Event(), threading.Event(), list[int]()

    def trace() -> None:  # the tracer is a thread: its end lets the worker go
        libc = ctypes.CDLL(None, use_errno=True)
        libc.ptrace.argtypes = (ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p)
        if libc.ptrace(_PTRACE_SEIZE, pid, None, _TRACE_EXIT) != 0:
            errors.append(ctypes.get_errno())
        entered.set()
        leave.wait()

    thread = threading.Thread(target=trace, name="tracer")
    thread.start()
    try:
        await in_thread(entered.wait)
        if errors:
            pytest.skip(f"no process may be traced here: {os.strerror(errors[0])}")
        yield pid
    finally:
        leave.set()
        thread.join()


def is_dying(pid: int) -> bool:
    """Whether a process has been killed and is kept on its way out."""
    return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] == b"t"
