"""What a service does with its process when it gives up: `on_give_up`.

Runs on the supervisor's thread, when all that waited has been answered.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Literal

from cudnn_actor.actors.logs import Log
from cudnn_actor.supervision import Escalated

__all__ = ["EXIT_STATUS", "EXIT_WITHIN_S", "OnGiveUp", "act_on"]

OnGiveUp = Literal["raise", "exit"] | Callable[[Escalated], object]
"""What `Options.on_give_up` may be."""

EXIT_WITHIN_S = 30.0
"""How long a process may take to end after SIGTERM."""
EXIT_STATUS = 70
"""EX_SOFTWARE of sysexits.h."""

log = Log("cudnn_actor")


def act_on(event: Escalated, on_give_up: OnGiveUp) -> None:
    """Do what was asked for; raises nothing. "raise" is left to whoever awaits the service."""
    if on_give_up == "exit":
        _end_process(event)
    elif callable(on_give_up):
        _tell(event, on_give_up)


def _tell(event: Escalated, callback: Callable[[Escalated], object]) -> None:
    try:
        callback(event)
    except BaseException:  # a SystemExit too: on this thread it would end nothing but the supervisor
        log.exception("service.give_up_callback_failed", callback=repr(callback))


def _end_process(event: Escalated) -> None:
    log.error(
        "process.ending", cause=event.cause.kind.value, detail=event.cause.cause, within_s=EXIT_WITHIN_S
    )
    # Started first, since SIGTERM may end the process at once. A daemon: it goes with a process that ends.
    watch = threading.Thread(target=_exit_in_the_end, name="cudnn-actor-exit", daemon=True)
    try:
        watch.start()
    except RuntimeError:  # the system has no thread to give: this one has nothing else to do
        os.kill(os.getpid(), signal.SIGTERM)
        _exit_in_the_end()
    else:
        os.kill(os.getpid(), signal.SIGTERM)


def _exit_in_the_end() -> None:
    threading.Event().wait(EXIT_WITHIN_S)
    log.error("process.exit_forced", status=EXIT_STATUS, after_s=EXIT_WITHIN_S)
    os._exit(EXIT_STATUS)
