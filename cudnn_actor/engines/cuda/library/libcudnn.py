"""libcudnn's own functions, for what its graphs do not cover, by ctypes.

`PROTOTYPES` has the functions that are used, with their arguments' types; a test
compares it with cuDNN's headers. Each returns a status; one that is not success
is raised as `EngineFailure` with cuDNN's last error message.
https://docs.nvidia.com/deeplearning/cudnn/backend/latest/api/overview.html
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_double, c_float, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from typing import Any

from cudnn_actor.engines.base import EngineFailure
from cudnn_actor.engines.cuda.library.cudnn_files import MAIN, mapped_cudnn
from cudnn_actor.engines.cuda.library.foreign_functions import bind_functions, status_name
from cudnn_actor.protocol.types.dtypes import DType

__all__ = [
    "PROTOTYPES",
    "Descriptor",
    "data_type",
    "factor",
    "libcudnn",
    "pooling_descriptor",
    "sequences_descriptor",
    "tensor_descriptor",
]

_INTS, _SIZE = POINTER(c_int), POINTER(c_size_t)
PROTOTYPES: dict[str, tuple[Any, ...]] = {
    "cudnnCreateTensorDescriptor": (POINTER(c_void_p),),
    "cudnnSetTensorNdDescriptor": (c_void_p, c_int, c_int, _INTS, _INTS),
    "cudnnDestroyTensorDescriptor": (c_void_p,),
    "cudnnCreatePoolingDescriptor": (POINTER(c_void_p),),
    "cudnnSetPoolingNdDescriptor": (c_void_p, c_int, c_int, c_int, _INTS, _INTS, _INTS),
    "cudnnDestroyPoolingDescriptor": (c_void_p,),
    "cudnnPoolingForward": (c_void_p,) * 8,
    "cudnnPoolingBackward": (c_void_p,) * 12,
    "cudnnSoftmaxForward": (c_void_p, c_int, c_int, *(c_void_p,) * 6),
    "cudnnSoftmaxBackward": (c_void_p, c_int, c_int, *(c_void_p,) * 8),
    "cudnnCreateDropoutDescriptor": (POINTER(c_void_p),),
    "cudnnSetDropoutDescriptor": (c_void_p, c_void_p, c_float, c_void_p, c_size_t, c_ulonglong),
    "cudnnDestroyDropoutDescriptor": (c_void_p,),
    "cudnnCreateRNNDescriptor": (POINTER(c_void_p),),
    "cudnnSetRNNDescriptor_v8": (c_void_p, *(c_int,) * 12, c_void_p, c_uint),
    "cudnnDestroyRNNDescriptor": (c_void_p,),
    "cudnnCreateRNNDataDescriptor": (POINTER(c_void_p),),
    "cudnnSetRNNDataDescriptor": (c_void_p, *(c_int,) * 5, _INTS, c_void_p),
    "cudnnDestroyRNNDataDescriptor": (c_void_p,),
    "cudnnGetRNNWeightSpaceSize": (c_void_p, c_void_p, _SIZE),
    "cudnnGetRNNTempSpaceSizes": (c_void_p, c_void_p, c_int, c_void_p, _SIZE, _SIZE),
    "cudnnGetRNNWeightParams": (
        *(c_void_p, c_void_p, c_int, c_size_t, c_void_p, c_int),
        *(c_void_p, POINTER(c_void_p), c_void_p, POINTER(c_void_p)),
    ),
    "cudnnRNNForward": (c_void_p, c_void_p, c_int, *(c_void_p,) * 11, *(c_size_t, c_void_p) * 3),
    "cudnnRNNBackwardData_v8": (*(c_void_p,) * 16, *(c_size_t, c_void_p) * 3),
    "cudnnRNNBackwardWeights_v8": (
        *(c_void_p, c_void_p, c_int, *(c_void_p,) * 7),
        *(c_size_t, c_void_p) * 3,
    ),
}
"""Each function's arguments. Handles, descriptors and pointers to anything are `c_void_p`, enums `c_int`."""
_DATA_TYPES = {
    DType.FLOAT32: 0,
    DType.FLOAT64: 1,
    DType.FLOAT16: 2,
    DType.INT8: 3,
    DType.INT32: 4,
    DType.UINT8: 6,
    DType.BFLOAT16: 9,
}
"""cudnnDataType_t."""
_PROPAGATE_NAN = 1
_BY_STEPS = 0
"""cudnnRNNDataLayout_t: CUDNN_RNN_DATA_LAYOUT_SEQ_MAJOR_UNPACKED."""
_LONGEST_MESSAGE = 2048


@functools.cache
def libcudnn() -> Any:
    """The library that this process has loaded for a handle. Raises `EngineFailure` if there is none."""
    path = next((library.path for library in mapped_cudnn() if library.name == MAIN), None)
    if path is None:
        raise EngineFailure("CUDNN_STATUS_NOT_INITIALIZED", "libcudnn is not loaded")
    library = ctypes.CDLL(path)
    library.cudnnGetLastErrorString.restype = None
    library.cudnnGetLastErrorString.argtypes = (c_char_p, c_size_t)
    library.cudnnGetVersion.restype = c_size_t

    def message() -> str:
        text = ctypes.create_string_buffer(_LONGEST_MESSAGE)
        library.cudnnGetLastErrorString(text, _LONGEST_MESSAGE)
        return text.value.decode(errors="replace")

    bind_functions(library, PROTOTYPES, status_name(library, "cudnnGetErrorString"), message)
    return library


class Descriptor:
    """A descriptor of the library, destroyed with this object.

    Parameters
    ----------
    kind
        As in the names of its functions: "Tensor" for `cudnnCreateTensorDescriptor`.
    """

    def __init__(self, kind: str) -> None:
        library, made = libcudnn(), c_void_p()
        self.filling: Any = None
        getattr(library, f"cudnnCreate{kind}Descriptor")(ctypes.byref(made))
        self.pointer = made
        weakref.finalize(self, getattr(library, f"cudnnDestroy{kind}Descriptor"), made)


def tensor_descriptor(dims: Sequence[int], strides: Sequence[int], dtype: DType) -> Descriptor:
    """A tensor of rank 3 or more. Raises `EngineFailure` if the library does not take it."""
    kind, made = data_type(dtype), Descriptor("Tensor")
    libcudnn().cudnnSetTensorNdDescriptor(made.pointer, kind, len(dims), _ints(dims), _ints(strides))
    return made


def data_type(dtype: DType) -> int:
    """The cudnnDataType_t. Raises `EngineFailure` if the library's functions do not take it."""
    if dtype not in _DATA_TYPES:
        raise EngineFailure("CUDNN_STATUS_NOT_SUPPORTED", f"libcudnn's functions do not take {dtype}")
    return _DATA_TYPES[dtype]


def sequences_descriptor(dims: tuple[int, int, int], lengths: Sequence[int], dtype: DType) -> Descriptor:
    """Packed sequences of dims (T, B, features). cuDNN fills the places behind a sequence's end with 0.

    Raises `EngineFailure` if the library does not take them.
    """
    steps, batch, features = _ints(dims)
    zero = factor(0.0, dtype)  # of 4 or 8 bytes: a half 0 is the same
    made = Descriptor("RNNData")
    libcudnn().cudnnSetRNNDataDescriptor(
        *(made.pointer, data_type(dtype), _BY_STEPS, steps, batch, features),
        *(_ints(lengths), ctypes.byref(zero)),
    )
    made.filling = zero  # should the library keep its address
    return made


def pooling_descriptor(
    mode: int, window: Sequence[int], padding: Sequence[int], stride: Sequence[int]
) -> Descriptor:
    """Windows; `mode` is a cudnnPoolingMode_t. Raises `EngineFailure` if the library does not take them."""
    made = Descriptor("Pooling")
    libcudnn().cudnnSetPoolingNdDescriptor(
        made.pointer, mode, _PROPAGATE_NAN, len(window), _ints(window), _ints(padding), _ints(stride)
    )
    return made


def _ints(values: Sequence[int]) -> Any:
    if any(not -(1 << 31) <= value < 1 << 31 for value in values):
        raise EngineFailure("CUDNN_STATUS_NOT_SUPPORTED", "libcudnn's functions take numbers of 32 bits")
    return (c_int * len(values))(*values)


def factor(value: float, dtype: DType) -> Any:
    """A number as the library's functions take it, by reference: double for float64, else float."""
    return (c_double if dtype is DType.FLOAT64 else c_float)(value)
