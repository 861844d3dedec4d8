"""Where worker processes find modules: where this process does, whatever stands in `sys.path`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from .. import forked_programs
from ..patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
SPAWN = """
import asyncio, os, pathlib, sys
from cudnn_actor import spawn

async def main():
    async with spawn(device="cpu", isolation="process", max_restarts=0) as gpu:
        print("answered", await gpu.ping())

{before}
asyncio.run(main())
"""
LAUNCH = """
import contextlib, os, sys
from cudnn_actor.processes.launching import Launcher, close_launchers
{before}
launcher = Launcher(("shown_by_a_worker",))
with contextlib.closing(launcher.launch("shown_by_a_worker:show", [])) as child:
    print("worker", child.how_it_ended(60.0), flush=True)
launcher.close()
"""
SHOW = """
import os, sys
def show(descriptors):
    print("path", ascii(sys.path), flush=True)
"""


def program(text: str, before: str, folder: Path, python: str = sys.executable, **places: str) -> list[str]:
    """The lines that a program prints, which is run in a folder; nothing is printed to stderr."""
    places = {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)]), **places}
    done = subprocess.run(
        [python, "-c", text.format(before=before)],
        cwd=folder,
        env={**os.environ, **places},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    "before",
    [
        r"sys.path += [pathlib.Path('/tmp'), b'/tmp', None, 'a\0b', '\ud800', '\udcff']",
        "os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone'); sys.path.insert(0, '')",
        "os.mkdir('else'); os.chdir('else')",
    ],
    ids=["what is no folder", "a working directory that is gone", "another working directory"],
)
def test_whatever_python_tolerates_in_its_search_path_workers_start(before: str, tmp_path: Path) -> None:
    before = f"sys.path.append({str(ROOT)!r}); {before}"
    done = forked_programs.run(["-c", SPAWN.format(before=before)], cwd=tmp_path, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout, done.stderr) == (0, "answered 1\n", "")


def shown_path(before: str, folder: Path) -> list[str]:
    """The search path of a worker of a program that runs in a folder."""
    path, worker = program(LAUNCH, before, folder)
    assert worker == "worker exited with status 0"
    entries: list[str] = eval(path.removeprefix("path "))
    return entries


def test_a_worker_has_the_search_path_of_its_parent_in_its_order(tmp_path: Path) -> None:
    odd = tmp_path / "a:b"
    odd.mkdir()
    (odd / "shown_by_a_worker.py").write_text(SHOW)
    before = rf"sys.path[:] = [{str(odd)!r}, '/nowhere', *sys.path, '/\udcff', '/last']"
    path = shown_path(before, tmp_path)
    assert path[:3] == [str(odd), "/nowhere", str(tmp_path)]
    assert path.index("/\udcff") == path.index("/last") - 1


def test_a_relative_entry_means_the_folder_in_which_the_program_began(tmp_path: Path) -> None:
    (tmp_path / "modules").mkdir()
    (tmp_path / "modules" / "shown_by_a_worker.py").write_text(SHOW)
    path = shown_path("sys.path.insert(0, 'modules'); os.chdir('/')", tmp_path)
    assert path[:2] == [str(tmp_path / "modules"), "/modules"]


@pytest.mark.parametrize(("name", "before"), [("modules", "os.chdir('/')"), ("a:b", "")])
def test_the_package_may_lie_in_the_working_directory_whatever_its_name(
    name: str, before: str, tmp_path: Path
) -> None:
    folder = tmp_path / name
    folder.mkdir()
    for part in ("cudnn_actor", "protocol", "actors", "supervision"):
        (folder / part).symlink_to(ROOT / part)
    others = [place for place in sys.path if place and not os.path.isdir(os.path.join(place, "cudnn_actor"))]
    # Run by a Python that has not installed the package, so that its workers need the folder, too.
    bare = sys._base_executable  # type: ignore[attr-defined]
    places = {"PYTHONPATH": os.pathsep.join(others)}
    assert program(SPAWN, before, folder, python=bare, **places) == ["answered 1"]


def test_the_processes_of_a_service_end_without_a_warning(tmp_path: Path) -> None:
    text = SPAWN.replace("max_restarts=0", "standby=1")
    quiet = text.replace(
        "asyncio.run(main())", "asyncio.run(main(), debug=False)"
    )  # else it tells of slow steps
    assert quiet != text
    program(quiet, "", tmp_path, PYTHONDEVMODE="1")
