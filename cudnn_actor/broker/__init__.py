"""What becomes of each message of a service: the bookkeeping, without an engine, threads or I/O."""

from __future__ import annotations

from cudnn_actor.broker.broker import Broker, Host
from cudnn_actor.broker.work import Work

__all__ = ["Broker", "Host", "Work"]
