"""How many threads BLAS uses: a setting of the whole process.

OpenBLAS runs the products of one call at a time on threads of its own, which spin for a
while behind it. Where the engine runs blocks side by side, each product is to run on its
block's thread alone.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import threadpoolctl

from cudnn_actor.actors import forks

__all__ = ["loaded_libraries", "set_threads", "shared_setting", "threads_of_blas"]


class _Setting:
    """The limits of the runs at this moment, and what each library used when the first of these began.

    A signal handler may raise anywhere in `begin`. The run ends all the same, and `end` may be repeated.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.limits: dict[object, int] = {}
        """A run → its limit."""
        self.before: list[int] = []

    def begin(self, run: object, count: int) -> None:
        with self.lock:
            if not self.limits:
                self.before = [library.num_threads for library in loaded_libraries()]
            self.limits[run] = count
            self._apply()

    def end(self, run: object) -> None:
        with self.lock:
            if self.limits.pop(run, None) is not None:
                self._apply()

    def _apply(self) -> None:
        for library, before in zip(loaded_libraries(), self.before, strict=True):
            set_threads(library, min([before, *self.limits.values()]))


shared_setting = _Setting()


@contextlib.contextmanager
def threads_of_blas(count: int) -> Iterator[None]:
    """Limit the threads of BLAS to `count`, in the whole process, while the body runs.

    If several limits are set at the same time, the least one counts. The last body to end restores the
    numbers of threads from before the first.
    """
    setting, run = shared_setting, object()  # a forked child has another one
    try:
        setting.begin(run, count)
        yield
    finally:
        setting.end(run)


def _renew() -> None:
    """Forget the runs in a forked child: they are the parent's, and their threads are not in the child."""
    global shared_setting
    former, shared_setting = shared_setting, _Setting()
    if former.limits:
        for library, before in zip(loaded_libraries(), former.before, strict=False):
            set_threads(library, before)


forks.call_in_child(_renew)


def set_threads(library: Any, count: int) -> None:
    """Set it from any thread: threadpoolctl 3.8 ignores all but the first that does, until that gives up."""
    give_up = getattr(library, "clear_controlling_thread", None)
    if give_up is not None:
        give_up(force=True)
    library.set_num_threads(count)
    if give_up is not None:
        give_up(force=True)


@functools.cache
def loaded_libraries() -> tuple[Any, ...]:
    """The BLAS libraries that were loaded at the first call, which takes some milliseconds.

    A library that is loaded later is not limited.
    """
    blas = threadpoolctl.ThreadpoolController().select(user_api="blas")
    return tuple(blas.lib_controllers)
