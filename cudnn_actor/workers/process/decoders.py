"""What decodes the parent's frames, and the messages in them.

Made at the import, which a forkserver does once for all its workers. The parent never needs them, and they
take as long to make as a fifth of its own import.
"""

from __future__ import annotations

from typing import Any

import msgspec

from cudnn_actor.workers.wire import Asked, FromParent

__all__ = ["FROM_PARENT", "MESSAGES"]

FROM_PARENT: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(FromParent)
"""Decodes what the parent sends."""
MESSAGES: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(Asked)
"""Decodes the message in a `Request`."""
