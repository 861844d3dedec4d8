"""Values that are already on a service's device, as carried by a message."""

from __future__ import annotations

from typing import Any

from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["DeviceArray"]


class DeviceArray:
    """Another library's array on the device, wrapped by `EngineChoice.adopt` for `Engine.write`.

    It is valid only in the process that made it, so it is not a record and no codec encodes it. Immutable by
    convention.

    Parameters
    ----------
    dims
        In N, C, spatial order.
    dtype
        The element type.
    device
        Where it is: "cuda:N".
    array
        The same memory as an array of the engine's own array library, with any strides.
    ready
        The engine's own marker after the work that fills the array: its stream waits for it before reading.
    source
        The caller's object, kept alive until the copy has run.
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
