"""Libraries that tests compile for the host, and what an earlier run has left of them."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from .. import forked_programs
from . import host_cuda

CODE = 'extern "C" int answer() { return 42; }'
READS = 'extern "C" int read(const char* bytes, int offset) { return *(const int*)(bytes + offset); }'
READING = """
import pathlib, sys, types
from tests.engines import host_cuda
host_cuda.PATHS.append(types.SimpleNamespace(getbasetemp=lambda: pathlib.Path(sys.argv[1])))
read = host_cuda.library(sys.argv[2]).read
for offset in (4, 2):
    print(offset, read(bytes(8), offset), flush=True)
"""


class Runs:
    """Runs of pytest: each has a folder of its own. A compiler that gives all of them one library."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._folder, self._patch = folder, monkeypatch
        self.compiled = 0
        self._made: Path | None = None
        self._run = subprocess.run
        monkeypatch.setattr(host_cuda, "KEPT", folder / "build" / "kept")
        monkeypatch.setattr(subprocess, "run", self._compile)

    def _compile(self, command: list[str], **options: Any) -> Any:
        if "-v" in command:
            return self._run(command, **options)
        self.compiled += 1
        into = options["cwd"] / "kernels.so"
        if self._made is None:
            self._run(command, **options)
            self._made = self._folder / "made.so"
            shutil.copyfile(into, self._made)
        shutil.copyfile(self._made, into)
        return None

    def ask(self, run: str) -> int:
        """What the library says in a run."""
        folder = self._folder / run / "worker"
        folder.mkdir(parents=True, exist_ok=True)
        self._patch.setattr(host_cuda, "PATHS", [SimpleNamespace(getbasetemp=lambda: folder)])
        return int(host_cuda.library(CODE).answer())


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runs:
    if shutil.which("g++") is None:
        pytest.skip("there is no C++ compiler")
    return Runs(tmp_path, monkeypatch)


def test_an_access_that_is_not_aligned_ends_the_process(tmp_path: Path) -> None:
    if shutil.which("g++") is None:
        pytest.skip("there is no C++ compiler")
    folder = tmp_path / "worker"
    folder.mkdir()
    done = forked_programs.run(["-c", READING, folder, READS])
    assert done.stdout == "4 0\n", done.stderr
    assert done.returncode < 0


def test_a_library_is_compiled_by_the_first_run_alone(runs: Runs) -> None:
    assert [runs.ask("first"), runs.ask("first"), runs.ask("second")] == [42, 42, 42]
    assert runs.compiled == 1
    assert [each.suffix for each in host_cuda.KEPT.iterdir()] == [".so"]


@pytest.mark.parametrize("left", [0, 1, 40, 1000, -1])
def test_what_is_left_in_part_is_compiled_again(runs: Runs, left: int) -> None:
    runs.ask("first")
    (kept,) = host_cuda.KEPT.iterdir()
    whole = kept.read_bytes()
    kept.write_bytes(whole[:left])
    assert runs.ask("second") == 42
    assert kept.read_bytes() == whole
    assert (runs.ask("third"), runs.compiled) == (42, 2)


def test_another_compiler_or_option_finds_nothing_of_the_first(
    runs: Runs, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs.ask("first")
    monkeypatch.setattr(host_cuda, "_OPTIONS", ("-std=c++20", "-shared", "-fPIC"))
    runs.ask("second")
    monkeypatch.setattr(host_cuda, "_version_of", lambda _: "another version")
    runs.ask("third")
    assert (runs.compiled, len([*host_cuda.KEPT.iterdir()])) == (3, 3)


def test_where_nothing_can_be_left_each_run_compiles(runs: Runs) -> None:
    host_cuda.KEPT.parent.write_text("a file, not a folder")
    assert (runs.ask("first"), runs.ask("second"), runs.compiled) == (42, 42, 2)
    host_cuda.forget_unused()


def test_what_no_run_has_used_for_a_week_is_removed(runs: Runs) -> None:
    runs.ask("first")
    (kept,) = host_cuda.KEPT.iterdir()
    unused = kept.with_name("unused.so")
    shutil.copyfile(kept, unused)
    for each in (kept, unused):
        os.utime(each, (time.time() - 8 * 24 * 3600.0,) * 2)
    runs.ask("second")
    host_cuda.forget_unused()
    assert ([*host_cuda.KEPT.iterdir()], runs.compiled) == ([kept], 1)
