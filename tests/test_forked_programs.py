"""A forked program is what a new interpreter's would be: see `forked_programs`."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cudnn_actor.pool import spawn_pool
from cudnn_actor.processes import interpreter, server_process
from cudnn_actor.processes.launching import Launcher

from .forked_programs import Program, run
from .patience import PATIENCE_S
from .whole import WHOLE

Ran = subprocess.CompletedProcess[str]
Runs = Callable[..., Ran]

LOOK = """
import atexit, json, os, random, signal, socket, sys, threading, warnings
import numpy
from cudnn_actor.processes.launching import Launcher
ended = [number for number in signal.valid_signals() if signal.getsignal(number) not in
         (signal.SIG_DFL, signal.default_int_handler, None)]
print(json.dumps({
    "name": __name__, "file": globals().get("__file__"),
    "main": sys.modules["__main__"].__dict__ is globals(),
    "argv": sys.argv, "orig_argv": sys.orig_argv, "first": sys.path[0], "paths": sorted(set(sys.path[1:])),
    "threads": [thread.name for thread in threading.enumerate()],
    "is_main": threading.current_thread() is threading.main_thread(), "handled": sorted(ended),
    "sigint": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "descriptors": sorted(os.listdir("/proc/self/fd"), key=int)[:-1],
    "folder": os.getcwd(),
    "environment": dict(os.environ), "group": os.getpgrp(), "session": os.getsid(0), "umask": os.umask(0),
    "isatty": [stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)],
    "encodings": [sys.stdin.encoding, sys.stdout.encoding, sys.stderr.errors], "options": sys.warnoptions,
    "names": [stream.name for stream in (sys.stdin, sys.stdout, sys.stderr)],
    "seekable": [stream.seekable() for stream in (sys.stdin, sys.stdout, sys.stderr)],
    "buffered": [(stream.line_buffering, stream.write_through) for stream in (sys.stdout, sys.stderr)],
    "read": sys.stdin.read(), "launchers": len(Launcher.shared),
}))
"""


def new(words: list[Any], **how: Any) -> Ran:
    """What a new interpreter does."""
    return subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, check=False, timeout=PATIENCE_S, **how
    )


@pytest.mark.parametrize("way", ["text", "module", "path", "unbuffered"])
def test_a_program_finds_what_it_finds_in_a_new_interpreter(way: str, tmp_path: Path) -> None:
    (tmp_path / "looking.py").write_text(LOOK)
    path = tmp_path / "looking.py"
    ways: dict[str, list[Any]] = {"text": ["-c", LOOK], "module": ["-m", "looking"], "path": [path]}
    words = ways.get(way, ["-u", path])
    how: dict[str, Any] = {
        "cwd": tmp_path,
        "env": {**os.environ, "NEW": "1"},
        "input": "a line\r\nand another",
    }
    words = ["-W", "error", "-W", "ignore:This process:DeprecationWarning", *words, "an argument", "--option"]
    forked, other = run(words, **how), new(words, **how)
    assert (forked.returncode, forked.stderr, other.stderr) == (0, "", "")
    found, expected = json.loads(forked.stdout), json.loads(other.stdout)
    assert found == expected, {name: found[name] for name in expected if found[name] != expected[name]}


ENDS = {
    "the end of the text": "print('said')",
    "a status": "import sys; print('said', end=''); sys.exit(7)",
    "a large status": "import sys; sys.exit(256 + 3)",
    "a text": "import sys; sys.exit('a reason')",
    "no status": "raise SystemExit",
    "an error": "print('said', end=''); 1 / 0",
    "an interruption": "import signal; print('said', end=''); signal.raise_signal(signal.SIGINT)",
    "TERM": "import signal; signal.raise_signal(signal.SIGTERM)",
    "a crash": "import os; os.abort()",
    "at once": "import os; print('not flushed', end=''); os._exit(4)",
    "exit handlers": "import atexit; atexit.register(print, 'a'); atexit.register(print, 'b'); print('c')",
    "an error in an exit handler": "import atexit; atexit.register(lambda: 1 / 0)",
    "a thread": "import threading; threading.Timer(0.01, print, ['late']).start()",
    "a daemon": "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
    "an executor": "from concurrent.futures import *; ThreadPoolExecutor().submit(print, 'computed')",
    "an object that is left": "class One:\n def __del__(self): print('gone')\none = One()",
    "a thread's error": "import threading; threading.Thread(target=lambda: 1 / 0, name='it').start()",
    "a pool": "import multiprocessing as m; print(m.get_context('fork').Pool(1).map(abs, [-1]))",
    "a text that is none": "a b",
}


@pytest.mark.parametrize("end", ENDS)
def test_a_program_ends_as_in_a_new_interpreter(end: str) -> None:
    forked, other = run(["-c", ENDS[end]]), new(["-c", ENDS[end]])
    assert (forked.returncode, forked.stdout) == (other.returncode, other.stdout)
    assert forked.stderr.splitlines()[-1:] == other.stderr.splitlines()[-1:]
    assert len(forked.stderr) >= len(other.stderr)  # a traceback begins with the server's lines


@pytest.mark.parametrize("words", [["-m", "tests.there_is_none"], ["there_is_none.py"]])
def test_a_program_that_does_not_exist_fails(words: list[str]) -> None:
    forked, other = run(words), new(words)
    assert forked.returncode != 0
    assert other.returncode != 0
    assert "there_is_none" in forked.stderr


def test_the_interpreters_options_that_come_too_late_are_refused() -> None:
    done = run(["-I", "-c", "print(1)"])
    assert (done.returncode, done.stdout) == (1, "")
    assert "a forked program cannot have" in done.stderr


@pytest.mark.parametrize(
    ("setting", "fails"),
    [("error", True), ("error::RuntimeWarning", True), ("error:other", False), ("error::UserWarning", False)],
)
def test_warnings_are_filtered_as_the_command_says(setting: str, fails: bool) -> None:
    done = run(["-W", setting, "-c", "import warnings; warnings.warn('this and that', RuntimeWarning)"])
    assert (done.returncode != 0) == fails
    assert "this and that" in done.stderr


def test_an_unbuffered_program_is_heard_at_once() -> None:
    words = ["-u", "-c", "import sys; print('word', end=''); sys.stdin.read()"]
    with Program(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as program:
        assert os.read(program.stdout.fileno(), 100) == b"word"
    assert program.returncode == 0


@pytest.mark.parametrize(
    "name", ["OPENBLAS_NUM_THREADS", "PYTHONHASHSEED", "MALLOC_ARENA_MAX", "LC_ALL", "TZ"]
)
def test_variables_that_are_read_at_the_start_of_a_process_are_refused(name: str) -> None:
    value = "2" if os.environ.get(name) == "1" else "1"
    with pytest.raises(ValueError, match=f"{name} is read when a process starts"):
        run(["-c", ""], env={**os.environ, name: value})


def test_environment_and_working_directory_are_those_of_the_moment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    run(["-c", ""])  # the server runs
    monkeypatch.setenv("LATER", "set")
    monkeypatch.chdir(tmp_path)
    done = run(["-c", "import os; print(os.getcwd(), flush=True); os.system('echo $LATER')"])
    assert done.stdout == f"{tmp_path}\nset\n"


def test_descriptors_are_passed_at_their_numbers_and_no_others_are_there() -> None:
    ours, theirs = socket.socketpair()
    above = os.dup2(theirs.fileno(), 200)
    os.set_inheritable(ours.fileno(), True)
    text = (
        f"import os; os.write({above}, b'a'); os.write({theirs.fileno()}, b'b');"
        "print(os.listdir('/proc/self/fd'))"
    )
    with ours, theirs:
        done = run(["-c", text], pass_fds=[above, theirs.fileno()])
        os.close(above)
        assert ours.recv(2) == b"ab", done.stderr
    found = {int(number) for number in done.stdout.strip("[]\n").replace("'", "").split(", ")}
    assert len(found - {0, 1, 2, 200, theirs.fileno()}) <= 1 + 1  # that of the listing
    assert {0, 1, 2, 200} <= found


def test_streams_may_be_files_one_pipe_or_nothing(tmp_path: Path) -> None:
    text = "import sys; print('out', flush=True); print('err', file=sys.stderr); print(sys.stdin.read())"
    done = run(["-c", text], stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
    assert (done.stdout, done.stderr) == ("out\nerr\n\n", "")
    with (tmp_path / "kept").open("w+") as kept:
        run(["-c", text], stdout=kept, stderr=kept.fileno(), input="in")
        kept.seek(0)
        assert kept.read() == "out\nerr\nin\n"


def test_streams_that_modules_have_are_the_programs_and_can_be_configured() -> None:
    text = (
        "import structlog, sys; sys.stdout.reconfigure(errors='replace'); structlog.PrintLogger().msg('said')"
    )
    done = run(["-c", text])
    assert (done.stdout, done.stderr) == ("said\n", "")


def test_long_input_and_output_pass_at_once() -> None:
    text = "import sys; [print(line, end='') or print(line, end='', file=sys.stderr) for line in sys.stdin]"
    lines = "".join(f"{number:08}\n" for number in range(50_000))
    done = run(["-c", text], input=lines)
    assert (done.stdout, done.stderr) == (lines, lines)


def test_input_that_nobody_reads_is_no_error() -> None:
    assert run(["-c", "import os; os.close(0)"], input="x" * 1_000_000).returncode == 0


def test_a_session_of_its_own_can_be_killed_as_a_group() -> None:
    text = "import os; os.fork(); os.write(1, b'%d\\n' % os.getsid(0)); os.read(0, 1)"
    with Program(
        ["-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as program:
        assert {program.stdout.readline(), program.stdout.readline()} == {f"{program.pid}\n"}
        os.killpg(program.pid, signal.SIGKILL)
        assert program.stdout.read() == ""  # also the child has ended
        assert program.wait() == -signal.SIGKILL


def test_a_program_that_takes_too_long_is_killed() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        run(["-c", "import sys, threading; threading.Event().wait()"], timeout=0.05)


def test_waiting_and_signals_are_those_of_a_child() -> None:
    with Program(["-c", "input()"], stdin=subprocess.PIPE) as program:
        assert program.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            program.wait(0.01)
        program.terminate()
        assert program.wait() == -signal.SIGTERM
        program.kill()  # which has no effect any more
        assert program.poll() == -signal.SIGTERM


def test_an_ended_programs_id_is_its_own_until_it_is_waited_for() -> None:
    with Program(["-c", "print(1)"], stdout=subprocess.PIPE) as program:
        with open(os.pidfd_open(program.pid)) as pidfd:
            select.select([pidfd], (), ())  # it has ended
        os.kill(program.pid, 0)
        assert program.stdout.read() == "1\n"


def test_check_raises_what_subprocess_raises() -> None:
    with pytest.raises(subprocess.CalledProcessError) as error:
        run(["-c", "print('out'); raise SystemExit(3)"], check=True)
    assert (error.value.returncode, error.value.stdout) == (3, "out\n")


def test_programs_draw_random_numbers_of_their_own() -> None:
    text = "import random, numpy; print(random.random(), numpy.random.rand())"
    one, other = (run(["-c", text]).stdout.split() for _ in range(2))
    assert not set(one) & set(other)


def test_a_program_computes_on_several_threads() -> None:
    text = "import numpy as n; x = n.ones((512, 512), 'f4'); print((x @ x).sum())"
    assert run(["-c", text]).stdout == new(["-c", text]).stdout


FORKSERVER = (
    LOOK.replace("print(json.dumps({", "found = ({").replace("}))", "})")
    + """
found |= {"argv": [word for word in sys.argv if not word.isdigit()]}
found |= {name: found[name] == os.getpid() for name in ("group", "session")}
found["parent"] = os.getppid() == int(os.environ["PROGRAM"])
with open("/proc/self/comm") as file:
    found["comm"] = file.read()
print(json.dumps(found))
"""
)
STARTS_FORKSERVERS = """
import os, sys
from cudnn_actor.processes.launching import Launcher
os.environ["PROGRAM"] = str(os.getpid())
os.chdir(sys.argv[1])
sys.path.insert(1, sys.argv[1])
for _ in range(2):
    launcher = Launcher(("looks",))
    with open("/dev/null") as file:
        child = launcher.launch("os:isatty", [file.fileno()])
    launcher.close()
"""


@pytest.mark.skipif(WHOLE, reason="all forkservers are executed")
def test_a_spare_process_becomes_what_an_executed_forkserver_is(tmp_path: Path) -> None:
    """The second forkserver of the same program is executed."""
    (tmp_path / "looks.py").write_text(FORKSERVER)
    done = run(["-c", STARTS_FORKSERVERS, tmp_path], spare=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    spare, executed = map(json.loads, done.stdout.splitlines())
    assert executed["parent"]
    assert spare.pop("orig_argv") != executed.pop("orig_argv"), "both were executed"
    assert spare == executed, {name: spare[name] for name in executed if spare[name] != executed[name]}


@pytest.mark.skipif(WHOLE, reason="all forkservers are executed")
def test_a_forkserver_of_this_process_is_what_an_executed_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "looks.py").write_text(FORKSERVER)
    monkeypatch.setenv("PROGRAM", str(os.getpid()))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)

    def look() -> dict[str, Any]:
        launcher = Launcher(("looks",))
        with open(os.devnull) as file:
            child = launcher.launch("os:isatty", [file.fileno()])
        assert child.wait(PATIENCE_S)
        child.close()
        launcher.close()
        found: dict[str, Any] = json.loads(capfd.readouterr().out)
        return found

    forked = look()
    monkeypatch.setattr(server_process, "start_module", interpreter.start_module)
    executed = look()
    assert executed["parent"]
    assert forked.pop("orig_argv") != executed.pop("orig_argv"), "both were executed"
    assert forked == executed, {name: forked[name] for name in executed if forked[name] != executed[name]}


@pytest.mark.skipif(WHOLE, reason="all forkservers are executed")
async def test_the_forkserver_of_a_pools_member_is_its_spare_process() -> None:
    async with spawn_pool(["cpu"], isolation="process") as pool:
        member = pool.statistics().members[0].pid
        [forkserver] = read(f"/proc/{member}/task/{member}/children").split()
        assert "tests.program_server" in read(f"/proc/{forkserver}/cmdline")
        assert read(f"/proc/{forkserver}/comm") == "cudnn-launcher\n"


def read(path: str) -> str:
    return Path(path).read_text()


@pytest.mark.skipif(WHOLE, reason="all forkservers are executed")
@pytest.mark.parametrize("name", ["PYTHONHASHSEED", "LD_PRELOAD"])
def test_a_forkserver_whose_interpreter_would_start_otherwise_is_executed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "looks.py").write_text("import sys; print(sys.orig_argv[1:4])")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv(name, "0" if name == "PYTHONHASHSEED" else "")
    launcher = Launcher(("looks",))
    with open(os.devnull) as file:
        child = launcher.launch("os:isatty", [file.fileno()])
    assert child.wait(PATIENCE_S)
    child.close()
    launcher.close()
    assert capfd.readouterr().out == "['-X', 'faulthandler', '-c']\n"


def test_a_spare_process_that_is_not_needed_ends_with_its_program() -> None:
    program = "import os; print(open(f'/proc/self/task/{os.getpid()}/children').read())"
    done = run(["-W", "error", "-W", "ignore:unclosed file", "-c", program], spare=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, "")
    spares = [int(word) for word in done.stdout.split()]
    assert len(spares) == (0 if WHOLE else 1)
    for spare in spares:
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(spare)
            with os.fdopen(pidfd) as process:
                assert select.select([process], [], [], PATIENCE_S)[0]
