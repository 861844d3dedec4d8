"""Workers are launched fast, get what they were given and nothing else, and outlive nobody."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cudnn_actor.processes import launching
from cudnn_actor.processes.launching import Child, Launcher, LaunchFailed, close_launchers
from cudnn_actor.processes.server_link import ServerLink

from ..forked_programs import Program
from ..patience import PATIENCE_S
from . import dies_after_forking, launching_rigs
from .launching_rigs import HERE, PRELOAD, Situation, launch_and_hear, launch_and_hear_it, pipe

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True, scope="module")
def launchers_are_closed() -> Iterator[None]:
    yield
    close_launchers()


@pytest.fixture
def launcher() -> Launcher:
    return Launcher.of_process(PRELOAD)


def lives(pidfd: int) -> bool:
    return not ends_within(pidfd, 0.0)


def ends_within(pidfd: int, seconds: float) -> bool:
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(1000 * seconds))


@contextlib.contextmanager
def pidfds(*pids: int) -> Iterator[list[int]]:
    fds = [os.pidfd_open(pid) for pid in pids]
    try:
        yield fds
    finally:
        for fd in fds:
            os.close(fd)


def server_pidfd(launcher: Launcher) -> contextlib.AbstractContextManager[list[int]]:
    assert launcher.pid is not None
    return pidfds(launcher.pid)


def description(launcher: Launcher, *further: int) -> Situation:
    """What a worker says that was given the end of a pipe and these."""
    with pipe() as (reading, writing):
        child = launcher.launch(f"{HERE}:describes", [writing, *further])
        told = msgspec.msgpack.decode(os.read(reading, 1 << 16), type=Situation, strict=False)
        assert told.pid == child.pid
        child.close()
    return told


def ended(child: Child) -> str:
    how = child.how_it_ended(PATIENCE_S)
    child.close()
    return how


# What a worker is.


def test_a_worker_runs_its_main_with_the_descriptors_it_was_given(launcher: Launcher) -> None:
    child = launch_and_hear(launcher, "says_hello")
    assert ended(child) == "exited with status 0"


def test_a_worker_has_no_other_descriptors(launcher: Launcher) -> None:
    other = launch_and_hear(launcher)
    with pipe() as (inherited, _), pipe() as (given, _):
        os.set_inheritable(inherited, True)
        told = description(launcher, given)
    other.close()
    assert len(told.open_descriptors) == 6  # and the end of its lifeline
    assert {0, 1, 2} < told.open_descriptors.keys()
    assert told.inheritable == [False, False]


def test_a_worker_is_forked_from_the_server_after_its_imports(launcher: Launcher) -> None:
    told = description(launcher)
    assert told.parent == launcher.pid
    assert told.frozen_objects > 1000
    assert told.collects_garbage


def test_a_worker_takes_signals_but_for_the_terminals(launcher: Launcher) -> None:
    told = description(launcher)
    assert told.ignores_interrupts
    assert told.blocked_signals == 0
    assert told.session == launcher.pid


def test_a_worker_shows_deprecations_as_any_process_does(launcher: Launcher) -> None:
    assert not description(launcher).ignores_deprecations


def test_a_worker_has_the_environment_in_which_the_server_was_started(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher.close()
    monkeypatch.setenv("CUDNN_ACTOR_TEST", "at the start")
    assert description(launcher).variable == "at the start"
    monkeypatch.setenv("CUDNN_ACTOR_TEST", "later")
    assert description(launcher).variable == "at the start"


def test_launches_of_several_threads_do_not_mix(launcher: Launcher) -> None:
    together = threading.Barrier(8)

    def launch(own: int) -> tuple[bytes, int, str]:
        with pipe() as (theirs, mine), pipe() as (reading, writing):
            os.write(mine, b"%d" % own)
            together.wait(PATIENCE_S)
            child = launcher.launch(f"{HERE}:copies", [theirs, writing])
            return os.read(reading, 100), child.pid, ended(child)

    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(launch, range(8)))
    assert [said for said, _, _ in results] == [b"%d" % own for own in range(8)]
    assert len({pid for _, pid, _ in results}) == 8
    assert {how for _, _, how in results} == {"exited with status 0"}


# How a worker ends.


def test_a_pidfd_is_inherited_by_no_program(launcher: Launcher) -> None:
    child = launch_and_hear(launcher, "says_hello")
    assert not os.get_inheritable(child.pidfd)
    child.close()


def test_an_exit_status_is_told(launcher: Launcher) -> None:
    assert ended(launcher.launch(f"{HERE}:leaves_with_three", [])) == "exited with status 3"


def test_a_killing_signal_is_told(launcher: Launcher) -> None:
    child = launch_and_hear(launcher)
    child.signal(signal.SIGKILL)
    assert ended(child) == "was killed by SIGKILL"


def test_a_signal_sent_right_after_the_launch_is_not_lost(launcher: Launcher) -> None:
    for _ in range(20):
        child = launcher.launch(f"{HERE}:stays_silent", [])
        child.signal(signal.SIGTERM)
        assert ended(child) == "was killed by SIGTERM"


def test_a_worker_that_runs_has_not_ended(launcher: Launcher) -> None:
    child = launch_and_hear(launcher)
    assert not child.wait(0.0)
    assert child.how_it_ended(0.0) == "has not ended"
    child.close()


def test_a_main_that_fails_or_is_nowhere_is_told_on_stderr(
    launcher: Launcher, capfd: pytest.CaptureFixture[str]
) -> None:
    launcher.close()  # the next server has what is stderr now
    for main, says in (
        (f"{HERE}:raises", "LookupError: the main of this worker fails"),
        (f"{HERE}:no_such_function", "AttributeError"),
        ("no_such_package.module:main", "ModuleNotFoundError"),
        ("", "ValueError"),
    ):
        assert ended(launcher.launch(main, [])) == "exited with status 1"
        printed = capfd.readouterr().err
        assert says in printed
        assert "Traceback" in printed
    launcher.close()


def test_a_child_that_is_gone_or_closed_takes_signals_in_silence(launcher: Launcher) -> None:
    child = launch_and_hear(launcher, "says_hello")
    assert child.wait(PATIENCE_S)
    child.signal(signal.SIGKILL)
    assert child.how_it_ended(PATIENCE_S) == "exited with status 0"
    child.close()
    child.close()
    child.signal(signal.SIGKILL)


def test_ends_that_nobody_asks_for_hold_up_no_launch(launcher: Launcher) -> None:
    children = [launcher.launch(f"{HERE}:leaves_with_three", []) for _ in range(20)]
    assert all(child.wait(PATIENCE_S) for child in children)
    assert [ended(child) for child in reversed(children)] == 20 * ["exited with status 3"]


# The server.


def test_there_is_one_launcher_for_one_set_of_modules(launcher: Launcher) -> None:
    assert Launcher.of_process(PRELOAD) is launcher
    assert Launcher.of_process(()) is not launcher


def test_the_server_is_for_its_parent_alone_to_end(launcher: Launcher) -> None:
    launch_and_hear(launcher, "says_hello").close()
    server = launcher.pid
    assert server is not None
    assert os.getsid(server) == server
    os.kill(server, signal.SIGTERM)
    os.kill(server, signal.SIGINT)
    launch_and_hear(launcher, "says_hello").close()
    assert launcher.pid == server


def test_closing_ends_the_server_and_its_workers(launcher: Launcher) -> None:
    left, one, another = (launch_and_hear(launcher, main) for main in ("says_hello", "stays", "stays"))
    assert left.wait(PATIENCE_S)
    assert left.how_it_ended(PATIENCE_S) == "exited with status 0"  # while there is somebody to tell it
    with server_pidfd(launcher) as [server]:
        launcher.close()
        assert not lives(server)
    assert launcher.pid is None
    assert one.wait(0.0)
    assert another.wait(0.0)
    assert ended(one) == ended(another) == "has ended"
    assert ended(left) == "exited with status 0"
    launcher.close()


def test_a_launch_after_closing_starts_another_server(launcher: Launcher) -> None:
    launch_and_hear(launcher, "says_hello").close()
    first = launcher.pid
    launcher.close()
    launch_and_hear(launcher, "says_hello").close()
    assert launcher.pid not in (None, first)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_workers_outlive_their_server_and_the_next_launch_starts_another(
    launcher: Launcher, number: signal.Signals
) -> None:
    children = [launch_and_hear(launcher) for _ in range(2)]
    first = launcher.pid
    assert first is not None
    with server_pidfd(launcher) as [server]:
        os.kill(first, number)
        launch_and_hear(launcher, "says_hello").close()
        assert launcher.pid not in (None, first)
        assert ends_within(server, PATIENCE_S)
    assert not any(child.wait(0.0) for child in children)
    for child in children:
        child.signal(signal.SIGKILL)
    assert [ended(child) for child in children] == 2 * ["has ended"]


def test_a_worker_that_its_server_died_before_telling_of_ends_and_leaves_the_descriptors_to_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    once = tmp_path / "once"
    once.touch()
    monkeypatch.setenv(dies_after_forking.VARIABLE, str(once))
    launcher = Launcher.of_process((HERE, dies_after_forking.__name__))
    launcher.close()  # a server of an earlier run of this test has that one's variable
    launcher.warm()
    first = launcher.pid
    assert first is not None
    child = launch_and_hear_it(launcher)
    assert not once.exists()
    assert launcher.pid != first
    assert_nobody_is_left_in(first)
    assert not child.wait(0.0)
    child.close()


def assert_nobody_is_left_in(session: int) -> None:
    """That the processes of a session end, which is a server's own, and its workers'."""
    deadline = time.monotonic() + PATIENCE_S
    while left := [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and session_of(pid) == session]:
        assert time.monotonic() < deadline, left
        with contextlib.suppress(ProcessLookupError), pidfds(left[0]) as (pidfd,):
            ends_within(pidfd, 0.1)


def session_of(pid: str) -> int | None:
    """That of a process that has not ended, be it reaped or not."""
    try:
        state, _, _, session = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:4]
    except OSError:
        return None
    return None if state in "ZX" else int(session)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_closing_ends_workers_that_have_outlived_their_server(
    launcher: Launcher, number: signal.Signals
) -> None:
    child = launch_and_hear(launcher)
    assert launcher.pid is not None
    os.kill(launcher.pid, number)
    launcher.close()
    assert child.wait(0.0)
    assert ended(child) == "has ended"


def test_closing_a_child_ends_its_worker(launcher: Launcher) -> None:
    child = launch_and_hear(launcher)
    with pidfds(child.pid) as [worker]:
        child.close()
        assert ends_within(worker, PATIENCE_S)


def test_a_server_that_has_died_is_followed_by_another_at_once_if_somebody_watches(
    launcher: Launcher,
) -> None:
    launch_and_hear(launcher, "says_hello").close()
    first = launcher.pid
    assert first is not None
    assert not ends_within(launcher.fileno(), 0.0)
    os.kill(first, signal.SIGKILL)
    assert ends_within(launcher.fileno(), PATIENCE_S)
    launcher.revive()
    second = launcher.pid
    assert second not in (None, first)
    assert not ends_within(launcher.fileno(), 0.0)
    assert ended(launch_and_hear(launcher, "says_hello")) == "exited with status 0"
    assert launcher.pid == second


def test_the_end_of_a_worker_is_not_waited_for_by_way_of_a_server_that_is_stopped(launcher: Launcher) -> None:
    child = launch_and_hear(launcher)
    assert launcher.pid is not None
    os.kill(launcher.pid, signal.SIGSTOP)
    child.signal(signal.SIGKILL)
    assert child.how_it_ended(3600.0) == "has ended"
    child.close()
    launcher.close()


def test_what_is_no_descriptor_is_refused_and_nothing_else_suffers(launcher: Launcher) -> None:
    launch_and_hear(launcher, "says_hello").close()
    closed = fcntl.fcntl(0, fcntl.F_DUPFD, 500)  # a number that nothing is given in the meantime
    os.close(closed)
    with pytest.raises(LaunchFailed, match="Bad file descriptor"):
        launcher.launch(f"{HERE}:says_hello", [closed])
    assert ended(launch_and_hear(launcher, "says_hello")) == "exited with status 0"


# Imports.


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where a module of the name `preloaded_late` is looked for."""
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "preloaded_late.py"
    close_launchers()  # whose servers have imported this one


@pytest.fixture
def fifo(module: Path) -> Path:
    """What the module's import opens for reading, and reads to its end."""
    fifo = module.with_suffix(".fifo")
    os.mkfifo(fifo)
    module.write_text(f"open({str(fifo)!r}).read()\n")
    return fifo


@pytest.mark.parametrize("warm", [False, True])
def test_a_failing_import_is_told_at_the_launch_and_tried_again_at_the_next(module: Path, warm: bool) -> None:
    launcher = Launcher.of_process((*PRELOAD, module.stem))
    if warm:
        launcher.warm()
        with server_pidfd(launcher) as [server]:
            assert ends_within(server, PATIENCE_S)
    with pytest.raises(LaunchFailed, match=r"preloaded_late cannot be preloaded: ModuleNotFoundError"):
        launcher.launch(f"{HERE}:says_hello", [])
    module.touch()
    assert ended(launch_and_hear(launcher, "says_hello")) == "exited with status 0"


def test_a_worker_that_is_stopped_as_soon_as_it_is_forked_ends_with_its_lifeline(module: Path) -> None:
    module.write_text(
        "import os, signal\n"
        "os.register_at_fork(after_in_child=lambda: os.kill(os.getpid(), signal.SIGSTOP))\n"
    )
    child = Launcher.of_process((*PRELOAD, module.stem)).launch(f"{HERE}:stays", [])
    child.lifeline.cut()
    assert child.wait(PATIENCE_S)
    assert ended(child) == "was killed by SIGKILL"


def test_a_server_that_dies_of_its_imports_is_told(module: Path) -> None:
    module.write_text("import os\nos._exit(7)\n")
    with pytest.raises(LaunchFailed, match="the forkserver exited with status 7"):
        Launcher.of_process((module.stem,)).launch(f"{HERE}:says_hello", [])


def test_a_worker_is_started_without_a_server_if_servers_are_killed_in_their_start(module: Path) -> None:
    module.write_text(
        "import os, pathlib\n"
        f"if pathlib.Path({str(module)!r}).stat().st_mode & 0o111: os.kill(os.getpid(), 9)\n"
    )
    module.chmod(0o755)
    launcher = Launcher.of_process((*PRELOAD, module.stem))
    assert description(launcher).parent == os.getpid(), "the first launch"
    assert description(launcher).parent == os.getpid(), "and the next"
    child = launcher.launch(f"{HERE}:stays", [])
    child.close()
    assert not [process for process in launcher.dying if process.wait(PATIENCE_S) is None]
    module.chmod(0o644)
    until = time.monotonic() + PATIENCE_S
    while description(launcher).parent != launcher.pid:
        assert time.monotonic() < until, "no worker is forked again"


def test_warming_starts_the_imports_and_does_not_wait_for_them(fifo: Path) -> None:
    launcher = Launcher.of_process((*PRELOAD, "preloaded_late"))
    launcher.warm()
    server = launcher.pid
    fifo.write_text("which blocks until the import has come so far")
    launcher.warm()
    assert ended(launch_and_hear(launcher, "says_hello")) == "exited with status 0"
    assert launcher.pid == server


def test_closing_ends_a_launch_that_waits_for_imports(fifo: Path) -> None:
    launcher = Launcher.of_process((*PRELOAD, "preloaded_late"))
    launcher.warm()
    with ThreadPoolExecutor(1) as threads:
        launch = threads.submit(launcher.launch, f"{HERE}:says_hello", [])
        with fifo.open("w"), server_pidfd(launcher) as [server]:
            launcher.close()
            assert not lives(server)
            with pytest.raises(LaunchFailed):
                launch.result(PATIENCE_S)


def test_closing_ends_a_launch_that_has_just_started_a_server(
    fifo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launcher has not noted the server yet, so `close` cannot hang up."""
    launcher = Launcher.of_process((*PRELOAD, "preloaded_late"))
    started, closing = threading.Event(), threading.Event()

    def slow(*args: Any, **options: Any) -> ServerLink:
        started.set()
        assert closing.wait(PATIENCE_S)
        return ServerLink(*args, **options)

    def close() -> None:
        closing.set()
        launcher.close()

    monkeypatch.setattr(launching, "ServerLink", slow)
    with ThreadPoolExecutor(2) as threads:
        launch = threads.submit(launcher.launch, f"{HERE}:says_hello", [])
        assert started.wait(PATIENCE_S)
        with fifo.open("w"):  # until this is closed, the server's imports do not end
            closed = threads.submit(close)
            with pytest.raises(LaunchFailed):
                launch.result(PATIENCE_S)
            closed.result(PATIENCE_S)


def test_a_launch_that_nobody_wants_any_more_does_not_wait_for_imports(fifo: Path) -> None:
    launcher = Launcher.of_process((*PRELOAD, "preloaded_late"))
    unwanted = threading.Event()
    with ThreadPoolExecutor(2) as threads:
        waiting = [threads.submit(launcher.launch, f"{HERE}:stays", [], unwanted.is_set) for _ in range(2)]
        with fifo.open("w"):
            unwanted.set()
            for launch in waiting:  # one waits for the imports, the other for the first
                with pytest.raises(LaunchFailed, match="the process is not wanted"):
                    launch.result(PATIENCE_S)
    assert ended(launch_and_hear(launcher, "says_hello")) == "exited with status 0"


# The end of the parent.


@contextlib.contextmanager
def running(program: str) -> Iterator[Program]:
    """A Python process of that text, which finds the modules of the tests."""
    streams = subprocess.PIPE
    with Program(["-c", program], cwd=ROOT, stdin=streams, stdout=streams) as process:
        try:
            yield process
        finally:
            process.kill()


def parent(end: str) -> contextlib.AbstractContextManager[Program]:
    """A parent of `launching_rigs`, which waits for a line before it meets its end."""
    return running(f"from {HERE} import {end}; {end}()")


def pids_of(process: Program) -> list[int]:
    return [int(pid) for pid in process.stdout.readline().split()]


def go_on(process: Program) -> int:
    """Let the parent meet its end; its exit status."""
    process.stdin.write("\n")
    process.stdin.flush()
    return process.wait(PATIENCE_S)


@pytest.mark.parametrize(
    ("end", "status"), [("parent_is_killed", -9), ("parent_returns", 0), ("parent_leaves_at_once", 0)]
)
def test_nobody_outlives_the_parent(end: str, status: int) -> None:
    with parent(end) as process, pidfds(*pids_of(process)) as [server, worker]:
        assert lives(worker)
        assert go_on(process) == status
        assert ends_within(server, PATIENCE_S)
        assert ends_within(worker, PATIENCE_S)


def test_an_interpreter_that_ends_waits_for_the_end_of_its_workers() -> None:
    """In a new interpreter: in a forked one, the launchers' exit handler is registered before any other."""
    program = f"""
import atexit
atexit.register(lambda: print(*[child.wait(0.0) for child in children]))  # which is run after the launchers'
from {HERE} import PRELOAD, Launcher, launch_and_hear
children = [launch_and_hear(Launcher.of_process(PRELOAD))]
"""
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert (done.stdout, done.stderr) == ("True\n", "")


@pytest.mark.parametrize(
    ("end", "status"), [("parent_forks_and_returns", 0), ("parent_is_killed_with_a_copy_about", -9)]
)
def test_nobody_outlives_a_parent_whose_fork_lives_on(end: str, status: int) -> None:
    with parent(end) as process, pidfds(*pids_of(process)) as [server, worker, fork]:
        try:
            assert go_on(process) == status
            assert ends_within(server, PATIENCE_S)
            assert ends_within(worker, PATIENCE_S)
            assert lives(fork)
        finally:
            signal.pidfd_send_signal(fork, signal.SIGKILL)


@pytest.mark.parametrize(
    "check",
    ["parent_forks_and_both_launch", "parent_hands_down_odd_signals", "parent_has_no_room_for_a_pidfd"],
)
def test_a_process_of_its_own_finds(check: str) -> None:
    assert hasattr(launching_rigs, check)
    with parent(check) as process:
        assert process.wait(PATIENCE_S) == 0
