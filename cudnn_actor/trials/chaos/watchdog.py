"""Watches the harness itself: reports what waits when a request stalls, and ends a run that does not end."""

from __future__ import annotations

import faulthandler
import sys
import threading
import time
from collections.abc import Callable

from cudnn_actor.trials.chaos import processes
from cudnn_actor.trials.chaos.tally import Tally

__all__ = ["Watchdog", "tell_who_waits"]

_LOOK_S = 0.1
_ASLEEP_S = 1.0
"""Seconds: if a check is later than that, this process did not run, as when the machine sleeps."""
_SHOWN = 20


class Watchdog:
    """A thread that checks the harness ten times a second.

    Parameters
    ----------
    tally
        Where requests are counted.
    limit_s
        Seconds within which the run should have ended, whatever happened.
    expired
        Called on the watchdog's thread if the run has not ended.
    """

    def __init__(self, tally: Tally, limit_s: float, expired: Callable[[], None]) -> None:
        self._tally = tally
        self._limit_s = limit_s
        self._expired = expired
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="chaos-watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        left_s, told, last = self._limit_s, False, time.monotonic()
        while not self._over.wait(_LOOK_S):
            now = time.monotonic()
            took_s, last = now - last, now
            if took_s > _LOOK_S + _ASLEEP_S:
                self._tally.excuse(took_s - _LOOK_S)
            left_s -= min(took_s, _ASLEEP_S)
            if not told and self._tally.stalled_requests():
                told = True
                tell_who_waits(self._tally)
            if left_s <= 0:
                tell_who_waits(self._tally)
                self._expired()
                return


def tell_who_waits(tally: Tally) -> None:
    """Print on stderr the waiting requests, the processes, and the stack of every thread."""
    out = sys.stderr
    print("\n--- what waits for what", file=out)
    stalled = tally.stalled_requests()
    for stall in stalled[-_SHOWN:]:
        where = f"{stall.sender} task {stall.task}, burst {stall.burst}"
        print(f"{stall.took_s:6.1f} s  {stall.request}  ({where})", file=out)
    print(
        f"{len(stalled)} requests have taken too long; {len(tally.lost_requests())} are in flight", file=out
    )
    for each in processes.find():
        print(f"process {each.pid}  {each.role}  state {each.state}", file=out)
    faulthandler.dump_traceback(file=sys.__stderr__ or 2, all_threads=True)
    print("---", file=out, flush=True)
