"""A builder process that is forked ahead is as good as one that is started anew."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .craft import wait_for_exit

ROOT = Path(__file__).parents[3]

PROGRAM = """
import json, os, sys
from cudnn_actor.engines.remote import RemoteBuilder, spare
from tests.engines.remote.craft import Craft, graph, maker_of, MAKE

spare.prefork()
pid = spare._spare.pid
if sys.argv[1] == "kill it":
    os.kill(pid, 9)
builder = RemoteBuilder(MAKE, (), Craft())
builder.open()
if sys.argv[1] == "discard it":
    spare.discard()
if sys.argv[1] == "be killed":
    print(json.dumps({"spare": pid}), flush=True)
    sys.stdin.read()
built = [maker_of(builder.build(graph(size), workspace_limit=None)) for size in (1, 2)]
held = []
if built[0] == pid:
    fds = f"/proc/{pid}/fd"
    held = sorted(os.readlink(f"{fds}/{n}").partition(":")[0] for n in os.listdir(fds))
builder.close()
try:
    os.waitpid(-1, os.WNOHANG)
    left = True
except ChildProcessError:
    left = False
print(json.dumps({"spare": pid, "built": built, "left": left, "held": held, "here": os.getpid()}))
"""


def run(how: str) -> dict[str, Any]:
    """What a process says that forked one ahead, and then had plans built."""
    command = [sys.executable, "-W", "error", "-c", PROGRAM, how]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


def test_the_first_builder_process_is_the_one_that_was_forked_ahead() -> None:
    said = run("use it")
    assert said["built"] == [said["spare"]] * 2
    assert said["held"] == ["/dev/null", "pipe", "pipe", "socket"]
    assert not said["left"]


@pytest.mark.parametrize("how", ["kill it", "discard it"])
def test_without_it_a_process_is_started_anew(how: str) -> None:
    said = run(how)
    first, second = said["built"]
    assert first == second
    assert first not in (said["spare"], said["here"])
    assert not said["left"]


def test_one_that_nobody_has_used_does_not_outlive_its_parent() -> None:
    command = [sys.executable, "-c", PROGRAM, "be killed"]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = json.loads(parent.stdout.readline())["spare"]
        parent.send_signal(signal.SIGKILL)
        wait_for_exit(pid)
