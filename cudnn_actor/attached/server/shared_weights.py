"""Weights that clients share: equal values have one buffer, however many clients have loaded the model.

A client sends the digest of the values that it would upload. The server itself computes the digest of values
that are uploaded. So no client can substitute other values for those that another client asks for.
"""

from __future__ import annotations

from typing import NamedTuple

from cudnn_actor.broker.service_state import ServiceState
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["Digest", "SharedWeights"]


class Digest(NamedTuple):
    """The key of a shared buffer: the SHA-256 of its values, and its spec."""

    values: str
    spec: TensorSpec


class _Shared:
    def __init__(self, digest: Digest, ref: BufferRef) -> None:
        self.digest, self.ref, self.users = digest, ref, 1


class SharedWeights:
    """The shared buffers of a service. Used on the server's loop only.

    Parameters
    ----------
    state
        The service's state.
    """

    def __init__(self, state: ServiceState) -> None:
        self._state = state
        self._by_digest: dict[Digest, _Shared] = {}
        self._by_key: dict[tuple[int, int], _Shared] = {}

    def __len__(self) -> int:
        return len(self._by_key)

    def has(self, ref: BufferRef) -> bool:
        """Whether a buffer is shared. Any thread."""
        return (ref.slot, ref.generation) in self._by_key

    def find(self, digest: Digest) -> BufferRef | None:
        """The buffer with these values, which gets one more user; None if there is none."""
        shared = self._by_digest.get(digest)
        if shared is None:
            return None
        if not self._state.memory.is_live(shared.ref):  # a crash has torn it, or it was lost
            del self._by_digest[digest]
            return None
        shared.users += 1
        return shared.ref

    def add(self, digest: Digest, ref: BufferRef) -> None:
        """Share a new buffer, which has one user. If a buffer with the same values exists, it stays."""
        shared = _Shared(digest, ref)
        self._by_key[ref.slot, ref.generation] = shared
        self._by_digest.setdefault(digest, shared)

    def release(self, ref: BufferRef) -> None:
        """Note that a user has gone. If it was the last one, the buffer is freed, without waiting."""
        self.release_key((ref.slot, ref.generation))

    def release_key(self, key: tuple[int, int]) -> None:
        """Do the same as `release`, by slot and generation."""
        shared = self._by_key[key]
        shared.users -= 1
        if shared.users:
            return
        del self._by_key[key]
        if self._by_digest.get(shared.digest) is shared:
            del self._by_digest[shared.digest]
        self._state.discard(shared.ref)
