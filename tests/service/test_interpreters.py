"""In a program that is no Python, processes of a service are never that program once more."""

from __future__ import annotations

import stat
import sys
from pathlib import Path

import pytest

from .. import forked_programs
from ..patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
PROGRAM = """
import asyncio, sys
sys.executable, sys._base_executable = sys.argv[1], sys.argv[1]
if sys.argv[2] == "frozen":
    sys.frozen = True
from cudnn_actor import InvalidRequest, spawn

async def main(options):
    try:
        async with spawn(**options) as gpu:
            print("said", gpu._service.isolation, await gpu.ping())
    except InvalidRequest as error:
        print("said", error.field, error)

for options in sys.argv[3:]:
    asyncio.run(main(eval(options)))
"""


@pytest.fixture
def application(tmp_path: Path) -> Path:
    """A program that notes that it was started, and is what `sys.executable` says."""
    path = tmp_path / "application"
    path.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\nexit 1\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def said_by(application: Path, kind: str, **options: object) -> str:
    """What a program says that spawns a service; it has not been started a second time."""
    (said,) = said_of_each(application, kind, options)
    return said


def said_of_each(application: Path, kind: str, *services: dict[str, object]) -> list[str]:
    """The same of several services, one after the other."""
    done = forked_programs.run(
        ["-c", PROGRAM, application, kind, *map(repr, services)], cwd=ROOT, timeout=PATIENCE_S
    )
    assert done.returncode == 0, done.stderr
    assert not (application.parent / "started").exists()
    return [line[len("said ") :] for line in done.stdout.splitlines() if line.startswith("said ")]


def test_where_python_is_embedded_its_own_installation_runs_the_processes(application: Path) -> None:
    said = said_by(application, "embedded", device="cpu", isolation="process")
    assert said == "process 1"


def test_a_frozen_application_is_refused_worker_processes_in_plain_words(application: Path) -> None:
    said = said_by(application, "frozen", device="cpu", isolation="process")
    assert said.startswith("executable ")
    assert "frozen application" in said
    assert 'isolation="thread"' in said


def test_a_frozen_application_has_threads(application: Path) -> None:
    services: list[dict[str, object]] = [
        {"device": "cpu"},
        {"device": "cpu", "isolation": "thread"},
        {"isolation": "thread"},
    ]
    assert said_of_each(application, "frozen", *services) == 3 * ["thread 1"]


@pytest.mark.parametrize("kind", ["frozen", "embedded"])
def test_a_python_that_is_given_runs_the_processes(application: Path, kind: str) -> None:
    said = said_by(application, kind, device="cpu", isolation="process", executable=sys.executable)
    assert said == "process 1"


def test_a_python_of_another_version_is_named_as_one(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.version_info = (3, 9, 1, 'final', 0)")
    other = tmp_path / "python3.9"
    other.write_text(f'#!/bin/sh\nPYTHONPATH="{tmp_path}" exec "{sys.executable}" "$@"\n')
    other.chmod(other.stat().st_mode | stat.S_IXUSR)
    options = {"device": "cpu", "isolation": "process", "executable": str(other), "max_restarts": 0}
    done = forked_programs.run(
        ["-c", PROGRAM, sys.executable, "", repr(options)], cwd=ROOT, timeout=PATIENCE_S
    )
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert f"run by {other}, which is not Python {here}, as this process is" in done.stderr


def test_a_python_that_has_not_what_it_needs_is_named(application: Path) -> None:
    fails = {"executable": str(application), "max_restarts": 0}
    words = ["-c", PROGRAM, sys.executable, "", repr({"isolation": "process", **fails})]
    done = forked_programs.run(words, cwd=ROOT, timeout=PATIENCE_S)
    assert f"the forkserver exited with status 1, run by {application}" in done.stderr
