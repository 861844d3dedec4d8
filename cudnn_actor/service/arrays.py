"""Arrays that callers pass: NumPy arrays, values that NumPy converts, and arrays of other libraries.

DLPack tells where an array lies before it is read. So an array on a device is never read through the host.
https://data-apis.org/array-api/latest/design_topics/data_interchange.html
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cudnn_actor.protocol.errors import InvalidRequest, NoValues, Words
from cudnn_actor.protocol.messages.buffer_messages import Values
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.checks import require_awaited
from cudnn_actor.protocol.types.device_array import DeviceArray
from cudnn_actor.protocol.types.dtypes import DType, DTypeLike
from cudnn_actor.protocol.types.tensor import LayoutLike, TensorSpec

__all__ = ["about_array", "as_values", "packed_like"]

_HOST = {1, 3}
"""DLPack's kDLCPU and kDLCUDAHost: the host can read both."""
_CUDA = {2, 13}
"""kDLCUDA and kDLCUDAManaged."""
_REFUSALS = (
    *(TypeError, ValueError, RuntimeError, BufferError, AttributeError),
    *(ArithmeticError, AssertionError, LookupError, OSError),
)
"""The errors of libraries that cannot export an array, and of objects that are no array."""


def as_values(values: Any, device: str, adopt: Callable[[object], DeviceArray] | None) -> Values:
    """Convert `values` for a message: to a NumPy array, or by `adopt` if they are an array on the device.

    Parameters
    ----------
    values
        Anything that NumPy accepts, or an array with `__dlpack__` or `__cuda_array_interface__`.
    device
        The service's device, "cpu" or "cuda:N".
    adopt
        The engine's function; None if the engine has no device in this process.

    Raises
    ------
    InvalidRequest
        The values are not real numbers of a fixed size; their library does not export them; or the array is
        on another device than the service's.
    """
    if type(values) is np.ndarray and DType.of(values.dtype) is not None:  # nearly always
        return values
    place = _place(values)
    if place is None:
        return _on_host(values)
    if adopt is None or not place.startswith("cuda"):
        elsewhere = adopt is None and device.startswith("cuda")
        runs = "in a process of its own" if elsewhere else f"on {device}"
        host = "move it to the host first (x.cpu().numpy() in PyTorch, cupy.asnumpy(x))"
        raise InvalidRequest(
            field="array",
            value=Words(type(values).__name__),
            problem=f"is on {place}, but this service runs {runs}",
            fix=f'{host}, or spawn with isolation="thread"' if elsewhere else host,
        )
    return adopt(values)


def packed_like(values: Values, dtype: DTypeLike | None, layout: LayoutLike) -> TensorSpec:
    """The spec of a packed buffer for `values`. `dtype`: None for the values' own dtype."""
    if isinstance(values, DeviceArray):
        return TensorSpec.packed(values.dims, values.dtype if dtype is None else dtype, layout)
    own = values.dtype.newbyteorder("=")
    return TensorSpec.packed(values.shape, own if dtype is None else dtype, layout)


def about_array(error: InvalidRequest, *, own_dtype: bool) -> InvalidRequest:
    """An error about the argument `array`, if the given one names a field that `packed_like` has derived from
    the array; else the given error.

    `own_dtype`: whether the dtype was derived from the array, too.
    """
    derived = ("data", "dims", "strides", *(("dtype",) if own_dtype else ()))
    return error.about("array") if error.field in derived else error


def _place(values: Any) -> str | None:
    """The place of an array, as text for an error; None if the host can read it."""
    if isinstance(values, np.ndarray | np.generic):
        return None
    if _has(values, "__dlpack_device__"):
        try:
            kind, ordinal = map(int, values.__dlpack_device__())
        except _REFUSALS as error:  # the array lies on several devices, or on none
            raise _refusal(values, error) from error
        if kind in _HOST:
            return None
        return f"cuda:{ordinal}" if kind in _CUDA else f"a device of another kind (DLPack's {kind})"
    return "cuda" if _has(values, "__cuda_array_interface__") else None


def _has(values: object, protocol: str) -> bool:
    """Whether an object (not a class) supports a protocol. Some objects raise more than AttributeError
    here."""
    try:
        return not isinstance(values, type) and hasattr(values, protocol)
    except _REFUSALS:
        return True


def _on_host(values: Any) -> np.ndarray:
    """Convert host values to an array. Raises `InvalidRequest` unless they are real numbers of a fixed
    size."""
    require_awaited("array", values)
    if (hint := _without_memory(values)) is not None:
        problem, fix = hint
        raise InvalidRequest(field="array", value=Words(type(values).__name__), problem=problem, fix=fix)
    for one in (values, *(values if isinstance(values, list | tuple) else ())):
        if isinstance(one, BufferRef):
            raise InvalidRequest(
                field="array",
                value=one,
                problem="is a buffer, whose values are on the device already",
                fix="pass it to requests as it is; Copy(src=..., dst=...) copies it",
            )
    try:
        array = _from_dlpack(values)
        array = np.asarray(values) if array is None else array
    except NoValues as error:
        raise InvalidRequest(
            field="array", value=Words(error.what), problem="holds no values", fix=error.fix
        ) from None
    except _REFUSALS as error:
        raise _refusal(values, error) from error
    if DType.of(array.dtype) is None and array.dtype.kind not in "iufb":
        raise _not_numbers(values, array)
    return array


def _not_numbers(values: Any, array: np.ndarray) -> InvalidRequest:
    """The error about values of which NumPy has made an array of objects, strings or complex numbers."""
    shown: object = Words(f"dtype {array.dtype}")
    problem = "does not hold real numbers of a fixed size"
    fix = "pass an array of real numbers, for example of float32"
    if array.dtype.kind == "c":
        fix = "pass its .real and .imag"
    elif not array.ndim and not isinstance(values, int | np.ndarray):
        shown, problem = values, f"is of type {type(values).__name__}, not an array of numbers"
        fix = "pass a NumPy array, nested lists of numbers, or an array of PyTorch, JAX or CuPy"
    return InvalidRequest(field="array", value=shown, problem=problem, fix=fix)


def _without_memory(values: Any) -> tuple[str, str] | None:
    """The problem with an array whose memory does not have one number for each element, and its fix; None if
    it has."""
    if getattr(values, "is_meta", False) is True:
        return (
            "is on PyTorch's meta device, so it has no values",
            "make it on a device: x.to_empty(device='cpu')",
        )
    layout = str(getattr(values, "layout", ""))
    if layout.startswith("torch.sparse"):
        return "is sparse", "pass x.to_dense()"
    if not isinstance(values, np.ndarray) and hasattr(values, "nnz") and hasattr(values, "toarray"):
        return "is sparse", "pass x.toarray()"
    return None


def _from_dlpack(values: Any) -> np.ndarray | None:
    """A NumPy array over another library's array, not copied; None if NumPy cannot import it through
    DLPack."""
    if isinstance(values, np.ndarray | np.generic) or not _has(values, "__dlpack__"):
        return None
    try:
        return np.from_dlpack(values)
    except _REFUSALS:  # for example JAX's bfloat16, which NumPy can read by `__array__`
        return None


def _refusal(values: Any, error: Exception) -> InvalidRequest:
    fix = "pass rows of equal length, or an array on the host"
    if getattr(values, "requires_grad", False):
        fix = "pass x.detach()"
    elif str(getattr(values, "dtype", "")).endswith("bfloat16"):
        fix = "pass its bits, which NumPy takes: x.view(torch.int16).numpy().view(ml_dtypes.bfloat16)"
    return InvalidRequest(
        field="array",
        value=Words(type(values).__name__),
        problem=f"cannot be converted to an array: {str(error).rstrip('.') or type(error).__name__}",
        fix=fix,
    )
