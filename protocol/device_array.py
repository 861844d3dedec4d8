"""Values that lie on a service's device already, as a message carries them."""

from __future__ import annotations

from typing import Any

from cudnn_actor.protocol.dtypes import DType

__all__ = ["DeviceArray"]


class DeviceArray:
    """Another library's array on the device, taken over by `EngineChoice.adopt` for `Engine.write`.

    It means something in the process that made it and nowhere else: it is no record, so that no codec
    takes it. Not to be changed.

    Parameters
    ----------
    dims
        In N, C, spatial order.
    dtype
        The element type.
    device
        Where it lies: "cuda:N".
    array
        The same memory as an array of the engine's own array library, in any strides.
    ready
        The engine's own mark behind the work that fills it: its stream waits for this before it reads.
    source
        What was given, kept alive until the copy has run.
    """

    __slots__ = ("array", "device", "dims", "dtype", "ready", "source")

    def __init__(
        self,
        *,
        dims: tuple[int, ...],
        dtype: DType,
        device: str,
        array: Any,
        ready: Any = None,
        source: Any = None,
    ) -> None:
        self.dims = dims
        self.dtype = dtype
        self.device = device
        self.array = array
        self.ready = ready
        self.source = source

    def __repr__(self) -> str:
        return f"<{self.dtype.value}[{'x'.join(map(str, self.dims))}] on {self.device}>"
