"""References to GPU buffers."""

from __future__ import annotations

import msgspec

from cudnn_actor.protocol.tensor import TensorSpec

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

    def __str__(self) -> str:
        return f"<buffer {self.slot}.{self.generation & 0xFFFFFFFF} {self.spec} on {self.device}>"
