"""Weights that clients share: one buffer for the same values, however many clients have loaded the model.

A client says the digest of what it would upload. The server computes the digest of what was uploaded itself:
so no client can put other values in the place of those that another one asks for.
"""

from __future__ import annotations

from typing import NamedTuple

from cudnn_actor.broker.service_state import ServiceState
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["Digest", "SharedWeights"]


class Digest(NamedTuple):
    """What a shared buffer has: values, by their SHA-256, and their shape in memory."""

    values: str
    spec: TensorSpec


class _Shared:
    def __init__(self, digest: Digest, ref: BufferRef) -> None:
        self.digest, self.ref, self.users = digest, ref, 1


class SharedWeights:
    """The shared buffers of a service. On the server's loop only.

    Parameters
    ----------
    state
        The service's.
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
        """The buffer with these values, which gets one more user; None if there is none any more."""
        shared = self._by_digest.get(digest)
        if shared is None:
            return None
        if not self._state.memory.is_live(shared.ref):  # torn by a crash, or lost
            del self._by_digest[digest]
            return None
        shared.users += 1
        return shared.ref

    def add(self, digest: Digest, ref: BufferRef) -> None:
        """Share a new buffer, which has one user. One with the same values that is there already stays."""
        shared = _Shared(digest, ref)
        self._by_key[ref.slot, ref.generation] = shared
        self._by_digest.setdefault(digest, shared)

    def release(self, ref: BufferRef) -> None:
        """Note that a user has gone. The last one's end frees the buffer, without waiting."""
        self.release_key((ref.slot, ref.generation))

    def release_key(self, key: tuple[int, int]) -> None:
        """The same, by slot and generation."""
        shared = self._by_key[key]
        shared.users -= 1
        if shared.users:
            return
        del self._by_key[key]
        if self._by_digest.get(shared.digest) is shared:
            del self._by_digest[shared.digest]
        self._state.discard(shared.ref)
