"""cuDNN's shared libraries: which the loader would take, and which this process has already.

cuDNN 9 is one library that loads seven others by name. All must be of one release, yet each is looked
for by itself: in `LD_LIBRARY_PATH`, then beside the first, then where the system keeps libraries. A
process may also hold another copy of any of them, which then serves both.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from cudnn_actor.engines.cuda.library import trial_load
from cudnn_actor.processes.interpreter import find_python
from cudnn_actor.protocol.errors import InvalidRequest

__all__ = ["MAIN", "SONAMES", "Library", "Loading", "SearchPath", "find_cudnn", "load_apart", "mapped_cudnn"]

MAIN = "libcudnn.so.9"
_PARTS = ("graph", "ops", "cnn", "adv", "heuristic", "engines_precompiled", "engines_runtime_compiled")
SONAMES = (MAIN, *(f"libcudnn_{part}.so.9" for part in _PARTS))
_NAME = re.compile(r"(libcudnn(?:_[a-z_]+)?\.so\.\d+)((?:\.\d+)*)$")
_LIMIT_S = 60.0
_ELF = b"\x7fELF"


class Library(msgspec.Struct, frozen=True, kw_only=True):
    """One shared library.

    Parameters
    ----------
    name
        What it is loaded as, like "libcudnn_ops.so.9".
    path
        The file itself, links followed.
    version
        As the file's name tells, like "9.19.0"; None where it tells none.
    whole
        Whether the file begins as a shared library does.
    """

    name: str
    path: str
    version: str | None = None
    whole: bool = True

    @property
    def folder(self) -> str:
        """The folder that it lies in."""
        return os.path.dirname(self.path)


class Loading(msgspec.Struct, frozen=True, kw_only=True):
    """What came of loading cuDNN in a process of its own.

    Parameters
    ----------
    error
        Why it could not be loaded; empty for success.
    version
        Its own word, like "9.19.0".
    cuda
        The major version of the CUDA that it was built with.
    failed
        Checks of sub-libraries' versions that failed: the function, and the status it gave.
    mapped
        The libraries that came along.
    """

    error: str = ""
    version: str = ""
    cuda: int = 0
    failed: dict[str, str] = {}
    mapped: tuple[Library, ...] = ()


class SearchPath(msgspec.Struct, frozen=True, kw_only=True):
    """Folders in the order in which they are searched: `LD_LIBRARY_PATH`, Python packages, the system's."""

    first: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    system: tuple[str, ...] = ()

    @classmethod
    def of_this_process(cls, environ: Mapping[str, str] = os.environ) -> SearchPath:
        """As this process searches."""
        site = sysconfig.get_path("purelib")
        toolkits = [environ[name] for name in ("CUDA_PATH", "CUDA_HOME") if environ.get(name)]
        return cls(
            first=tuple(filter(None, environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))),
            packages=tuple(f"{site}/nvidia/{name}/lib" for name in ("cudnn", "cudnn_jit")),
            system=(*(f"{root}/lib64" for root in toolkits), *_system_folders()),
        )

    @property
    def folders(self) -> tuple[str, ...]:
        """All of them."""
        return self.first + self.packages + self.system


def _system_folders() -> Iterator[str]:
    """Where `ld.so` looks, near enough, without asking it: its configuration, then its built-in folders."""
    yield f"{sys.prefix}/lib"
    for configuration in sorted(Path("/etc/ld.so.conf.d").glob("*.conf")):
        try:
            lines = configuration.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        yield from (line.strip() for line in lines if line.startswith("/"))
    yield from ("/lib64", "/usr/lib64", "/lib", "/usr/lib", "/usr/local/cuda/lib64")


def find_cudnn(search: SearchPath) -> tuple[Library, ...]:
    """The libraries that a process would load, the main one first; none where there is no main one.

    The frontend takes the main one from the first of the folders that has it. The others are looked for by
    the dynamic linker: in `LD_LIBRARY_PATH`, the main one's own folder, the system's.
    """
    main = _first(MAIN, search.folders)
    if main is None:
        return ()
    behind = (*search.first, main.folder, *search.system)
    others = (_first(name, behind) for name in SONAMES[1:])
    return (main, *(library for library in others if library is not None))


def _first(name: str, folders: Iterable[str]) -> Library | None:
    for folder in folders:
        path = os.path.join(folder, name)
        if os.path.isfile(path):
            return _library(name, os.path.realpath(path), whole=_is_elf(path))
    return None


def _library(name: str, path: str, *, whole: bool = True) -> Library:
    match = _NAME.search(os.path.basename(path))
    version = f"{match[1].rpartition('.')[2]}{match[2]}" if match and match[2] else None
    return Library(name=name, path=path, version=version, whole=whole)


def _is_elf(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return file.read(len(_ELF)) == _ELF
    except OSError:
        return False


def mapped_cudnn(maps: str | None = None) -> tuple[Library, ...]:
    """The cuDNN libraries that a process has mapped, by its `/proc/PID/maps` (None: this process's)."""
    text = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace") if maps is None else maps
    paths = {line.split(maxsplit=5)[-1] for line in text.splitlines() if "/libcudnn" in line}
    found = ((path, _NAME.search(os.path.basename(path))) for path in sorted(paths))
    return tuple(_library(match[1], path) for path, match in found if match)


def load_apart(path: str) -> Loading:
    """Load cuDNN in a new process and report. Blocks for a moment; never raises for a broken library."""
    try:
        command = [find_python(), "-I", trial_load.__file__, path]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except InvalidRequest as error:
        return Loading(error=f"there is no process to load it in: {error}")
    except subprocess.TimeoutExpired:
        return Loading(error=f"loading it takes more than {_LIMIT_S:g} s")
    if done.returncode:
        return Loading(
            error=f"loading it ends the process with status {done.returncode}: {done.stderr.strip()}"
        )
    return _report(json.loads(done.stdout))


def _report(found: Mapping[str, object]) -> Loading:
    if "error" in found:
        return Loading(error=str(found["error"]))
    said = msgspec.convert(found, _Said)
    number = said.version
    return Loading(
        version=f"{number // 10000}.{number // 100 % 100}.{number % 100}",
        cuda=said.cudart // 1000,
        failed=said.failed,
        mapped=mapped_cudnn(said.maps),
    )


class _Said(msgspec.Struct):
    version: int
    cudart: int
    failed: dict[str, str]
    maps: str
