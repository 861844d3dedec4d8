"""Wraps other libraries' arrays on the GPU without copying: CuPy's, DLPack, the CUDA array interface.

Synchronisation: an array has its values once its producer's stream has reached that point. Both protocols
make a consumer's stream wait for that: with DLPack, the producer makes the stream that the consumer names
wait; with the CUDA array interface, the producer names its stream and the consumer waits for it. The
consumer's stream here is used for nothing else, so no work of the caller is delayed, and the host never
waits. An event recorded on it after the wait goes with the array, and the engine's stream waits for that
event before it reads.
https://dmlc.github.io/dlpack/latest/python_spec.html
https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html
"""

from __future__ import annotations

import threading
from typing import Any

from cudnn_actor.engines.cuda.library.failures import STICKY
from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.protocol.errors import (
    ContextLost,
    CudnnActorError,
    ExecutionFailed,
    InvalidRequest,
    Words,
)
from cudnn_actor.protocol.types.device_array import DeviceArray
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["DeviceArray", "adopt"]

_REFUSALS = (TypeError, ValueError, RuntimeError, BufferError, AttributeError)
"""The exceptions of libraries that cannot export an array, and of CuPy if it cannot import one."""
_of_thread = threading.local()


def adopt(array: object, ordinal: int) -> DeviceArray:
    """Wrap an array on GPU `ordinal` for `Engine.write`. Call it on the thread whose current stream fills it.

    The memory is neither copied nor read here, and must not be changed until the copy has run. Does not wait
    for the device.

    Raises
    ------
    InvalidRequest
        The array is on another GPU, tensors cannot have its dtype, or its library does not export it.
    ContextLost
        The device context of this process has died.
    ExecutionFailed
        CUDA failed in another way.
    """
    cupy = libraries().cupy
    try:
        _require_device(array, ordinal)
        with cupy.cuda.Device(ordinal):
            taken, ready = _take_in(array, ordinal)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        raise _runtime_error(error) from error
    except InvalidRequest:  # it is a ValueError too, so it must not reach the next clause
        raise
    except _REFUSALS as error:
        raise _refusal_of(array, error) from error
    return DeviceArray(
        dims=tuple(taken.shape),
        dtype=_dtype(taken),
        device=f"cuda:{ordinal}",
        array=taken,
        ready=ready,
        source=array,
    )


def _take_in(array: Any, ordinal: int) -> tuple[Any, Any]:
    """A CuPy array on the memory, and an event after the work that fills it. `ordinal` is current."""
    cupy = libraries().cupy
    if isinstance(array, cupy.ndarray):  # by CuPy's convention, it belongs to this thread's current stream
        return array, _event_on(cupy.cuda.get_current_stream())
    waiting = _waiting_stream(ordinal)
    if hasattr(array, "__dlpack__"):
        with waiting:
            taken = cupy.from_dlpack(array)
    else:
        taken = _by_interface(array, waiting)
    return taken, _event_on(waiting)


def _by_interface(array: Any, waiting: Any) -> Any:
    """Import by `__cuda_array_interface__`. CuPy's own import makes the host wait for the array's stream."""
    cupy = libraries().cupy
    interface = dict(array.__cuda_array_interface__)
    stream = interface.get("stream")
    if stream is not None:
        filled = cupy.cuda.Event(disable_timing=True)
        cupy.cuda.runtime.eventRecord(filled.ptr, stream)
        waiting.wait_event(filled)
    return cupy.asarray(_Interface({**interface, "stream": None}, array))


class _Interface:
    """A CUDA array interface without its stream, which is waited for separately; keeps the array alive."""

    def __init__(self, interface: dict[str, Any], array: object) -> None:
        self.__cuda_array_interface__ = interface
        self.array = array


def _waiting_stream(ordinal: int) -> Any:
    """This thread's stream on a GPU, the current device, used only for waits. One per thread and GPU.

    With one stream for all threads, one thread's array would wait for the work that fills another's.
    """
    cupy = libraries().cupy
    streams: dict[int, Any] = _of_thread.__dict__.setdefault("streams", {})
    if ordinal not in streams:
        streams[ordinal] = cupy.cuda.Stream(non_blocking=True)
    return streams[ordinal]


def _event_on(stream: Any) -> Any:
    cupy = libraries().cupy
    event = cupy.cuda.Event(disable_timing=True)
    stream.record(event)
    return event


def _require_device(array: Any, ordinal: int) -> None:
    """Raise `InvalidRequest` for an array on another GPU, before it is used with a stream of this one."""
    found = _device_of(array, ordinal)
    if found != ordinal:
        raise InvalidRequest(
            field="array",
            value=Words(type(array).__name__),
            problem=f"is on cuda:{found}, but this service runs on cuda:{ordinal}",
            fix=f"move it there first (x.to('cuda:{ordinal}') in PyTorch), or to the host",
        )


def _device_of(array: Any, other: int) -> int:
    """The GPU that an array is on; `other` for one without elements, which may have no address."""
    cupy = libraries().cupy
    if hasattr(array, "__dlpack_device__"):
        return int(array.__dlpack_device__()[1])
    pointer = array.__cuda_array_interface__["data"][0]
    if not pointer:
        return other
    return int(cupy.cuda.runtime.pointerGetAttributes(pointer).device)


def _dtype(taken: Any) -> DType:
    found = DType.of(taken.dtype)
    if found is None:
        raise InvalidRequest(
            field="array",
            value=Words(f"dtype {taken.dtype}"),
            problem="is not an element type that tensors can have",
            fix=f"cast it on the device first, to one of {', '.join(DType)}",
        )
    return found


def _runtime_error(error: Any) -> CudnnActorError:
    """The caller's error for an error of the CUDA runtime."""
    status, _, detail = str(error).partition(": ")
    if error.status in STICKY:
        return ContextLost(status=status, detail=detail)
    return ExecutionFailed(status=status, detail=detail, plan="upload")


def _refusal_of(array: Any, error: Exception) -> InvalidRequest:
    fix = "pass a dense array, or one on the host"
    if getattr(array, "requires_grad", False):
        fix = "pass x.detach()"
    elif str(getattr(array, "dtype", "")).endswith("bfloat16"):
        fix = "install a CuPy that supports bfloat16 in DLPack, or pass it from the host"
    return InvalidRequest(
        field="array", value=Words(type(array).__name__), problem=f"cannot be imported: {error}", fix=fix
    )
