"""What a worker and its parent tell each other without a message: what has begun, and what is not to begin.

One anonymous file that both have mapped. The worker writes on its first pages, the parent on the rest, and
every word has one side that writes it:

=========================  =======  =========================================================================
`begun_count`              worker   requests that it has begun or dropped so far
`beat_ns`                  worker   its last sign of life, on the machine's monotonic clock
`since_ns`                 worker   since when the work in hand has not got on; 0 for none in hand
`begun`, for each place    worker   the number of the request that it has begun there
`finished`, likewise       worker   the number of the request that it has finished there, and beside it the
                                    plan, the beginning and the time of its run
`withdrawn`, likewise      parent   the number of the request there whose caller has gone
=========================  =======  =========================================================================

The claim. A request may be withdrawn in the moment in which the worker takes it up, and the parent must not
tell a caller "it never started" of a request that runs. Neither side can wait for the other. So each writes
down what it is about to do, and only then looks at what the other has written (Dekker's pattern):

- the worker, in `begin`: `begun[place] = number`, barrier, look at `withdrawn[place]`; run it unless the
  number is there;
- the parent, in `withdraw`: `withdrawn[place] = number`, barrier, look at `begun[place]`; promise that it
  never starts only if the number is not there.

Suppose that the worker runs it and the parent has promised. Then the worker's look came before the parent's
word was there, and the parent's look before the worker's was; each look came after its own side's word, so
each of the four steps came before itself. What cannot be ruled out is that both see each other: then the
worker leaves it and the parent says that it may have started. That is a promise less, never one too many.

The words are numbers of requests and not flags, so a place's former occupant is never mistaken for its
present one. A number is in one place at a time, and a place has another occupant only when the last has been
answered; whoever withdraws sees to it that the request is not answered, and its place given away, meanwhile.

What has finished. A worker gathers answers before it sends them, and may die first. So it notes here that a
request has finished, before it begins the next: what has begun and has not finished is then at most one
request of an engine that works on one at a time. The mark is written last, behind what stands beside it, and
is read only when the process has gone: then every store that it made is there, in its order. A mark is of the
place's present occupant only if it is that one's number, and what stands beside it was written before it.

The barrier. "Each look came after its own side's word" is just what a processor does not keep by itself:
a store waits in its buffer while the next load goes ahead. Between the two, therefore, a lock that nobody
else ever takes is released and taken again. Both are atomic read-modify-writes: on x86 either is a full
barrier. On ARM the store stays before the release, the load after the acquire, and an acquire never
overtakes the release before it (which is why it is in this order: taking and releasing would let both into
the middle, where they may change places). The compiler moves nothing across the calls.

The parent trusts nothing that it reads here. It only ever compares `begun` with a number of its own; a
worker that writes nonsense fools itself about its own requests, and is found out by its answers. The size is
sealed, so it cannot be cut off under the parent's feet.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import time
from typing import NamedTuple, Self

from cudnn_actor.actors import forks

__all__ = ["Finished", "StatusPage"]

_WORD_BYTES = 8
_PLAN_BYTES = 120
"""Of a plan's tag that there is room for; the rest of a longer one is cut off."""
_RECORD_BYTES = 4 * _WORD_BYTES + _PLAN_BYTES
"""What the worker writes for each place: begun, finished, when its run began, how long it took, the plan."""
_COUNT, _BEAT, _SINCE, _BUILDING = range(4)
_HEADER_WORDS = 8
_FIXED_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Finished(NamedTuple):
    """What a worker has noted of a request that it has finished.

    `started_ns` is 0 where its answer was more than a receipt: then it is known only that it has finished.
    """

    plan: str
    started_ns: int
    run_us: float


class StatusPage:
    """One worker process's, for its life. Made by `create` in the parent and by `attach` in the worker.

    Parameters
    ----------
    fd
        A descriptor of the file.
    window
        Places: requests that the worker may have at once.
    owned
        Whether `close` closes the descriptor.

    Raises
    ------
    OSError, ValueError
        It cannot be mapped, or is too small for the window.
    """

    __slots__ = (
        "__weakref__",
        "_acquire",
        "_begun",
        "_count",
        "_finished",
        "_map",
        "_owned",
        "_plan_in",
        "_plans",
        "_release",
        "_run_us",
        "_started",
        "_withdrawn",
        "_words",
        "fd",
    )

    def __init__(self, fd: int, window: int, *, owned: bool) -> None:
        theirs = _worker_bytes(window)
        self._map = mmap.mmap(fd, theirs + _parent_bytes(window))
        self._words = memoryview(self._map).cast("Q")
        self._begun, self._finished, self._started = (
            self._words[_HEADER_WORDS + row * window : _HEADER_WORDS + (row + 1) * window] for row in range(3)
        )
        last = (_HEADER_WORDS + 3 * window) * _WORD_BYTES
        whole = memoryview(self._map)
        self._run_us = whole[last : last + window * _WORD_BYTES].cast("d")
        self._plans = whole[last + window * _WORD_BYTES : last + window * (_WORD_BYTES + _PLAN_BYTES)]
        whole.release()
        self._plan_in: list[str] = [""] * window
        """What this process has written of each place's plan; the worker's."""
        first = theirs // _WORD_BYTES
        self._withdrawn = self._words[first : first + window]
        self._count = 0
        fence = threading.Lock()
        fence.acquire()
        self._release, self._acquire = fence.release, fence.acquire
        self.fd = fd
        """What the parent hands to the worker; of an attached page, what was given."""
        self._owned = owned
        forks.watch(self)

    def forget_parent(self) -> None:
        """In a forked child: the page is its parent's, which a word written here would deceive."""
        self.close()

    @classmethod
    def create(cls, window: int) -> Self:
        """A new page, all zeros; the parent's. Its descriptor is closed with it. Raises `OSError`."""
        fd = os.memfd_create("cudnn-actor-status", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, _worker_bytes(window) + _parent_bytes(window))
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _FIXED_SIZE)
            return cls(fd, window, owned=True)
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def attach(cls, fd: int, window: int) -> Self:
        """The page that the parent made for as many places; the worker's.

        The descriptor stays the caller's, who may close it at once.
        """
        return cls(fd, window, owned=False)

    def close(self) -> None:
        """Unmap it. Safe to call twice, and beside a `withdraw` on another thread."""
        for view in (self._begun, self._finished, self._started, self._run_us, self._plans):
            view.release()
        self._withdrawn.release()
        self._words.release()
        self._map.close()
        if self._owned:
            self._owned = False
            os.close(self.fd)

    # The claim.

    def begin(self, place: int, number: int) -> bool:
        """Whether to run the request in this place; when not, its caller has gone. The worker's.

        For the one thread that takes requests up, once for each of them: it counts them, too.
        """
        self._begun[place] = number
        self._count = count = self._count + 1
        self._words[_COUNT] = count
        self._release()
        self._acquire()
        return self._withdrawn[place] != number

    def forget(self, place: int) -> None:
        """Take back that the request in this place has begun. The worker's, before its answer is sent.

        For what was sent for its fault alone: the message itself follows under the same number, and may get
        the same place.
        """
        self._begun[place] = 0

    def withdraw(self, place: int, number: int) -> bool:
        """Whether the request in this place certainly never begins from here on. The parent's; any thread.

        False when it has begun, or may have: of a page that has been closed nobody can know. The caller
        keeps the request in its place meanwhile.
        """
        try:
            self._withdrawn[place] = number
            _barrier()
            return self._begun[place] != number
        except ValueError:  # closed
            return False

    def has_begun(self, place: int, number: int) -> bool:
        """Whether the request in this place has begun, for a worker that has gone. The parent's.

        Also for one that was left because it had been withdrawn: its caller has gone in any case. A worker
        that lives may begin it a moment later. Of a page that has been closed, True.
        """
        try:
            return self._begun[place] == number
        except ValueError:  # closed
            return True

    # What has finished.

    def finish(self, place: int, number: int, plan: str, started_ns: int, run_us: float) -> None:
        """Note that the request in this place has finished, and what its receipt says. The worker's."""
        if self._plan_in[place] is not plan:  # mostly it is that of the place's last
            written = plan.encode()[:_PLAN_BYTES]
            first = place * _PLAN_BYTES
            self._plans[first : first + _PLAN_BYTES] = written.ljust(_PLAN_BYTES, b"\0")
            self._plan_in[place] = plan
        self._started[place] = started_ns
        self._run_us[place] = run_us
        self._finished[place] = number

    def finish_otherwise(self, place: int, number: int) -> None:
        """Note that the request in this place has finished, with an answer that does not fit in here."""
        self._started[place] = 0
        self._finished[place] = number

    def finished(self, place: int, number: int) -> Finished | None:
        """What a worker that has gone has noted of the request in this place; None: it had not finished.

        The parent's. Also None of a page that has been closed.
        """
        try:
            if self._finished[place] != number:
                return None
            written = bytes(self._plans[place * _PLAN_BYTES : (place + 1) * _PLAN_BYTES])
            plan = written.rstrip(b"\0").decode(errors="replace")
            return Finished(plan, self._started[place], self._run_us[place])
        except ValueError:  # closed
            return None

    # What the watchdog and the figures look at; all 0 for a page that has been closed.

    @property
    def begun_count(self) -> int:
        """Requests begun or dropped so far, as the worker says: to the parent, any number below 2**64."""
        return self._read(_COUNT)

    @property
    def beat_ns(self) -> int:
        """When the worker last gave a sign of life, as `time.monotonic_ns` counts; 0 for never.

        Written by one thread of the worker. A time yet to come is none, and read as 0.
        """
        return self._past(_BEAT)

    @beat_ns.setter
    def beat_ns(self, now_ns: int) -> None:
        self._words[_BEAT] = now_ns

    @property
    def since_ns(self) -> int:
        """Since when the work in hand has not got on, likewise; 0 when there is none."""
        return self._past(_SINCE)

    @since_ns.setter
    def since_ns(self, since_ns: int) -> None:
        self._words[_SINCE] = since_ns

    @property
    def building_ns(self) -> int:
        """Since when a plan is being built, likewise, and signs of life may be missing; 0 for none."""
        return self._past(_BUILDING)

    @building_ns.setter
    def building_ns(self, since_ns: int) -> None:
        self._words[_BUILDING] = since_ns

    def _past(self, word: int) -> int:
        """A time that has been; the clock is one for all processes of the machine."""
        then_ns = self._read(word)
        return then_ns if then_ns <= time.monotonic_ns() else 0

    def _read(self, word: int) -> int:
        try:
            return self._words[word]
        except ValueError:  # closed
            return 0


def _barrier() -> None:
    """Let no load behind this go before a store ahead of it; see the module's docstring.

    The lock is new each time. With one for all, threads would wait for each other here, and a thread whose
    collector runs a caller's end in the middle of this (which may withdraw, too) would wait for itself.
    """
    fence = threading.Lock()
    fence.acquire()
    fence.release()
    fence.acquire()


def _worker_bytes(window: int) -> int:
    return _pages(_HEADER_WORDS * _WORD_BYTES + window * _RECORD_BYTES)


def _parent_bytes(window: int) -> int:
    return _pages(window * _WORD_BYTES)


def _pages(nbytes: int) -> int:
    return -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
