"""What is said where it cannot run, or lacks a package."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from cudnn_actor.extras import install_command

from ..patience import PATIENCE_S
from .terminal import CLONE, python

PROJECT = tomllib.loads((CLONE / "pyproject.toml").read_text())["project"]


@pytest.mark.parametrize("platform", ["darwin", "win32", "freebsd14"])
@pytest.mark.parametrize("what", ["cudnn_actor", "cudnn_actor.protocol", "cudnn_actor.cli"])
def test_elsewhere_than_on_linux_the_import_is_one_clear_sentence(platform: str, what: str) -> None:
    done = python("-c", f"import sys; sys.platform = {platform!r}; import {what}")
    assert done.returncode == 1
    assert done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: cudnn_actor runs on Linux only, and this is {platform}: ")
    assert "WSL" in last


def test_it_is_said_before_anything_else_is_imported() -> None:
    code = """if True:
        import sys
        sys.platform = "darwin"
        before = set(sys.modules)
        try:
            import cudnn_actor
        except ImportError:
            print(*sorted(set(sys.modules) - before))
    """
    assert set(python("-c", code).stdout.split()) <= {"__future__"}


@pytest.mark.parametrize("extra", PROJECT["optional-dependencies"])
def test_in_a_clone_a_missing_package_is_installed_from_there(extra: str) -> None:
    assert install_command(extra) == f'pip install -e "{CLONE}[{extra}]"'


@pytest.mark.parametrize("extra", PROJECT["optional-dependencies"])
def test_installed_from_a_wheel_it_is_installed_by_its_own_name(extra: str, tmp_path: Path) -> None:
    answer = told_where(tmp_path, extra, metadata())
    packages = PROJECT["optional-dependencies"][extra]
    assert answer == "pip install " + " ".join(f'"{package}"' for package in packages)


def test_where_nothing_is_known_of_the_project_the_clone_is_named(tmp_path: Path) -> None:
    assert told_where(tmp_path, "demo", None) == 'pip install -e ".[demo]" in a clone of cudnn-actor'


def metadata() -> str:
    """What a wheel says of itself."""
    lines = [
        f"Metadata-Version: 2.4\nName: cudnn-actor\nVersion: 0\nRequires-Dist: {PROJECT['dependencies'][0]}"
    ]
    for extra, packages in PROJECT["optional-dependencies"].items():
        lines += [f'Requires-Dist: {package}; extra == "{extra}"' for package in packages]
    return "\n".join(lines)


def told_where(site: Path, extra: str, metadata: str | None) -> str:
    """What a package that lies in `site`, and nowhere else, says."""
    (site / "cudnn_actor").mkdir()
    (site / "cudnn_actor" / "__init__.py").touch()
    shutil.copy(CLONE / "cudnn_actor" / "extras.py", site / "cudnn_actor")
    if metadata is not None:
        (site / "cudnn_actor-0.dist-info").mkdir()
        (site / "cudnn_actor-0.dist-info" / "METADATA").write_text(metadata)
    code = f"import sys; sys.path[:] = [{str(site)!r}, *{NEITHER!r}]\n"
    code += f"from cudnn_actor.extras import install_command; print(install_command({extra!r}))"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=True,
    )
    return done.stdout.strip()


NEITHER = [path for path in sys.path if re.search(r"python3\.\d+(\.zip|/lib-dynload)?$", path)]
"""The standard library's folders: no installed project is found there."""


def test_no_text_names_a_package_of_ours_on_an_index() -> None:
    texts = [CLONE / "README.md", *(CLONE / "docs").glob("*.md"), *(CLONE / "cudnn_actor").rglob("*.py")]
    named = [path for path in texts if re.search(r"pip install\s+[\"']?cudnn-actor", path.read_text())]
    assert named == []
