"""cuBLAS's own functions, by ctypes: CuPy's bindings of them refuse to be captured in a CUDA graph.

`PROTOTYPES` has the functions that are used, with their arguments' types; a test
compares it with cuBLAS's headers. Each returns a status; one that is not success
is raised as `EngineFailure`.
https://docs.nvidia.com/cuda/cublas/
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import threading
import weakref
from ctypes import POINTER, c_char_p, c_int, c_int64, c_longlong, c_size_t, c_void_p
from typing import Any, TypeVar

from cudnn_actor.engines.base import EngineFailure
from cudnn_actor.engines.cuda.library.libraries import libraries

__all__ = ["PROTOTYPES", "WORKSPACE_BYTES", "CublasHandle", "libcublas", "of_thread", "thread_handle"]

_OPERANDS = (c_int, c_int, c_int64, c_int64, c_int64, c_void_p)
"""The C types of a product's first parameters: what is transposed, the sizes, and the factor."""
PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cublasCreate_v2": (POINTER(c_void_p),),
    "cublasDestroy_v2": (c_void_p,),
    "cublasSetMathMode": (c_void_p, c_int),
    "cublasSetStream_v2": (c_void_p, c_void_p),
    "cublasSetWorkspace_v2": (c_void_p, c_void_p, c_size_t),
    "cublasGemmEx_64": (
        c_void_p,
        *_OPERANDS,
        *(c_void_p, c_int, c_int64),
        *(c_void_p, c_int, c_int64, c_void_p),
        *(c_void_p, c_int, c_int64),
        *(c_int, c_int),
    ),
    "cublasGemmStridedBatchedEx_64": (
        c_void_p,
        *_OPERANDS,
        *(c_void_p, c_int, c_int64, c_longlong),
        *(c_void_p, c_int, c_int64, c_longlong, c_void_p),
        *(c_void_p, c_int, c_int64, c_longlong),
        *(c_int64, c_int, c_int),
    ),
}
"""Each function's arguments. Handles, streams and pointers to anything are `c_void_p`, enums `c_int`."""
WORKSPACE_BYTES = 32 << 20
"""The workspace that NVIDIA recommends for Hopper and later; less is enough for earlier GPUs."""
_DISALLOW_REDUCED_PRECISION_REDUCTION = 16
"""cublasMath_t: the default, but partial sums of half types are kept in float32."""


@functools.cache
def libcublas() -> Any:
    """The library that CuPy uses too. Raises `EngineFailure` if there is none."""
    pathfinder: Any = importlib.import_module("cuda.pathfinder")  # CuPy's own way to find it
    try:
        library = ctypes.CDLL(pathfinder.load_nvidia_dynamic_lib("cublas").abs_path)
    except (RuntimeError, OSError) as error:
        raise EngineFailure("CUBLAS_STATUS_NOT_INITIALIZED", f"cuBLAS cannot be loaded: {error}") from error
    library.cublasGetStatusName.restype = c_char_p
    library.cublasGetStatusName.argtypes = (c_int,)

    def check(status: int, function: Any, _: Any) -> int:
        if status:
            raise EngineFailure(library.cublasGetStatusName(status).decode(), function.__name__)
        return status

    for name, arguments in PROTOTYPES.items():
        function = getattr(library, name)
        function.argtypes, function.restype, function.errcheck = arguments, c_int, check
    return library


class CublasHandle:
    """A handle of cuBLAS for the current device, destroyed with this object. Used by one thread at a time.

    With a workspace of its own, cuBLAS allocates nothing, so its work can be captured. It then gives the
    same bits each time, also while other streams are at work.
    https://docs.nvidia.com/cuda/cublas/#results-reproducibility
    """

    def __init__(self) -> None:
        self.library = libcublas()
        self.pointer = c_void_p()
        self.library.cublasCreate_v2(ctypes.byref(self.pointer))
        destroy = ctypes.CFUNCTYPE(c_int, c_void_p)(("cublasDestroy_v2", self.library))
        weakref.finalize(self, destroy, self.pointer).atexit = False  # it would wait for a device that hangs
        self.library.cublasSetMathMode(self.pointer, _DISALLOW_REDUCED_PRECISION_REDUCTION)

    def use(self, stream: int, workspace: int) -> None:
        """Run what follows on a stream, with a workspace of `WORKSPACE_BYTES` at that address."""
        self.library.cublasSetStream_v2(self.pointer, stream)  # and forgets the workspace
        self.library.cublasSetWorkspace_v2(self.pointer, workspace, WORKSPACE_BYTES)


_of_thread = threading.local()
H = TypeVar("H")


def of_thread(kind: type[H]) -> H:
    """This thread's handle of a kind for the current device, made when it is first asked for."""
    key = kind, int(libraries().runtime.getDevice())
    handles: dict[tuple[type[H], int], H] = _of_thread.__dict__.setdefault("handles", {})
    if key not in handles:
        handles[key] = kind()
    return handles[key]


def thread_handle() -> CublasHandle:
    """This thread's handle for the current device, made when it is first asked for."""
    return of_thread(CublasHandle)
