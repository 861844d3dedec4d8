"""Other libraries' arrays on the GPU, taken in where they lie: CuPy's own, DLPack, the CUDA array interface.

Who waits for whom: an array is full once the stream of its maker has got there. Both protocols order a
consumer's stream behind that one: with DLPack the producer makes the stream that the consumer names wait;
with the interface the producer names its own, and the consumer waits for it. The stream named here is one
that does nothing else, so nothing of the caller's is ever held up by it, and the host waits for nothing: an
event behind the wait travels with the array, and the engine's stream waits for that before it reads.
https://dmlc.github.io/dlpack/latest/python_spec.html
https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html
"""

from __future__ import annotations

import threading
from typing import Any

from cudnn_actor.engines.cuda.library.failures import STICKY
from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.protocol.device_array import DeviceArray
from cudnn_actor.protocol.dtypes import DType
from cudnn_actor.protocol.errors import ContextLost, CudnnActorError, ExecutionFailed, InvalidRequest, Words

__all__ = ["DeviceArray", "adopt"]

_REFUSALS = (TypeError, ValueError, RuntimeError, BufferError, AttributeError)
"""What libraries raise where they cannot hand an array out, and CuPy where it cannot take it."""
_of_thread = threading.local()


def adopt(array: object, ordinal: int) -> DeviceArray:
    """Take an array on GPU `ordinal` for `Engine.write`, on the thread whose current stream fills it.

    The memory is neither copied nor read here; whoever fills it may not do so again until the copy has
    run. Does not wait for the device.

    Raises
    ------
    InvalidRequest
        It lies on another GPU, its elements are of no type that tensors have, or its library does not hand
        it out.
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
        raise _failed(error) from error
    except InvalidRequest:  # a ValueError too
        raise
    except _REFUSALS as error:
        raise _refused(array, error) from error
    return DeviceArray(
        dims=tuple(taken.shape),
        dtype=_dtype(taken),
        device=f"cuda:{ordinal}",
        array=taken,
        ready=ready,
        source=array,
    )


def _take_in(array: Any, ordinal: int) -> tuple[Any, Any]:
    """The array as CuPy's, and an event behind all that fills it. `ordinal` is the current device."""
    cupy = libraries().cupy
    if isinstance(array, cupy.ndarray):  # which belongs to this thread's current stream, by CuPy's rule
        return array, _event_on(cupy.cuda.get_current_stream())
    waiting = _waiting_stream(ordinal)
    if hasattr(array, "__dlpack__"):
        with waiting:
            taken = cupy.from_dlpack(array)
    else:
        taken = _by_interface(array, waiting)
    return taken, _event_on(waiting)


def _by_interface(array: Any, waiting: Any) -> Any:
    """By `__cuda_array_interface__`. CuPy would have the host wait for the stream that is named in it."""
    cupy = libraries().cupy
    interface = dict(array.__cuda_array_interface__)
    stream = interface.get("stream")
    if stream is not None:
        filled = cupy.cuda.Event(disable_timing=True)
        cupy.cuda.runtime.eventRecord(filled.ptr, stream)
        waiting.wait_event(filled)
    return cupy.asarray(_Interface({**interface, "stream": None}, array))


class _Interface:
    """A CUDA array interface without its stream, which has been waited for; keeps the array alive."""

    def __init__(self, interface: dict[str, Any], array: object) -> None:
        self.__cuda_array_interface__ = interface
        self.array = array


def _waiting_stream(ordinal: int) -> Any:
    """This thread's stream on a GPU, the current device, for waiting alone. One per thread and GPU.

    One for all threads would make an array of one thread wait for what fills another's.
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
    """Raise `InvalidRequest` for an array on another GPU, before any stream of this one hears of it."""
    found = _device_of(array)
    if found != ordinal:
        raise InvalidRequest(
            field="array",
            value=Words(type(array).__name__),
            problem=f"is on cuda:{found}, but this service runs on cuda:{ordinal}",
            fix=f"move it there first (x.to('cuda:{ordinal}') in PyTorch), or to the host",
        )


def _device_of(array: Any) -> int:
    cupy = libraries().cupy
    if hasattr(array, "__dlpack_device__"):
        return int(array.__dlpack_device__()[1])
    pointer = array.__cuda_array_interface__["data"][0]
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


def _failed(error: Any) -> CudnnActorError:
    """What an error of the CUDA runtime means to who asked."""
    status, _, detail = str(error).partition(": ")
    if error.status in STICKY:
        return ContextLost(status=status, detail=detail)
    return ExecutionFailed(status=status, detail=detail, plan="upload")


def _refused(array: Any, error: Exception) -> InvalidRequest:
    fix = "pass a dense array, or one on the host"
    if getattr(array, "requires_grad", False):
        fix = "pass x.detach()"
    elif str(getattr(array, "dtype", "")).endswith("bfloat16"):
        fix = "install a CuPy that takes bfloat16 by DLPack, or pass it from the host"
    return InvalidRequest(
        field="array", value=Words(type(array).__name__), problem=f"cannot be taken in: {error}", fix=fix
    )
