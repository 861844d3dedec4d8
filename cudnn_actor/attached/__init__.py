"""One service for many processes: `serve_socket` in the service's process, `connect` in the others.

See `cudnn-actor docs processes`.
"""

from __future__ import annotations

from cudnn_actor.attached.client.connecting import Connecting, connect
from cudnn_actor.attached.client.served_model import ServedModel, served_model
from cudnn_actor.attached.server.serving import ServedSocket, serve_socket

__all__ = ["Connecting", "ServedModel", "ServedSocket", "connect", "serve_socket", "served_model"]
