"""Records each request's latency and each error, as the caller sees them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cudnn_actor.protocol import (
    Allocate,
    BufferRef,
    CudnnActorError,
    Download,
    Message,
    TensorSpec,
    Upload,
)
from cudnn_actor.service.client import CudnnRef

__all__ = ["Recorder", "Sample"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One answered request. Times in seconds; `began_s` counts from the recorder's start."""

    stage: str
    kind: str
    began_s: float
    latency_s: float


class Recorder:
    """Sends requests to a service and times every answer.

    Parameters
    ----------
    gpu
        The service.
    """

    def __init__(self, gpu: CudnnRef) -> None:
        self._gpu = gpu
        self._origin = time.perf_counter()
        self.stage = ""
        """The stage of the demo that the following requests belong to."""
        self.samples: list[Sample] = []
        self._errors: list[str] = []

    def beside(self, stage: str) -> Recorder:
        """A second recorder for work at the same time, with the same clock, samples and errors."""
        other = Recorder(self._gpu)
        other.stage = stage
        other._origin, other.samples, other._errors = self._origin, self.samples, self._errors
        return other

    @property
    def errors(self) -> int:
        """Requests that ended with an error."""
        return len(self._errors)

    @property
    def now_s(self) -> float:
        """Seconds since the recorder was made."""
        return time.perf_counter() - self._origin

    async def ask(self, message: Message) -> Any:
        """Send a request and await its answer, as `CudnnRef.ask` does. Errors are counted and raised."""
        began_s = self.now_s
        try:
            answer: Any = await self._gpu.ask(message)
        except CudnnActorError as error:
            self.note_error(error)
            raise
        self.samples.append(Sample(self.stage, type(message).__name__, began_s, self.now_s - began_s))
        return answer

    def note_error(self, error: CudnnActorError) -> None:
        """Count an error that a caller has seen."""
        self._errors.append(type(error).__name__)

    async def put(self, array: np.ndarray) -> BufferRef:
        """Upload an array into a new buffer."""
        spec = TensorSpec.packed(array.shape, array.dtype)
        buffer: BufferRef = await self.ask(Allocate(spec=spec, data=array))
        return buffer

    async def room(self, dims: Sequence[int]) -> BufferRef:
        """A new float32 buffer."""
        buffer: BufferRef = await self.ask(Allocate(spec=TensorSpec.packed(dims, "float32")))
        return buffer

    async def write(self, buffer: BufferRef, array: np.ndarray) -> None:
        """Overwrite a buffer."""
        await self.ask(Upload(dst=buffer, data=array))

    async def get(self, buffer: BufferRef) -> np.ndarray:
        """Download a buffer."""
        array: np.ndarray = await self.ask(Download(src=buffer))
        return array
