"""Decoders of the frames that the parent sends, and of the messages in them.

To make them takes tens of milliseconds. So they have a module of their own, which the parent never imports,
and a forkserver only once for all its workers. Both raise `msgspec.DecodeError`.
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
