"""Translates the CUDA libraries' exceptions into the engine's own.

A numeric status decides whether memory ran out and whether the context is dead.
An exception's text decides neither: a status that cuDNN puts only into its text
is extracted for people to read.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, NoReturn, ParamSpec, TypeVar

from cudnn_actor.engines.base import EngineFailure, StickyError, blame, blamed_operations
from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.protocol.errors import CudnnActorError

__all__ = [
    "NOT_READY",
    "STICKY",
    "check",
    "check_status",
    "mind_own_captures",
    "translate",
    "translate_failures",
]

P = ParamSpec("P")
R = TypeVar("R")

STICKY = {
    214: "ECC_UNCORRECTABLE",
    220: "NVLINK_UNCORRECTABLE",
    700: "ILLEGAL_ADDRESS",
    702: "LAUNCH_TIMEOUT",
    709: "CONTEXT_IS_DESTROYED",
    710: "ASSERT",
    714: "HARDWARE_STACK_ERROR",
    715: "ILLEGAL_INSTRUCTION",
    716: "MISALIGNED_ADDRESS",
    717: "INVALID_ADDRESS_SPACE",
    718: "INVALID_PC",
    719: "LAUNCH_FAILED",
    721: "CONTAINED",
}
"""Errors after which every call in the context fails with the same error. Driver and runtime have the same
numbers.

https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__TYPES.html
"""
NOT_READY = 600
"""The status that a query returns for work that has not finished."""
_OUT_OF_MEMORY = 2
_STATUS = re.compile(r"CUDNN_STATUS_\w+")


def check(answer: tuple[Any, ...]) -> Any:
    """The value of a `cuda.bindings` call, which returns (status, values...). Raises as `check_status`."""
    check_status(int(answer[0]))
    return answer[1] if len(answer) == 2 else answer[1:]


def check_status(status: int) -> None:
    """Raise for a CUDA status that is not success: `MemoryError`, `StickyError` or `EngineFailure`."""
    if status:
        raise_status(status)


def raise_status(status: int) -> NoReturn:
    """Raise the exception for a CUDA status that is not success."""
    if status == _OUT_OF_MEMORY:
        raise MemoryError("CUDA_ERROR_OUT_OF_MEMORY: the device has no room")
    name, text = _describe(status)
    raise (StickyError if status in STICKY else EngineFailure)(name, text)


def _describe(status: int) -> tuple[str, str]:
    driver = libraries().driver
    code = driver.CUresult(status)
    texts = [driver.cuGetErrorName(code)[1], driver.cuGetErrorString(code)[1]]
    name, text = ((t or b"").decode(errors="replace") for t in texts)
    return name or f"CUDA_ERROR_{status}", text or "an error that the driver has no text for"


def mind_own_captures() -> None:
    """Isolate this thread's CUDA calls from stream captures on other threads.

    Otherwise, while another thread of the process captures a stream in global mode, as `torch.cuda.graph`
    does, queries and allocations on this thread would fail and invalidate that capture.
    """
    driver = libraries().driver
    mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
    check(driver.cuThreadExchangeStreamCaptureMode(mode))


def translate(error: Exception) -> Exception:
    """An exception of CuPy, cuDNN or the driver as `MemoryError`, `StickyError` or `EngineFailure`.

    Exceptions of this package, and those that no library raised, are returned unchanged.
    """
    if isinstance(error, (CudnnActorError, EngineFailure, MemoryError)):
        return error
    status = getattr(error, "status", None)
    if isinstance(status, int) and not isinstance(status, bool):
        try:
            raise_status(status)
        except (EngineFailure, MemoryError) as known:
            return known
    if isinstance(error, (RuntimeError, ValueError)):
        return EngineFailure(_cudnn_status(error), _with_last_words(error))
    return error


def _cudnn_status(error: Exception) -> str:
    found = _STATUS.search(str(error))
    return found.group() if found else type(error).__name__


def _with_last_words(error: Exception) -> str:
    """The exception's text, and cuDNN's last error message on this thread."""
    last = str(libraries().cudnn.get_last_error_string() or "").strip()
    text = str(error).strip()
    return f"{text} (cuDNN: {last})" if last and last not in text else text


def translate_failures(method: Callable[P, R]) -> Callable[P, R]:
    """Decorate a method: library exceptions are raised as `translate` translates them."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            known = translate(error)
            if known is error:
                raise
            blame(known, blamed_operations(error))
            raise known from error

    return call
