"""A kernel that refuses to send a worker signals (by a filter of system calls, say) stops no recovery."""

from __future__ import annotations

from pathlib import Path

from .. import forked_programs
from ..patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
PROGRAM = """
import asyncio, ctypes, os, signal, struct

from cudnn_actor import spawn
from cudnn_actor.messages import Ping
from tests.patience import PATIENCE_S
from tests.service.noticed_hangs import notice_hang

NO_NEW_PRIVILEGES, SECCOMP, FILTER = 38, 22, 2
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
PIDFD_SEND_SIGNAL, REFUSE, ALLOW = 424, 0x00050001, 0x7FFF0000  # EPERM


def refuse_signals():
    steps = [(LOAD, 0, 0, 0), (EQUAL, 0, 1, PIDFD_SEND_SIGNAL), (RETURN, 0, 0, REFUSE), (RETURN, 0, 0, ALLOW)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(steps), ctypes.addressof(code)))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    assert prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0
    assert prctl(SECCOMP, FILTER, program) == 0, os.strerror(ctypes.get_errno())


async def main():
    refuse_signals()
    async with spawn(device="cpu", isolation="process") as gpu:
        stopped = os.pidfd_open(gpu.worker_pid)
        try:
            signal.pidfd_send_signal(stopped, 0)
        except PermissionError:
            print("refused")
        os.kill(gpu.worker_pid, signal.SIGSTOP)
        notice_hang(gpu)
        async with asyncio.timeout(PATIENCE_S):
            print(set(await asyncio.gather(*[gpu.ask(Ping()) for _ in range(50)])))


asyncio.run(main())
"""


def test_a_worker_that_hangs_is_replaced_where_nobody_may_signal_it() -> None:
    done = forked_programs.run(["-W", "error", "-c", PROGRAM], cwd=ROOT, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    said = [line for line in done.stdout.splitlines() if not line.startswith("20")]
    assert said == ["refused", "{2}"]
