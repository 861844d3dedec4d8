"""Temporary folders of a process, and what becomes of those that killed processes have left."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import subprocess
import tempfile
from pathlib import Path

import pytest

from cudnn_actor.processes.own_folder import OwnFolder

from ..forked_programs import Program, run

HOLDS = """
import sys
from cudnn_actor.processes.own_folder import OwnFolder
folder = OwnFolder("test")
print(folder.path, flush=True)
sys.stdin.read()
"""
FORKS = """
import os
from cudnn_actor.processes.own_folder import OwnFolder
folder = OwnFolder("test")
child = os.fork()
if not child:
    folder.remove()
    os._exit(0)
os.waitpid(child, 0)
assert folder.path.is_dir()
folder.remove()
assert not folder.path.exists()
"""

ENDS = """
import os
from cudnn_actor.processes.own_folder import OwnFolder
folder = OwnFolder("test")
for name in ("a", "b", "z"):
    (folder.path / name).touch()
os.unlink = lambda path: os._exit(0)
folder.remove()
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder for temporary files, of this process and of programs."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


def holder() -> Program:
    """A process with such a folder, whose path it writes."""
    return Program(["-c", HOLDS], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def test_a_folder_is_this_user_s_alone_and_goes_with_what_lies_there(temporary: Path) -> None:
    folder = OwnFolder("test")
    assert folder.path.parent == temporary
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    (folder.path / "inner").mkdir()
    (folder.path / "inner" / "file").touch()
    folder.remove()
    folder.remove()
    assert not list(temporary.iterdir())


def test_what_a_killed_process_has_left_goes_when_the_next_one_makes_a_folder(temporary: Path) -> None:
    with holder() as killed, holder() as alive:
        left, used = (Path(each.stdout.readline().strip()) for each in (killed, alive))
        killed.kill()
        killed.wait()
        (left / "file").touch()
        other = OwnFolder("another")
        assert {*temporary.iterdir()} == {left, used, other.path}, "it is for another purpose"
        folder = OwnFolder("test")
        assert {*temporary.iterdir()} == {used, other.path, folder.path}
        folder.remove()
        other.remove()
        alive.communicate()


def test_a_folder_that_nobody_has_any_more_goes_with_the_next_one(temporary: Path) -> None:
    lost = OwnFolder("test").path
    assert lost.exists()
    OwnFolder("test").remove()
    assert not list(temporary.iterdir())


def test_what_no_process_has_locked_stays(temporary: Path) -> None:
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "in-use").touch()
    (temporary / "cudnn-actor-test-link").symlink_to(elsewhere)
    (temporary / "cudnn-actor-test-file").touch()
    (temporary / "cudnn-actor-test-begun").mkdir()  # another process is about to lock it
    before = {*temporary.rglob("*")}
    OwnFolder("test").remove()
    assert {*temporary.rglob("*")} == before


def test_a_folder_in_which_another_process_makes_a_file_meanwhile_goes_with_the_next_one(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = OwnFolder("test")
    unlink = Path.unlink

    def unlink_late(path: Path, *, missing_ok: bool = False) -> None:
        unlink(path, missing_ok=missing_ok)
        (folder.path / "a member's socket").touch()

    with monkeypatch.context() as patches:
        patches.setattr(Path, "unlink", unlink_late)
        folder.remove()
    assert {each.name for each in folder.path.iterdir()} == {"in-use", "a member's socket"}
    OwnFolder("test").remove()
    assert not list(temporary.iterdir())


def test_a_process_that_ends_while_it_removes_its_folder_leaves_the_rest_to_the_next_one(
    temporary: Path,
) -> None:
    run(["-c", ENDS], check=True)
    (left,) = temporary.iterdir()
    assert "in-use" in {each.name for each in left.iterdir()}
    OwnFolder("test").remove()
    assert not list(temporary.iterdir())


def test_a_forked_child_leaves_the_folder_to_its_parent(temporary: Path) -> None:
    run(["-c", FORKS], check=True)
    assert not list(temporary.iterdir())


def test_a_forked_child_that_lives_on_does_not_keep_the_folder(temporary: Path) -> None:
    reading, writing = os.pipe()
    text = HOLDS.replace("sys.stdin.read()", "import os; os.fork() or os.read(int(sys.argv[1]), 1)")
    with Program(["-c", text, str(reading)], stdout=subprocess.PIPE, pass_fds=[reading]) as parent:
        left = Path(parent.stdout.readline().strip())
        parent.wait()
        OwnFolder("test").remove()
        assert not left.exists()
        os.close(writing)
        os.close(reading)


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_will_do(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, "no locks")

    with monkeypatch.context() as patches:
        patches.setattr(fcntl, "flock", refuse)
        folder = OwnFolder("test")
    (folder.path / "file").touch()
    OwnFolder("test").remove()  # another process, which can lock it after all
    assert (folder.path / "file").exists()
    folder.remove()
    assert not list(temporary.iterdir())


def test_a_folder_that_cannot_be_locked_does_not_stay(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EMFILE, "too many")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match="too many"):
        OwnFolder("test")
    assert not list(temporary.iterdir())
