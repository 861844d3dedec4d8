"""cuDNN's shared libraries: which ones the loader would load, and which ones this process has loaded.

cuDNN 9 is one library that loads seven others by name. All must be of one release, but each is searched
for separately: in `LD_LIBRARY_PATH`, then beside the main library, then in the system's folders. If the
process has already loaded another copy of one of them, that copy is used instead.
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
from cudnn_actor.engines.cuda.library.versions import version_text
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
        The name by which it is loaded, like "libcudnn_ops.so.9".
    path
        The path of the file, links followed.
    version
        The version in the file's name, like "9.19.0"; None if the name has none.
    whole
        Whether the file starts like a shared library (an ELF header).
    """

    name: str
    path: str
    version: str | None = None
    whole: bool = True

    @property
    def folder(self) -> str:
        """The folder that contains the file."""
        return os.path.dirname(self.path)


class Loading(msgspec.Struct, frozen=True, kw_only=True):
    """The result of loading cuDNN in a separate process.

    Parameters
    ----------
    error
        Why it could not be loaded; empty for success.
    version
        The version that cuDNN reports, like "9.19.0".
    cuda
        The major version of the CUDA that it was built with.
    failed
        Failed checks of sub-libraries' versions: the function, and the status it returned.
    mapped
        The cuDNN libraries that the process had loaded then.
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
        """The folders that this process searches."""
        site = sysconfig.get_path("purelib")
        toolkits = [environ[name] for name in ("CUDA_PATH", "CUDA_HOME") if environ.get(name)]
        return cls(
            first=tuple(filter(None, environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))),
            packages=tuple(f"{site}/nvidia/{name}/lib" for name in ("cudnn", "cudnn_jit")),
            system=(*(f"{root}/lib64" for root in toolkits), *_system_folders()),
        )

    @property
    def folders(self) -> tuple[str, ...]:
        """All folders, in order."""
        return self.first + self.packages + self.system


def _system_folders() -> Iterator[str]:
    """Approximately the folders that `ld.so` searches: those in its configuration, then the built-in ones."""
    yield f"{sys.prefix}/lib"
    for configuration in sorted(Path("/etc/ld.so.conf.d").glob("*.conf")):
        try:
            lines = configuration.read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            continue
        yield from (line.strip() for line in lines if line.startswith("/"))
    yield from ("/lib64", "/usr/lib64", "/lib", "/usr/lib", "/usr/local/cuda/lib64")


def find_cudnn(search: SearchPath) -> tuple[Library, ...]:
    """The libraries that a process would load, the main one first; empty if there is no main one.

    The frontend loads the main library from the first folder that has it. The dynamic linker searches for the
    others in `LD_LIBRARY_PATH`, the main library's own folder and the system's folders.
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
    """The cuDNN libraries that a process has loaded. `maps`: its `/proc/PID/maps`; None for this process."""
    text = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace") if maps is None else maps
    paths = {line.split(maxsplit=5)[-1] for line in text.splitlines() if "/libcudnn" in line}
    found = ((path, _NAME.search(os.path.basename(path))) for path in sorted(paths))
    return tuple(_library(match[1], path) for path, match in found if match)


def load_apart(path: str) -> Loading:
    """Load cuDNN in a new process and report the result. Blocks briefly; a broken library does not raise."""
    try:
        command = [find_python(), "-I", trial_load.__file__, path]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_S, check=False)
    except (InvalidRequest, OSError) as error:
        return Loading(error=f"no process could be started to load it in: {error}")
    except subprocess.TimeoutExpired:
        return Loading(error=f"loading it takes more than {_LIMIT_S:g} s")
    if done.returncode:
        return Loading(
            error=f"loading it ends the process with status {done.returncode}: {done.stderr.strip()}"
        )
    return _loading(json.loads(done.stdout))


def _loading(found: Mapping[str, object]) -> Loading:
    """The result, by what `trial_load` has printed."""
    if "error" in found:
        return Loading(error=str(found["error"]))
    report = msgspec.convert(found, _Report)
    return Loading(
        version=version_text(report.version),
        cuda=report.cudart // 1000,
        failed=report.failed,
        mapped=mapped_cudnn(report.maps),
    )


class _Report(msgspec.Struct):
    """What `trial_load` prints of a cuDNN that it could load."""

    version: int
    cudart: int
    failed: dict[str, str]
    maps: str
