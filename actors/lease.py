"""The right of one incarnation to write what outlives it."""

from __future__ import annotations

import threading

from cudnn_actor.actors.errors import Crash

__all__ = ["Lease"]


class Lease:
    """Held by an actor's thread from its start, revoked once: at its end, or when it is given up.

    `with lease:` is a step that the actor takes as the owner of what it writes. Revoking waits for a step
    that is being taken and lets no other begin, so whoever revokes it is alone from then on, however late
    a lost thread comes back. No step may block.
    """

    __slots__ = ("lock", "revoked")

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """What a step holds. `with lease.lock:` and then `check` is `with lease:` for the hottest steps."""
        self.revoked = False
        """Whether it has been revoked."""

    def __enter__(self) -> None:
        self.lock.acquire()
        if self.revoked:
            self.lock.release()
            raise _came_back()

    def __exit__(self, *_: object) -> None:
        self.lock.release()

    def check(self) -> None:
        """Raise `Crash` when it has been revoked. A step that writes needs more: `with`."""
        if self.revoked:
            raise _came_back()

    def revoke(self) -> bool:
        """End it. Returns False when somebody else has done so."""
        with self.lock:
            first, self.revoked = not self.revoked, True
        return first


def _came_back() -> Crash:
    return Crash("came back after it had been given up")
