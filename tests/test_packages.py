"""What is installed: every package, also from an archive in which the links in `cudnn_actor/` were lost."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOP = ("cudnn_actor", "actors", "protocol", "supervision")
PLUGIN = "pytest_cudnn_actor.py"


def declared() -> dict[str, str]:
    """The packages of `pyproject.toml` and their folders."""
    setuptools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    folders, found = setuptools["package-dir"], {}
    for package in setuptools["packages"]:
        top = next(name for name in sorted(folders, reverse=True) if f"{package}.".startswith(f"{name}."))
        found[package] = folders[top] + package.removeprefix(top).replace(".", "/")
    return found


def test_an_import_brings_neither_structlog_nor_rich_nor_an_engine_nor_attached_processes() -> None:
    program = "import sys, cudnn_actor; print(*sys.modules, *dir(cudnn_actor)); print(cudnn_actor.connect)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    first, last = done.stdout.splitlines()
    modules = set(first.split())
    assert "connect" in modules  # it is a name of the top all the same
    assert last.startswith("<function connect ")
    found = {name.partition(".")[0] for name in modules}
    assert {"numpy", "pykka", "msgspec", "cudnn_actor"} <= found
    assert not found & {"structlog", "rich", "onnx", "cupy", "cudnn", "fastapi", "multiprocessing"}
    engines = ("cpu.engine", "cpu.fast", "cpu.exact", "cuda.engine", "cuda.planning", "cuda.kernels")
    assert not modules & {f"cudnn_actor.engines.{each}" for each in engines}
    assert "cudnn_actor.attached" not in modules


def test_every_folder_of_code_is_a_declared_package() -> None:
    folders = {
        str(Path(folder).relative_to(ROOT))
        for top in TOP
        for folder, _, files in os.walk(ROOT / top)
        if any(name.endswith(".py") for name in files)
    }
    assert sorted(declared().values()) == sorted({*folders, "docs"})


def without_links(archive: Path) -> Path:
    """A copy of what is built from, as some ZIP tools unpack it: each link is a file with a path in it."""
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", PLUGIN):
        shutil.copy(ROOT / name, archive)
    # With what has been compiled, but not with what another process is compiling, and then renames.
    unfinished = shutil.ignore_patterns("*.pyc.*")
    for name in (*TOP, "docs", "editable"):
        shutil.copytree(ROOT / name, archive / name, symlinks=True, ignore=unfinished)
    links = [path for top in ("cudnn_actor", "editable") for path in (archive / top).iterdir()]
    links = [path for path in links if path.is_symlink()]
    assert len(links) == len(TOP) + 2
    for link in links:
        target = str(link.readlink())
        link.unlink()
        link.write_text(target)
    return archive


def built(hook: str, archive: Path, wheels: Path, **environment: str) -> Path:
    """What setuptools builds of an archive, by one of its hooks. `make wheel` has `build` call them."""
    done = subprocess.run(
        [sys.executable, "-c", f"import setuptools.build_meta as s, sys; s.{hook}(sys.argv[1])", str(wheels)],
        capture_output=True,
        text=True,
        check=False,
        cwd=archive,
        env=os.environ | environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = wheels.glob("*.whl")
    return wheel


@pytest.mark.parametrize("kind", ["full", "minimal"])
def test_an_archive_without_links_installs_and_imports(kind: str, tmp_path: Path) -> None:
    pytest.importorskip("setuptools", reason="the wheel is built with it: it is in the group `check`")
    archive, wheels, installed = tmp_path / "archive", tmp_path / "wheels", tmp_path / "installed"
    for folder in (archive, wheels):
        folder.mkdir()
    earlier = archive / "build" / "lib" / "cudnn_actor" / "trials"  # what an earlier build has left there
    earlier.mkdir(parents=True)
    (earlier / "__init__.py").touch()
    (earlier / "removed.py").touch()
    listed = archive / "cudnn_actor.egg-info" / "SOURCES.txt"  # and what it has noted
    listed.parent.mkdir()
    listed.write_text("".join(f"{file.relative_to(ROOT)}\n" for file in (ROOT / "cudnn_actor").rglob("*.py")))
    minimal = {"CUDNN_ACTOR_MINIMAL": "1"} if kind == "minimal" else {}
    zipfile.ZipFile(built("build_wheel", without_links(archive), wheels, **minimal)).extractall(installed)
    assert {file.relative_to(installed) for file in installed.rglob("*.py")} - {Path(PLUGIN)} == {
        Path(package.replace(".", "/"), file.name)
        for package, folder in declared().items()
        if kind == "full" or not package.startswith("cudnn_actor.trials")
        for file in (ROOT / folder).glob("*.py")
    }
    program = (
        "import contextlib, importlib.metadata, importlib.util, sys; "
        "sys.path.insert(0, sys.argv[1]); import cudnn_actor; import cudnn_actor.cli; "
        "[plugin] = importlib.metadata.entry_points(group='pytest11', name='pytest_cudnn_actor'); "
        "assert importlib.util.find_spec(plugin.module).origin.startswith(sys.argv[1]); "
        "assert cudnn_actor.__file__.startswith(sys.argv[1]); print(cudnn_actor.__version__)\n"
        "with contextlib.suppress(SystemExit): cudnn_actor.cli.main(['--help'])\n"
        "sys.exit(cudnn_actor.cli.main(['bench', '--help']))"
    )
    command = [sys.executable, "-I", "-c", program, str(installed)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == (0 if kind == "full" else 2), done.stderr  # 1 if it cannot be imported
    assert ("minimal" in done.stderr) == (kind == "minimal")
    assert ("inject faults" in done.stdout) == (kind == "full")  # of `chaos`, in the list of commands
    pages = {file.name for file in (installed / "cudnn_actor" / "docs").iterdir()}
    assert pages == {file.name for file in (ROOT / "docs").glob("*.md")}


@pytest.mark.parametrize("links", ["links", "no links"])
def test_an_editable_installation_imports_and_has_its_types(links: str, tmp_path: Path) -> None:
    """Type checkers read folders in `.pth` files; they do not run import hooks, which are there without
    links."""
    pytest.importorskip("setuptools", reason="it is in the group `check`")
    archive, wheels, site = tmp_path / "archive", tmp_path / "wheels", tmp_path / "site"
    for folder in (archive, wheels, site):
        folder.mkdir()
    without_links(archive)
    if links == "links":
        in_the_package = [f"cudnn_actor/{top}" for top in (*TOP[1:], "docs")]
        for name in [*in_the_package, "editable/cudnn_actor", f"editable/{PLUGIN}"]:
            (archive / name).unlink()
            (archive / name).symlink_to((ROOT / name).readlink())
    zipfile.ZipFile(built("build_editable", archive, wheels)).extractall(site)
    others = [place for place in sys.path if place and not (Path(place) / "cudnn_actor").exists()]
    program = (
        "import site, sys; site.addsitedir(sys.argv[1]); sys.path += sys.argv[2:]; "
        "import cudnn_actor.protocol; print(cudnn_actor.protocol.__file__); "
        "import importlib.util; assert importlib.util.find_spec('pytest_cudnn_actor')"
    )
    imports = [sys.executable, "-I", "-S", "-c", program, str(site), *others]
    done = subprocess.run(imports, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.stdout.startswith(str(archive)), done.stderr
    static = [line for file in site.glob("*.pth") for line in file.read_text().splitlines()]
    assert (static == [str(archive / "editable")]) == (links == "links")
