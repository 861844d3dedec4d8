"""cuBLAS's own functions, by ctypes: CuPy's bindings of them refuse to be captured in a CUDA graph.

`PROTOTYPES` has the functions that are used, with their arguments' types; a test
compares it with cuBLAS's headers. Each returns a status; one that is not success
is raised as `EngineFailure`.
https://docs.nvidia.com/cuda/cublas/
"""

from __future__ import annotations

import ctypes
import functools
from ctypes import POINTER, c_int, c_int64, c_longlong, c_size_t, c_void_p
from typing import Any

from cudnn_actor.engines.cuda.library.foreign_functions import (
    Handle,
    bind_functions,
    load_library,
    of_thread,
    status_name,
)

__all__ = ["PROTOTYPES", "WORKSPACE_BYTES", "CublasHandle", "libcublas", "thread_handle"]

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
    library = ctypes.CDLL(load_library("cublas", "cuBLAS"))
    bind_functions(library, PROTOTYPES, status_name(library, "cublasGetStatusName"))
    return library


class CublasHandle(Handle):
    """A handle of cuBLAS. Used by one thread at a time.

    With a workspace of its own, cuBLAS allocates nothing, so its work can be captured. It then gives the
    same bits each time, also while other streams are at work.
    https://docs.nvidia.com/cuda/cublas/#results-reproducibility
    """

    def __init__(self) -> None:
        super().__init__(libcublas(), "cublasCreate_v2", "cublasDestroy_v2")
        self.library.cublasSetMathMode(self.pointer, _DISALLOW_REDUCED_PRECISION_REDUCTION)

    def use(self, stream: int, workspace: int) -> None:
        """Run later work on a stream, with a workspace of `WORKSPACE_BYTES` at that address."""
        self.library.cublasSetStream_v2(self.pointer, stream)  # and forgets the workspace
        self.library.cublasSetWorkspace_v2(self.pointer, workspace, WORKSPACE_BYTES)


def thread_handle() -> CublasHandle:
    """This thread's handle for the current device, made when it is first asked for."""
    return of_thread(CublasHandle)
