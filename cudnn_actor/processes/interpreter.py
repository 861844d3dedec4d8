"""Which Python runs the processes of a service: forkserver, builder process, and those that query a driver.

`sys.executable` is not always a Python. In a frozen application (PyInstaller) it is the application, which
would start itself again. If Python is embedded (uWSGI), it is the embedding program, or empty.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator

from cudnn_actor.protocol.errors import InvalidRequest

__all__ = ["environment", "find_python"]

_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


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
        raise _refused("is a frozen application, not a Python interpreter that can run worker processes")
    for path in _candidates():
        return path
    prefixes = f"{sys.exec_prefix} or {sys.base_exec_prefix}"
    raise _refused(f"is not a Python interpreter, and none was found in {prefixes}")


def environment() -> dict[str, str]:
    """The environment for such a process. It finds its modules where this process does, in the same order.

    Another interpreter cannot use the modules of a frozen application, and needs its own. Nor can it use the
    libraries that PyInstaller has unpacked; so the earlier `LD_LIBRARY_PATH`, which PyInstaller has saved, is
    restored.
    """
    found = dict(os.environ)
    if not getattr(sys, "frozen", False):
        found["PYTHONPATH"] = os.pathsep.join(place or os.getcwd() for place in sys.path)
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
        for name in (f"python{_VERSION}", "python3", "python"):
            path = os.path.join(prefix, "bin", name)
            if os.access(path, os.X_OK):
                yield path


def _refused(problem: str) -> InvalidRequest:
    return InvalidRequest(
        field="executable",
        value=None,
        problem=f"is not given, and {sys.executable or 'this process'} {problem}",
        fix=f"give the path of a Python {_VERSION} that has this package and its dependencies, or use "
        'isolation="thread"',
    )
