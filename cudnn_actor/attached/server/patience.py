"""How long a client may take: for its first frame, and from the beginning of a frame to its end. No I/O."""

from __future__ import annotations

import time

from cudnn_actor.processes.channel import Channel
from cudnn_actor.processes.frames import BadFrame

__all__ = ["Patience"]

_LONGEST_S = 10.0


class Patience:
    """That with one client, which has just connected."""

    def __init__(self) -> None:
        self.waits_since: float | None = time.monotonic()
        """Since when the rest of a frame, or the first one, has been missing; None if none is."""

    def note_rest(self, channel: Channel, *, came: bool, attached: bool) -> None:
        """Note when a frame began that is cut, once the socket has been read.

        `came`: whether whole frames have come. `attached`: whether the client's first frame has. Raises
        `BadFrame` for descriptors that belong to no frame.
        """
        if not channel.is_partial:
            self.waits_since = None if attached else self.waits_since
            if channel.unclaimed:
                raise BadFrame(f"{channel.unclaimed} descriptors came that belong to no frame")
        elif came or self.waits_since is None:
            self.waits_since = time.monotonic()

    def end_by(self, now_s: float) -> str:
        """Why it has ended, by this time of `time.monotonic`; "" if it has not."""
        if self.waits_since is None or now_s - self.waits_since <= _LONGEST_S:
            return ""
        return f"a frame has not been completed within {_LONGEST_S:.0f} s"
