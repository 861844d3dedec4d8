"""Functions of CUDA's libraries by ctypes: loading a library, its prototypes, statuses and handles."""

from __future__ import annotations

import ctypes
import importlib
import threading
import weakref
from collections.abc import Callable, Mapping
from ctypes import c_char_p, c_int, c_void_p
from typing import Any, TypeVar

from cudnn_actor.engines.base import EngineFailure
from cudnn_actor.engines.cuda.library.libraries import libraries

__all__ = ["Handle", "bind_functions", "load_library", "of_thread", "status_name"]

_of_thread = threading.local()
H = TypeVar("H")


def load_library(name: str, title: str) -> str:
    """Load one of CUDA's libraries, and return its path. Raises `EngineFailure`, which names the `title`."""
    try:
        pathfinder: Any = importlib.import_module("cuda.pathfinder")  # CuPy's own way to find it
        return str(pathfinder.load_nvidia_dynamic_lib(name).abs_path)
    except (ImportError, RuntimeError, OSError) as error:
        raise EngineFailure("CUBLAS_STATUS_NOT_INITIALIZED", f"{title} cannot be loaded: {error}") from error


def status_name(library: Any, function: str) -> Callable[[int], str]:
    """A function that returns the name of a library's status, by one of the library's own functions."""
    call = getattr(library, function)
    call.restype, call.argtypes = c_char_p, (c_int,)
    return lambda status: str(call(status).decode())


def bind_functions(
    library: Any,
    prototypes: Mapping[str, tuple[Any, ...]],
    name: Callable[[int], str],
    message: Callable[[], str] = str,
) -> None:
    """Give a library's functions their arguments' types. A status that is not success raises `EngineFailure`.

    `name`: the name of a status. `message`: the library's last message, if it has any.
    """

    def check(status: int, function: Any, _: Any) -> int:
        if status:
            text = message()
            raise EngineFailure(name(status), f"{function.__name__}: {text}" if text else function.__name__)
        return status

    for called, arguments in prototypes.items():
        function = getattr(library, called)
        function.argtypes, function.restype, function.errcheck = arguments, c_int, check


class Handle:
    """A handle of a library for the current device, destroyed with this object.

    Parameters
    ----------
    library
        The library, by ctypes.
    create, destroy
        The names of its functions that create and destroy a handle.
    """

    def __init__(self, library: Any, create: str, destroy: str) -> None:
        self.library, self.pointer = library, c_void_p()
        getattr(library, create)(ctypes.byref(self.pointer))
        end = ctypes.CFUNCTYPE(c_int, c_void_p)((destroy, library))
        weakref.finalize(self, end, self.pointer).atexit = False  # it would wait for a device that hangs


def of_thread(kind: type[H]) -> H:
    """This thread's handle of a kind for the current device, made when it is first asked for."""
    key = kind, int(libraries().runtime.getDevice())
    handles: dict[tuple[type[H], int], H] = _of_thread.__dict__.setdefault("handles", {})
    if key not in handles:
        handles[key] = kind()
    return handles[key]
