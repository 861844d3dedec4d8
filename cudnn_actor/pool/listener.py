"""What is told of what happens to a member of a pool."""

from __future__ import annotations

from typing import Protocol, TypeVar

from cudnn_actor.supervision import LifecycleEvent

__all__ = ["Listener", "Numbered"]

M_contra = TypeVar("M_contra", contravariant=True)


class Numbered(Protocol):
    """A member of a pool."""

    @property
    def number(self) -> int:
        """Its number in the pool, from 0."""

    @property
    def name(self) -> str:
        """Its name in log lines and events."""


class Listener(Protocol[M_contra]):
    """What the pool does with what happens to a member."""

    async def prepare(self, member: M_contra, /) -> None:
        """Make a member that has just started ready for requests. Raises `CudnnActorError`."""

    def up(self, member: M_contra, /) -> None:
        """Take note that a member may get requests."""

    def pauses(self, member: M_contra, /) -> None:
        """Take note that the worker of a member restarts, which will run what the member has."""

    def lost(self, member: M_contra, /) -> None:
        """Take note that a member has ended, or cannot be reached, with all that it had."""

    def given_up(self, member: M_contra, /) -> None:
        """Take note that a member is not started again."""

    def happened(self, event: LifecycleEvent, /) -> None:
        """Take note of an event."""
