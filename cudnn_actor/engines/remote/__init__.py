"""Builds plans in a separate process. Independent of the device: works for any importable `Builder`."""

from __future__ import annotations

from cudnn_actor.engines.remote.builder import RemoteBuilder
from cudnn_actor.engines.remote.host import SERVING, BuilderHost

__all__ = ["SERVING", "BuilderHost", "RemoteBuilder"]
