"""What /proc says of a process: whether it is stopped, and which it is."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

from cudnn_actor.processes.process_state import ProcessName, call_this_process, is_stopped


def test_a_process_is_stopped_while_it_is_and_keeps_its_name_until_it_ends() -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        name = ProcessName.of(process.pid)
        assert not is_stopped(process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        assert is_stopped(process.pid)
        assert ProcessName.of(process.pid) == name
        assert not name.has_ended()
        process.kill()
        process.wait()
        assert not is_stopped(process.pid)
        assert name.has_ended()


def test_what_a_process_is_called_is_not_taken_for_its_state() -> None:
    name, called = ProcessName.own(), Path("/proc/self/comm").read_text().rstrip("\n")
    call_this_process("a) T b) t 1 (")
    try:
        assert ProcessName.own() == name
        assert not is_stopped(os.getpid())
    finally:
        call_this_process(called)
