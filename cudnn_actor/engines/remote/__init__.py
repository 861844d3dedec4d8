"""Plans built in a process of their own. Knows no device: any `Builder` that can be named can be moved."""

from __future__ import annotations

from cudnn_actor.engines.remote.builder import RemoteBuilder
from cudnn_actor.engines.remote.host import SERVING, BuilderHost

__all__ = ["SERVING", "BuilderHost", "RemoteBuilder"]
