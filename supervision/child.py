"""A child of a supervisor: how it is created, and how it reports."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from cudnn_actor.actors import Actor, ActorExit, Crash
from cudnn_actor.supervision.exits import ExitKind, ExitReason
from cudnn_actor.supervision.policy import ChildPolicy
from cudnn_actor.supervision.signals import ChildExited, ChildReady, Signal

__all__ = ["ChildObserver", "ChildSpec"]

_KINDS = {"normal": ExitKind.NORMAL, "start_failed": ExitKind.START_FAILED, "crash": ExitKind.CRASH}


class ChildSpec(msgspec.Struct, frozen=True, kw_only=True):
    """A child: its policy, and how to create it.

    Parameters
    ----------
    policy
        Its id, restart type and deadlines.
    make
        Creates the actor of the given incarnation (from 1) without starting it. Called on the supervisor's
        thread, so slow work belongs in the actor's `on_start`.
    hang_after_s
        Seconds that the child may go without progress (one message, for a plain actor) before it counts as
        hung; None for no limit.
    """

    policy: ChildPolicy
    make: Callable[[int], Actor]
    hang_after_s: float | None = None


class ChildObserver:
    """Reports one incarnation's readiness and exit through `signal`, on the child's thread."""

    def __init__(self, signal: Callable[[Signal], None], child: str, incarnation: int) -> None:
        self._signal = signal
        self._child = child
        self._incarnation = incarnation

    def actor_ready(self) -> None:
        """Report that the child is ready."""
        self._signal(ChildReady(child=self._child, incarnation=self._incarnation))

    def actor_exited(self, exit: ActorExit) -> None:
        """Report that the child has ended, and why."""
        reason = _reason(exit)
        self._signal(ChildExited(child=self._child, incarnation=self._incarnation, reason=reason))


def _reason(exit: ActorExit) -> ExitReason:
    if exit.error is None:
        cause = ""
    elif isinstance(exit.error, Crash):  # which the kind says already
        cause = str(exit.error)
    else:
        cause = f"{type(exit.error).__name__}: {exit.error}"
    return ExitReason(kind=_KINDS[exit.kind], cause=cause)
