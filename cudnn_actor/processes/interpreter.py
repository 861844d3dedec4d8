"""Finds and starts the Python that runs a service's processes: the forkserver, and processes that query a
driver.

Such a process imports what this one does, from the same places, whatever stands in `sys.path`. So its program
sets `sys.path` itself, before it imports anything. `PYTHONPATH` could not name all of them: a colon separates
its entries, and the Python would search them for its own modules first, although it may be of another
version.

`sys.executable` is not always a Python. In a frozen application (PyInstaller) it is the application, which
would start itself again. If Python is embedded (uWSGI), it is the embedding program, or empty.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import TypeGuard

from cudnn_actor.protocol.errors import InvalidRequest

__all__ = [
    "OTHER_VERSION",
    "VERSION",
    "environment",
    "find_python",
    "python_command",
    "search_path",
    "start_module",
]

VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
_FLAGS = ("-X", "faulthandler")
_RUN = """\
import gc, importlib
gc.disable()
run = importlib.import_module(sys.argv.pop(1)).main
gc.enable()
run()
"""
"""Nearly all that imports make stays: to look for garbage among it would take a seventh of their time."""
OTHER_VERSION = 79
"""The exit status of a Python that is not of this process's version."""
_PREAMBLE = """\
import sys
if "%d.%d" % sys.version_info[:2] != {version!r}: sys.exit({other_version})
sys.path[:] = {first} + [place for place in sys.path if place and place not in {first}]
"""


def _working_directory() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # it has been removed
        return None


_BEGAN_IN = _working_directory()
"""The working directory when this package was imported, perhaps through a relative entry of `sys.path`."""


def python_command(
    program: str,
    *arguments: str,
    flags: Sequence[str] = (),
    executable: str | os.PathLike[str] | None = None,
) -> list[str]:
    """The command of a Python that runs a program, and imports modules from where this process does.

    It exits with `OTHER_VERSION` if it is of another version, for which these modules are not. A Python that
    serves a frozen application uses its own modules.

    Raises
    ------
    InvalidRequest
        There is no Python: see `find_python`.
    """
    first = [] if getattr(sys, "frozen", False) else list(search_path())
    preamble = _PREAMBLE.format(version=VERSION, other_version=OTHER_VERSION, first=ascii(first))
    return [find_python(executable), *flags, "-c", preamble + program, *arguments]


def start_module(
    module: str, *arguments: str, descriptors: Sequence[int], executable: str | None
) -> tuple[subprocess.Popen[bytes], int]:
    """Start a Python that runs a module's `main`, in a session of its own. Blocks for the exec.

    Of this process's descriptors it gets these, 1 and 2, and no others.

    Returns
    -------
    subprocess.Popen, int
        The process, and its pidfd, which the caller must close.

    Raises
    ------
    OSError, InvalidRequest
        The system starts no process, or there is no Python. Nothing is left running.
    """
    process = subprocess.Popen(
        python_command(_RUN, module, *arguments, flags=_FLAGS, executable=executable),
        stdin=subprocess.DEVNULL,
        pass_fds=tuple(descriptors),
        close_fds=True,
        start_new_session=True,
        env=environment(),
    )
    try:
        return process, os.pidfd_open(process.pid)
    except OSError:
        process.kill()
        process.wait()
        raise


def search_path() -> Iterator[str]:
    """The entries of `sys.path` that can be folders, absolute. Python ignores those that are not text, too.

    A relative entry means another folder after a change of the working directory. This process has imported
    from the one that it meant before. So both are searched, that one first.
    """
    here = _working_directory()
    for entry in sys.path:
        if not _can_be_a_path(entry):
            continue
        if os.path.isabs(entry):
            yield entry
            continue
        for folder in dict.fromkeys((_BEGAN_IN, here)):
            if folder is not None:
                yield os.path.join(folder, entry) if entry else folder


def find_python(executable: str | os.PathLike[str] | None = None) -> str:
    """The interpreter for processes of a service: `executable` if it is given, else one like this process's.

    The latter is `sys.executable` if its name is that of an interpreter, else the interpreter of the
    installation that this process uses. A frozen application has none, because its modules are in no
    installation.

    Raises
    ------
    InvalidRequest
        There is none. The error suggests `executable=` and `isolation="thread"`.
    """
    if executable is not None:
        return os.fspath(executable)
    if getattr(sys, "frozen", False):
        raise _refusal("is a frozen application, not a Python interpreter that can run worker processes")
    for path in _candidates():
        return path
    prefixes = f"{sys.exec_prefix} or {sys.base_exec_prefix}"
    raise _refusal(f"is not a Python interpreter, and none was found in {prefixes}")


def _can_be_a_path(entry: object) -> TypeGuard[str]:
    try:
        return isinstance(entry, str) and b"\0" not in os.fsencode(entry)
    except UnicodeEncodeError:
        return False


def environment() -> dict[str, str]:
    """The environment for such a process: this one's.

    But a Python that serves a frozen application cannot use the libraries that PyInstaller has unpacked; so
    the earlier `LD_LIBRARY_PATH`, which PyInstaller has saved, is restored.
    """
    found = dict(os.environ)
    if not getattr(sys, "frozen", False):
        return found
    if (original := found.pop("LD_LIBRARY_PATH_ORIG", None)) is not None:
        found["LD_LIBRARY_PATH"] = original
    elif hasattr(sys, "_MEIPASS"):
        found.pop("LD_LIBRARY_PATH", None)
    return found


def _candidates() -> Iterator[str]:
    for path in (sys.executable, getattr(sys, "_base_executable", None)):
        if path and re.match(r"\.?(python|pypy)", os.path.basename(path)):
            yield path
    for prefix in (sys.exec_prefix, sys.base_exec_prefix):
        for name in (f"python{VERSION}", "python3", "python"):
            path = os.path.join(prefix, "bin", name)
            if os.access(path, os.X_OK):
                yield path


def _refusal(problem: str) -> InvalidRequest:
    return InvalidRequest(
        field="executable",
        value=None,
        problem=f"is not given, and {sys.executable or 'this process'} {problem}",
        fix=f"give the path of a Python {VERSION} that has this package and its dependencies, or use "
        'isolation="thread"',
    )
