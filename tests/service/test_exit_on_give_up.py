"""`on_give_up="exit"`: the process ends by itself."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import textwrap

import pytest

from ..forked_programs import Program
from ..patience import PATIENCE_S

START = """
    import asyncio, os, signal, sys, threading
    from cudnn_actor import *
    from cudnn_actor import logging
    from cudnn_actor.messages import *
    from cudnn_actor.service import giving_up

    logging.configure()
    FATAL = dict(
        device="cpu", isolation=sys.argv[1], max_restarts=0, on_give_up="exit",
        faults=FaultPlan().at(1, Fault.STICKY, of=Fill),
    )

    def say(text):
        os.write(1, f"{text}\\n".encode())  # whole, whoever else writes there

    async def give_up(gpu):
        say(f"worker {gpu.worker_pid}")
        x = await gpu.empty((1, 1, 1, 1))
        input()
        try:
            await gpu.fill(x, 1)
        except ServiceStopped:
            say(f"stopped, alive: {gpu.alive}")

    async def main():
        async with spawn(**FATAL) as gpu:
            await give_up(gpu)
            await asyncio.Event().wait()
"""


def ends(isolation: str, *program: str) -> tuple[int, str, str]:
    """Run a program whose service gives up; its status and output, once its worker has gone as well."""
    script = "\n".join(textwrap.dedent(part) for part in (START, *program))
    pipe = subprocess.PIPE
    process = Program(["-c", script, isolation], stdin=pipe, stdout=pipe, stderr=pipe, spare=True)
    try:
        pid = ""
        while not pid:
            line = process.stdout.readline()
            assert line, process.communicate()[1]
            pid = line.partition("worker ")[2].strip()
        worker = None if pid == "None" else os.pidfd_open(int(pid))
        output, errors = process.communicate("\n", timeout=PATIENCE_S)
    finally:
        process.kill()
        process.wait()
    if worker is not None:
        assert select.select([worker], [], [], PATIENCE_S)[0], "a worker has outlived the process"
        os.close(worker)
    return process.wait(), output, errors


@pytest.fixture(params=["thread", "process"])
def where(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_a_program_that_knows_no_signals_ends_by_sigterm_and_its_log_says_why(where: str) -> None:
    status, output, errors = ends(where, "asyncio.run(main())")
    assert status == -signal.SIGTERM, errors
    [line] = [line for line in (output + errors).splitlines() if "process.ending" in line]
    assert "INJECTED_STICKY_ERROR" in line


def test_a_program_that_handles_sigterm_ends_as_it_likes(where: str) -> None:
    status, output, errors = ends(
        where,
        """
        async def serve():
            stop = asyncio.Event()
            asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
            async with spawn(**FATAL) as gpu:
                await give_up(gpu)
                await stop.wait()
            say("left in order")
            sys.exit(5)

        asyncio.run(serve())
        """,
    )
    assert status == 5, errors
    assert "stopped, alive: False" in output
    assert "left in order" in output
    assert "Traceback" not in errors


def test_a_program_that_ignores_sigterm_is_ended_with_status_70() -> None:
    """The limit of 30 s is set to less here: nothing of its way is different."""
    status, output, errors = ends(
        "process",  # whose worker has to end, too
        """
        giving_up.EXIT_WITHIN_S = 0.5
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        asyncio.run(main())
        """,
    )
    assert status == 70, errors
    assert "process.exit_forced" in output + errors


def test_a_program_that_hangs_in_its_own_end_is_ended_too() -> None:
    status, _, errors = ends(
        "process",
        """
        giving_up.EXIT_WITHIN_S = 0.5

        def leave(number, frame):
            threading.Thread(target=threading.Event().wait).start()  # which the interpreter waits for
            sys.exit(5)

        signal.signal(signal.SIGTERM, leave)
        asyncio.run(main())
        """,
    )
    assert status == 70, errors


def test_a_program_of_threads_ends_too(where: str) -> None:
    status, _, errors = ends(
        where,
        """
        service = start(**FATAL)
        asyncio.run(give_up(CudnnRef(service)))
        threading.Event().wait()
        """,
    )
    assert status == -signal.SIGTERM, errors


def test_a_program_whose_service_has_a_supervisor_of_its_own_ends_too() -> None:
    status, _, errors = ends(
        "process",
        """
        from cudnn_actor.supervision import Supervisor

        spec, service = child_spec(**FATAL)
        supervisor = Supervisor.start([spec])
        service.started.result()
        asyncio.run(give_up(CudnnRef(service)))
        threading.Event().wait()
        """,
    )
    assert status == -signal.SIGTERM, errors
