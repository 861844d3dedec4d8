"""The listener to the changes and events of a pool's members."""

from __future__ import annotations

from typing import Protocol, TypeVar

from cudnn_actor.supervision import LifecycleEvent

__all__ = ["Listener", "Numbered"]

M_contra = TypeVar("M_contra", contravariant=True)


class Numbered(Protocol):
    """A member of a pool."""

    @property
    def number(self) -> int:
        """The member's number in the pool, from 0."""

    @property
    def name(self) -> str:
        """The member's name in log lines and events."""


class Listener(Protocol[M_contra]):
    """The object that a member tells of its changes and events."""

    async def prepare(self, member: M_contra, /) -> None:
        """Prepare a member that has just started for requests. Raises `CudnnActorError`."""

    def up(self, member: M_contra, /) -> None:
        """Note that a member may get requests."""

    def pauses(self, member: M_contra, /) -> None:
        """Note that a member's worker restarts. The new worker will run the member's requests."""

    def lost(self, member: M_contra, /) -> None:
        """Note that a member has ended or cannot be reached, and that its requests and buffers are lost."""

    def given_up(self, member: M_contra, /) -> None:
        """Note that a member is not started again."""

    def happened(self, event: LifecycleEvent, /) -> None:
        """Note an event."""
