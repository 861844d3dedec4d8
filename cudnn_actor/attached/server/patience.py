"""Limits for the time that a client may take for its first frame, and from the beginning of a frame to its
end. No I/O."""

from __future__ import annotations

import time

from cudnn_actor.processes.channel import Channel
from cudnn_actor.processes.frames import BadFrame

__all__ = ["Patience"]

_LONGEST_S = 10.0


class Patience:
    """The limits for one client, which has just connected."""

    def __init__(self) -> None:
        self.waits_since: float | None = time.monotonic()
        """Since when the rest of a frame, or the first frame, has been missing; None if nothing is
        missing."""

    def note_rest(self, channel: Channel, *, came: bool, attached: bool) -> None:
        """Note, after the socket was read, since when a frame has been incomplete.

        `came`: whether complete frames have arrived. `attached`: whether the client's first frame has. Raises
        `BadFrame` for descriptors that belong to no frame.
        """
        if not channel.is_partial:
            self.waits_since = None if attached else self.waits_since
            if channel.unclaimed_count:
                raise BadFrame(f"{channel.unclaimed_count} descriptors came that belong to no frame")
        elif came or self.waits_since is None:
            self.waits_since = time.monotonic()

    def end_by(self, now_s: float) -> str:
        """Why a limit has passed at this time of `time.monotonic`; "" if none has."""
        if self.waits_since is None or now_s - self.waits_since <= _LONGEST_S:
            return ""
        return f"a frame has not been completed within {_LONGEST_S:.0f} s"
