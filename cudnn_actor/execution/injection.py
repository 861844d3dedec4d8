"""Injects the faults of a fault plan, at the places where a device would have failed."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import NoReturn

from cudnn_actor.actors import Crash
from cudnn_actor.actors.logs import Log
from cudnn_actor.protocol.errors import ExecutionFailed, OutOfMemory, UnsupportedGraph
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.supervision import Fault, FaultRule

__all__ = ["Injection", "fail_start"]

log = Log("cudnn_actor")


def fail_start() -> NoReturn:
    """Fail a start, as a fault plan asks. Raises `Crash`."""
    log.info("fault.injected", fault=Fault.CRASH_IN_START.value, plan="start")
    raise Crash("injected crash in start")


class Injection:
    """The faults of one incarnation. Used by one thread.

    Parameters
    ----------
    flush
        A function that delivers the answers so far, before a fault that takes long.
    abandoned
        An event that is set when the actor is given up. It ends an injected hang.
    """

    def __init__(self, flush: Callable[[], None], abandoned: threading.Event) -> None:
        self._flush = flush
        self._abandoned = abandoned
        self.rule: FaultRule | None = None
        """The fault for the current request; None for none, and after it has been injected."""

    def reject(self, engine: str, graph: OperationGraph) -> None:
        """Raise `UnsupportedGraph` if the fault plan says so. Call it where a plan is looked up or built."""
        if self.rule is not None and self.rule.fault is Fault.REJECT_BUILD:
            self.rule = None
            log.info("fault.injected", fault=Fault.REJECT_BUILD.value, plan="build")
            raise UnsupportedGraph(engine=engine, digest=graph.digest(), detail="injected: rejected at build")

    def inject(self, tag: str) -> None:
        """Raise, hang or wait as the fault plan says for this message. Call it where the engine runs."""
        rule = self.rule
        if rule is None or rule.fault is Fault.REJECT_BUILD:
            return
        self.rule = None
        log.info("fault.injected", fault=rule.fault.value, plan=tag)
        match rule.fault:
            case Fault.FAIL_EXECUTION:
                raise ExecutionFailed(status="INJECTED", detail="scripted by the fault plan", plan=tag)
            case Fault.OUT_OF_MEMORY:
                raise OutOfMemory(requested=0, in_use=0, limit=None, injected=True)
            case Fault.STICKY:
                # Not `ContextDead`, because the device still runs what was enqueued until the process ends.
                raise Crash("INJECTED_STICKY_ERROR: scripted by the fault plan")
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
