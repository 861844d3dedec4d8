"""The broker: it handles each message of a service, without an engine, threads or I/O."""

from __future__ import annotations

from cudnn_actor.broker.broker import Broker
from cudnn_actor.broker.host import Host
from cudnn_actor.broker.work import Work

__all__ = ["Broker", "Host", "Work"]
