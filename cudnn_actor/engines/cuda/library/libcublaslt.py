"""cuBLASLt's functions, by ctypes: products of matrices with epilogues, each by a chosen algorithm.

`PROTOTYPES` has the functions that are used, with their arguments' types, and the enums
the numbers that the headers give them; a test compares both with the headers. Each
function returns a status; one that is not success is raised as `EngineFailure`.
https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api
"""

from __future__ import annotations

import ctypes
import enum
import functools
import weakref
from ctypes import POINTER, c_int, c_int64, c_size_t, c_uint64, c_void_p
from typing import Any

from cudnn_actor.engines.base import EngineFailure
from cudnn_actor.engines.cuda.library.foreign_functions import (
    Handle,
    bind_functions,
    load_library,
    of_thread,
    status_name,
)

__all__ = [
    "ALGORITHM_BYTES",
    "DESCRIBING",
    "PROTOTYPES",
    "Attribute",
    "Described",
    "Epilogue",
    "Found",
    "Layout",
    "LtHandle",
]
__all__ += ["SUMS_IN_FLOAT32", "Preference", "libcublaslt", "thread_lt_handle", "version"]

ALGORITHM_BYTES = 64
"""The size of a cublasLtMatmulAlgo_t."""
_SET = (c_void_p, c_int, c_void_p, c_size_t)
PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cublasLtCreate": (POINTER(c_void_p),),
    "cublasLtDestroy": (c_void_p,),
    "cublasLtMatmulDescCreate": (POINTER(c_void_p), c_int, c_int),
    "cublasLtMatmulDescSetAttribute": _SET,
    "cublasLtMatmulDescDestroy": (c_void_p,),
    "cublasLtMatrixLayoutCreate": (POINTER(c_void_p), c_int, c_uint64, c_uint64, c_int64),
    "cublasLtMatrixLayoutSetAttribute": _SET,
    "cublasLtMatrixLayoutDestroy": (c_void_p,),
    "cublasLtMatmulPreferenceCreate": (POINTER(c_void_p),),
    "cublasLtMatmulPreferenceSetAttribute": _SET,
    "cublasLtMatmulPreferenceDestroy": (c_void_p,),
    "cublasLtMatmulAlgoGetHeuristic": (*(c_void_p,) * 7, c_int, c_void_p, POINTER(c_int)),
    "cublasLtMatmul": (*(c_void_p,) * 14, c_size_t, c_void_p),
}
"""Each function's arguments. Handles, descriptors and pointers to anything are `c_void_p`, enums `c_int`."""
DESCRIBING = frozenset(
    f"cublasLt{kind}{how}"
    for kind in ("MatmulDesc", "MatrixLayout", "MatmulPreference")
    for how in ("Create", "SetAttribute", "Destroy")
)
"""The functions that only write to a descriptor, which takes less than a microsecond: they keep the
interpreter's lock. A call that releases it may have to wait for 5 ms until another thread gives it back."""


class Attribute(enum.IntEnum):
    """cublasLtMatmulDescAttributes_t."""

    TRANSA = 3
    TRANSB = 4
    EPILOGUE = 7
    BIAS_POINTER = 8


class Layout(enum.IntEnum):
    """cublasLtMatrixLayoutAttribute_t."""

    BATCH_COUNT = 5
    STRIDED_BATCH_OFFSET = 6


class Preference(enum.IntEnum):
    """cublasLtMatmulPreferenceAttributes_t."""

    MAX_WORKSPACE_BYTES = 1
    REDUCTION_SCHEME_MASK = 3
    MIN_ALIGNMENT_A_BYTES = 5
    MIN_ALIGNMENT_B_BYTES = 6
    MIN_ALIGNMENT_C_BYTES = 7
    MIN_ALIGNMENT_D_BYTES = 8


class Epilogue(enum.IntFlag):
    """cublasLtEpilogue_t: what is done to sums before they are rounded. `GELU` is the form with tanh."""

    DEFAULT = 1
    RELU = 2
    BIAS = 4
    GELU = 32


SUMS_IN_FLOAT32 = 2
"""CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE: parts of sums have the type that is computed in, and their own
memory."""


class Found(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = [
        ("algorithm", c_uint64 * (ALGORITHM_BYTES // 8)),
        ("workspace", c_size_t),
        ("state", c_int),
        ("waves", ctypes.c_float),
        ("reserved", c_int * 4),
    ]


@functools.cache
def libcublaslt() -> Any:
    """The library that cuBLAS is made of. Raises `EngineFailure` if there is none."""
    path = load_library("cublasLt", "cuBLASLt")
    library, keeping_lock = ctypes.CDLL(path), ctypes.PyDLL(path)
    library.cublasLtGetVersion.restype = c_size_t
    for name in DESCRIBING:
        setattr(library, name, getattr(keeping_lock, name))
    bind_functions(library, PROTOTYPES, status_name(library, "cublasLtGetStatusName"))
    return library


def version() -> int:
    """The library's version, like 131000; 0 if there is none. Its algorithms mean nothing to another one."""
    try:
        return int(libcublaslt().cublasLtGetVersion())
    except EngineFailure:
        return 0


class Described:
    """A descriptor of the library's, of a kind such as "MatrixLayout": it is destroyed with this object."""

    def __init__(self, kind: str, *arguments: int) -> None:
        library = libcublaslt()
        self.pointer = c_void_p()
        self._set = getattr(library, f"cublasLt{kind}SetAttribute")
        getattr(library, f"cublasLt{kind}Create")(ctypes.byref(self.pointer), *arguments)
        destroy = ctypes.PYFUNCTYPE(c_int, c_void_p)((f"cublasLt{kind}Destroy", library))
        weakref.finalize(self, destroy, self.pointer).atexit = False

    def set(self, attribute: int, value: Any) -> None:
        """Give an attribute a value, of the C type that it has. Raises `EngineFailure`."""
        self._set(self.pointer, attribute, ctypes.byref(value), ctypes.sizeof(value))


class LtHandle(Handle):
    """A handle of cuBLASLt. Used by one thread."""

    def __init__(self) -> None:
        super().__init__(libcublaslt(), "cublasLtCreate", "cublasLtDestroy")


def thread_lt_handle() -> LtHandle:
    """This thread's handle for the current device, made when it is first asked for."""
    return of_thread(LtHandle)
