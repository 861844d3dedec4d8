"""Doing what a fault plan says, at the places where a device would have done it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

from cudnn_actor.actors import Crash
from cudnn_actor.actors.logs import Log
from cudnn_actor.engines.base import ContextDead
from cudnn_actor.protocol.errors import ExecutionFailed, OutOfMemory, UnsupportedGraph
from cudnn_actor.protocol.lowering import Lowered
from cudnn_actor.protocol.messages import Message
from cudnn_actor.supervision import Fault, FaultRule, FaultSource

__all__ = ["Injection"]

log = Log("cudnn_actor")


class Injection:
    """The faults of one incarnation. On the actor's thread.

    Parameters
    ----------
    faults
        The service's injector, which counts over all incarnations; None for no faults.
    flush
        Delivers the replies so far, before a fault that takes long.
    abandoned
        Set when a supervisor gives the actor up: ends an injected hang.
    """

    def __init__(
        self, faults: FaultSource | None, flush: Callable[[], None], abandoned: threading.Event
    ) -> None:
        self._faults = faults
        self.scripted = faults is not None
        """Whether any fault is; where none is, nothing need be asked of this."""
        self._flush = flush
        self._abandoned = abandoned
        self._rule: FaultRule | None = None

    def start(self) -> None:
        """A start. Raises `Crash` where one was scripted."""
        if self._faults is not None and self._faults.on_start() is not None:
            log.info("fault.injected", fault=Fault.CRASH_IN_START.value, plan="start")
            raise Crash("injected crash in start")

    def meet(self, message: Message) -> None:
        """Look up what is to befall a message; `strike` and `reject` carry it out."""
        if self._faults is not None and not message.control:
            self._rule = self._faults.on_message(type(message).__name__)

    def reject(self, engine: str, lowered: Lowered) -> None:
        """The place where a plan is built. Raises `UnsupportedGraph` where that was scripted."""
        if self._rule is not None and self._rule.fault is Fault.REJECT_BUILD:
            self._rule = None
            log.info("fault.injected", fault=Fault.REJECT_BUILD.value, plan="build")
            digest = lowered.graph.digest()
            raise UnsupportedGraph(engine=engine, digest=digest, detail="injected: rejected at build")

    def strike(self, tag: str) -> None:
        """The place where the engine runs. Raises, hangs or waits as was scripted for this message."""
        rule = self._rule
        if rule is None or rule.fault is Fault.REJECT_BUILD:
            return
        self._rule = None
        log.info("fault.injected", fault=rule.fault.value, plan=tag)
        match rule.fault:
            case Fault.FAIL_EXECUTION:
                raise ExecutionFailed(status="INJECTED", detail="scripted by the fault plan", plan=tag)
            case Fault.OUT_OF_MEMORY:
                raise OutOfMemory(requested=0, in_use=0, limit=None)
            case Fault.STICKY:
                raise ContextDead("INJECTED_STICKY_ERROR: scripted by the fault plan")
            case Fault.HANG:
                self._flush()
                self._abandoned.wait()
                raise Crash("injected hang, ended by the watchdog")
            case Fault.KILL:
                self._flush()
                os.kill(os.getpid(), signal.SIGKILL)
            case Fault.SLOW:
                self._flush()
                self._abandoned.wait(rule.seconds)
