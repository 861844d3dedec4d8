"""References to GPU buffers."""

from __future__ import annotations

import msgspec

from cudnn_actor.protocol.tensor import TensorSpec

__all__ = ["BufferRef"]


class BufferRef(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, cache_hash=True, gc=False
):
    """Names a buffer of one service; holds no memory and means nothing elsewhere.

    A reference is checked when a request is sent and again when it is enqueued:
    if its `generation` is not the slot's, the request gets `StaleBufferError`.

    Parameters
    ----------
    slot
        The buffer's place in its service's table.
    generation
        The slot's generation: the service's random number in the upper 32 bits, so that another
        service's reference is told from a freed one, and a count of the slot's uses in the lower 32.
    spec
        The buffer's shape in memory.
    device
        "cpu" or "cuda:N".
    """

    slot: int
    generation: int
    spec: TensorSpec
    device: str

    def __str__(self) -> str:
        return f"<buffer {self.slot}.{self.generation & 0xFFFFFFFF} {self.spec} on {self.device}>"
