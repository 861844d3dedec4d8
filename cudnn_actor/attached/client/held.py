"""The buffers that a client has, for the checks that it makes itself before it sends a request."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from cudnn_actor.memory import Slot
from cudnn_actor.protocol.errors import InvalidRequest, StaleBufferError, StaleReason, Words
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.checks import require_awaited

__all__ = ["HeldBuffers"]

_epochs = itertools.count(1)


class HeldBuffers:
    """A client's buffers, with the methods of `memory.Buffers`. The owning loop changes them; any thread may
    read them.

    Which buffers a crash has torn is not known here: the service's process refuses these.

    Parameters
    ----------
    device
        The device of the service.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self.epoch = next(_epochs)
        self._held: dict[tuple[int, int], Slot] = {}
        self._ended: set[int] = set()
        """The slots whose buffer was freed."""

    def __len__(self) -> int:
        return len(self._held)

    def add(self, ref: BufferRef) -> None:
        """Note a buffer that the client was given."""
        if (held := self._held.get((ref.slot, ref.generation))) is not None:
            held.users += 1  # several models share a weight: it was given once more
            return
        slot = Slot(ref.slot, ref.generation)
        slot.spec = ref.spec
        slot.live = True
        self._held[ref.slot, ref.generation] = slot

    def end(self, ref: BufferRef) -> None:
        """Note that a buffer was freed."""
        held = self._held.get((ref.slot, ref.generation))
        if held is not None and held.users:
            held.users -= 1
        elif self._held.pop((ref.slot, ref.generation), None) is not None:
            self._ended.add(ref.slot)
            self.epoch = next(_epochs)  # last: checks before this step have noted an older epoch

    def is_live(self, ref: BufferRef) -> bool:
        """Whether the client has a buffer."""
        return (ref.slot, ref.generation) in self._held

    def resolve(self, ref: BufferRef, field: str = "buffer") -> Slot:
        """The slot of a buffer that the client has. Raises `StaleBufferError`, `InvalidRequest`."""
        given: object = ref  # a caller may pass anything
        if not isinstance(given, BufferRef):
            require_awaited(field, given)
            raise InvalidRequest(
                field=field,
                value=ref,
                problem="is no reference to a buffer",
                fix="pass what upload gave",
            )
        slot = self._held.get((ref.slot, ref.generation))
        if slot is None or ref.device != self.device:
            reason = StaleReason.FREED if ref.slot in self._ended else StaleReason.FOREIGN
            raise StaleBufferError(slot=ref.slot, generation=ref.generation, reason=reason, field=field)
        if slot.spec is not ref.spec and slot.spec != ref.spec:
            raise InvalidRequest(
                field=field,
                value=Words(ref),
                problem="has another spec than its buffer",
                fix="pass it as it is",
            )
        return slot

    def hold_all(self, slots: Sequence[Slot]) -> None:
        """Do nothing: the service's process counts the work."""

    def release_all(self, slots: Sequence[Slot]) -> None:
        """Do nothing, as in `hold_all`."""
