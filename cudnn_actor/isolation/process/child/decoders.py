"""Decoders of the frames that the parent sends, and of the messages in them.

It takes tens of milliseconds to make them. So they have a module of their own: the parent never imports it,
and a forkserver imports it once for all its workers. Both decoders raise `msgspec.DecodeError`.
"""

from __future__ import annotations

from typing import Any

import msgspec

from cudnn_actor.isolation.process.wire import Asked, FromParent

__all__ = ["FROM_PARENT", "MESSAGES"]

FROM_PARENT: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(FromParent)
"""Decodes a frame, to one of the records of `FromParent`."""
MESSAGES: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Asked)
"""Decodes the body of a `Request`, to a message."""
