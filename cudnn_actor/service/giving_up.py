"""Carries out the option `on_give_up`, which says what happens to the process when a service gives up.

This runs on the supervisor's thread, after all waiting requests have been answered.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

from cudnn_actor.actors.logs import Log
from cudnn_actor.options import OnGiveUp
from cudnn_actor.supervision import Escalated

__all__ = ["EXIT_STATUS", "EXIT_WITHIN_S", "act_on"]

EXIT_WITHIN_S = 30.0
"""How long a process may take to end after SIGTERM."""
EXIT_STATUS = 70
"""EX_SOFTWARE of sysexits.h."""

log = Log("cudnn_actor")


def act_on(event: Escalated, on_give_up: OnGiveUp) -> None:
    """Carry out `on_give_up`; raises nothing. For "raise", the code that awaits the service does it."""
    if on_give_up == "exit":
        _end_process(event)
    elif callable(on_give_up):
        _tell(event, on_give_up)


def _tell(event: Escalated, callback: Callable[[Escalated], object]) -> None:
    try:
        callback(event)
    except BaseException:  # SystemExit too: on this thread it would end only the supervisor
        log.exception("service.give_up_callback_failed", callback=repr(callback))


def _end_process(event: Escalated) -> None:
    log.error(
        "process.ending", cause=event.cause.kind.value, detail=event.cause.cause, within_s=EXIT_WITHIN_S
    )
    # Started first, since SIGTERM may end the process at once. A daemon, so that it does not delay the exit.
    watch = threading.Thread(target=_exit_in_the_end, name="cudnn-actor-exit", daemon=True)
    try:
        watch.start()
    except RuntimeError:  # the system cannot start another thread: wait on this one, which is idle
        os.kill(os.getpid(), signal.SIGTERM)
        _exit_in_the_end()
    else:
        os.kill(os.getpid(), signal.SIGTERM)


def _exit_in_the_end() -> None:
    threading.Event().wait(EXIT_WITHIN_S)
    log.error("process.exit_forced", status=EXIT_STATUS, after_s=EXIT_WITHIN_S)
    os._exit(EXIT_STATUS)
