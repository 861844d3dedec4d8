"""Every error of this package: each says whether the request ran, and whether it is safe to send it again."""

from cudnn_actor.models.errors import *
from cudnn_actor.protocol.errors import *

__all__ = sorted(name for name in globals() if name[0] != "_")  # type-checkers see what is imported with `*`
