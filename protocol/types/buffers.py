"""References to the buffers of a service."""

from __future__ import annotations

from typing import Any, NoReturn

import msgspec

from cudnn_actor.protocol.errors import NoValues
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["BufferRef"]


class BufferRef(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, cache_hash=True, gc=False
):
    """Refers to a buffer of one service; holds no memory, and is not valid for any other service.

    A reference is checked when a request is sent and again when the request is enqueued on the engine. If its
    `generation` is not the slot's, the request gets `StaleBufferError`.

    Parameters
    ----------
    slot
        The buffer's index in its service's table.
    generation
        The slot's generation: in the upper 32 bits a random number of the service, which distinguishes
        another service's reference from a freed one; in the lower 32 bits a count of the slot's uses.
    spec
        The buffer's shape in memory.
    device
        "cpu" or "cuda:N".
    """

    slot: int
    generation: int
    spec: TensorSpec
    device: str

    @property
    def dims(self) -> tuple[int, ...]:
        """The buffer's dims, in N, C, spatial order."""
        return self.spec.dims

    @property
    def shape(self) -> tuple[int, ...]:
        """The dims, by the name that NumPy has for them."""
        return self.spec.dims

    @property
    def dtype(self) -> DType:
        """The buffer's element type."""
        return self.spec.dtype

    @property
    def nbytes(self) -> int:
        """Bytes that the buffer spans, gaps between its elements included."""
        return self.spec.nbytes

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        raise NoValues(what=str(self), fix="download it: array = await gpu.download(buffer)")

    # Arithmetic with a reference: what one would write with arrays.
    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __array__
    __truediv__ = __rtruediv__ = __matmul__ = __rmatmul__ = __pow__ = __rpow__ = __neg__ = __array__

    def __repr__(self) -> str:
        return f"<buffer {self.slot}.{self.generation & 0xFFFFFFFF} {self.spec} on {self.device}>"
