"""The status page: what a worker and its parent tell each other without a message.

The page says which requests have begun, have finished, or are withdrawn. It is an anonymous file that both
processes map. The worker writes its first pages, the parent the rest, and only one side writes each word:

=========================  =======  =========================================================================
`begun_count`              worker   requests that it has begun or dropped so far
`beat_ns`                  worker   its last heartbeat, on the machine's monotonic clock
`since_ns`                 worker   since when its work has made no progress; without work, since when it has
                                    had none
`built_ns`                 worker   when a build or tuning last made progress, in two words: one is written by
                                    the heartbeat, the other when a build begins or ends
`begun`, for each place    worker   the number of the request that it has begun there
`finished`, likewise       worker   the number of the request that it has finished there, and beside it the
                                    plan, the beginning and the time of its run
`withdrawn`, likewise      parent   the number of the request there that its caller has withdrawn
=========================  =======  =========================================================================

The claim. A caller may withdraw a request at the moment when the worker begins it. The parent must not tell a
caller "it never started" if the request runs, and neither side can wait for the other. So each side first
writes what it is about to do, and then reads what the other has written (Dekker's pattern):

- the worker, in `begin`: write `begun[place] = number`, barrier, read `withdrawn[place]`; run the request
  unless its number is there;
- the parent, in `withdraw`: write `withdrawn[place] = number`, barrier, read `begun[place]`; promise that the
  request never starts only if its number is not there.

Suppose that the worker runs the request although the parent has promised. Then the worker's read came before
the parent's write, and the parent's read before the worker's write. But each read came after its own side's
write. So each of the four steps would come before itself, which is impossible. It is possible that both reads
find the other's number. Then the worker skips the request, and the parent says that it may have started. This
is safe: the parent promises too little, never too much.

A worker that runs a loop reads `withdrawn` again before each turn, and ends the loop if the number is there
(`is_withdrawn`). That needs no barrier: a word that comes too late for one turn is read before the next.

The words are request numbers and not flags, so an earlier request in a place is never mistaken for the
present one. A request has one place at a time, and its place is reused only after it has been answered. The
caller of `withdraw` makes sure that the request is not answered, and its place not reused, meanwhile.

Finished requests. A worker gathers answers before it sends them, and may die in between. So it marks a
request as finished here before it begins the next. If the engine runs one request at a time, at most one
request has then begun and not finished. The worker writes the mark last, after the fields that belong to it.
The parent reads it only after the process has ended, when all of its stores are visible, in order. A mark is
valid for the present request of a place only if it is that request's number; the fields were written before
it.

The barrier. A processor does not by itself keep a read after its own side's earlier write: the store waits in
a buffer while the next load goes ahead. So between the two, the code releases a lock that no other thread
ever takes, and takes it again. Both are atomic read-modify-writes. On x86, each is a full barrier. On ARM,
the store stays before the release, the load stays after the acquire, and an acquire never overtakes the
release before it. (The order matters: taking first and releasing second would let the store and the load move
between the two, where they could change places.) The compiler moves nothing across the calls.

The parent trusts nothing that it reads here. It only compares `begun` with its own numbers. A worker that
writes nonsense harms only its own requests, and its answers reveal it. The size is sealed: a truncated file
would kill the parent with SIGBUS.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import time
from typing import NamedTuple, Self

from cudnn_actor.actors import forks
from cudnn_actor.protocol.messages.receipts import PlanCounts

__all__ = ["Finished", "StatusPage", "barrier"]

_WORD_BYTES = 8
_PLAN_BYTES = 120
"""Bytes for a plan's tag. A longer tag is cut off."""
_RECORD_BYTES = 4 * _WORD_BYTES + _PLAN_BYTES
"""The bytes that the worker writes for each place: begun, finished, when its run began, how long it took, the
plan."""
_COUNT, _BEAT, _SINCE, _BUILDING, _BUILT, _TURNED, _RESIDENT, _PLANS = range(8)
_HEADER_WORDS = 16
_FIXED_SIZE = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW


class Finished(NamedTuple):
    """A worker's record of a request that it has finished.

    `started_ns` is 0 if the answer was more than a receipt. Then it is only known that it has finished.
    """

    plan: str
    started_ns: int
    run_us: float


class StatusPage:
    """The page of one worker process. Made by `create` in the parent and by `attach` in the worker.

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
        The file cannot be mapped, or is too small for the window.
    """

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
        """The plan's tag that this process last wrote for each place. Used in the worker."""
        first = theirs // _WORD_BYTES
        self._withdrawn = self._words[first : first + window]
        self._count = 0
        fence = threading.Lock()
        fence.acquire()
        self._release, self._acquire = fence.release, fence.acquire
        self.fd = fd
        """The descriptor that the parent gives to the worker; in the worker, the one that it was given."""
        self._owned = owned
        forks.watch(self)

    def forget_parent(self) -> None:
        """Close the page in a forked child: a word written there would mislead the worker and its parent."""
        self.close()

    @classmethod
    def create(cls, window: int) -> Self:
        """A new page, all zeros, for the parent. `close` closes its descriptor. Raises `OSError`."""
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
        """The parent's page, mapped in the worker.

        The caller keeps the descriptor, and may close it at once.
        """
        return cls(fd, window, owned=False)

    def close(self) -> None:
        """Unmap the page. Safe to call twice, and while another thread calls `withdraw`."""
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
        """Claim the request in this place. Returns whether to run it; if not, it was withdrawn. Worker only.

        Called on the one thread that starts requests, once for each request. It also counts them.
        """
        self._begun[place] = number
        self._count = count = self._count + 1
        self._words[_COUNT] = count
        self._release()
        self._acquire()
        return self._withdrawn[place] != number

    def is_withdrawn(self, place: int, number: int) -> bool:
        """Whether the caller of the request in this place has left since it began. Worker only."""
        return self._withdrawn[place] == number

    def forget(self, place: int) -> None:
        """Clear the mark that the request in this place has begun. Worker only, before its answer is sent.

        For an injected fault: its message follows under the same number, and may get the same place.
        """
        self._begun[place] = 0

    def withdraw(self, place: int, number: int) -> bool:
        """Withdraw the request in this place. Returns whether it is certain that it never begins.

        Parent only; any thread. False if it has begun or may have begun, also for a closed page, which no
        longer tells. The caller keeps the request in its place meanwhile.
        """
        try:
            self._withdrawn[place] = number
            barrier()
            return self._begun[place] != number
        except ValueError:  # closed
            return False

    def has_begun(self, place: int, number: int) -> bool:
        """Whether a worker has begun the request in this place. Parent only.

        Also True for a withdrawn request that the worker has skipped, and for a closed page. False is certain
        only of a worker that has ended: a living one may begin the request a moment later.
        """
        try:
            return self._begun[place] == number
        except ValueError:  # closed
            return True

    # Finished requests.

    def finish(self, place: int, number: int, plan: str, started_ns: int, run_us: float) -> None:
        """Note that the request in this place has finished, with the facts of its receipt. Worker only."""
        if self._plan_in[place] is not plan:  # mostly the place's last request had the same plan
            written = plan.encode()[:_PLAN_BYTES]
            first = place * _PLAN_BYTES
            self._plans[first : first + _PLAN_BYTES] = written.ljust(_PLAN_BYTES, b"\0")
            self._plan_in[place] = plan
        self._started[place] = started_ns
        self._run_us[place] = run_us
        self._finished[place] = number

    def finish_otherwise(self, place: int, number: int) -> None:
        """Note that the request in this place has finished; for an answer that does not fit into the page."""
        self._started[place] = 0
        self._finished[place] = number

    def finished_record(self, place: int, number: int) -> Finished | None:
        """The record of an ended worker about the request in this place; None if the request had not
        finished.

        Parent only. None for a closed page.
        """
        try:
            if self._finished[place] != number:
                return None
            written = bytes(self._plans[place * _PLAN_BYTES : (place + 1) * _PLAN_BYTES])
            plan = written.rstrip(b"\0").decode(errors="replace")
            return Finished(plan, self._started[place], self._run_us[place])
        except ValueError:  # closed
            return None

    # For the watchdog and the statistics. All are 0 for a closed page.

    @property
    def begun_count(self) -> int:
        """Requests begun or dropped so far, as the worker claims: it may write any number below 2**64."""
        return self._read(_COUNT)

    @property
    def beat_ns(self) -> int:
        """The time of the worker's last heartbeat, on `time.monotonic_ns`'s clock; 0 for never.

        Written by one thread of the worker. A time in the future is invalid, and read as 0.
        """
        return self._past(_BEAT)

    @beat_ns.setter
    def beat_ns(self, now_ns: int) -> None:
        self._words[_BEAT] = now_ns

    @property
    def since_ns(self) -> int:
        """Since when the worker's work has made no progress, on the same clock; without work, since when it
        has none. 0 before the first heartbeat."""
        return self._past(_SINCE)

    @since_ns.setter
    def since_ns(self, since_ns: int) -> None:
        self._words[_SINCE] = since_ns

    @property
    def building_ns(self) -> int:
        """Since when a plan is being built, on the same clock; 0 for none. Heartbeats may be missing then."""
        return self._past(_BUILDING)

    def note_build(self, now_ns: int, *, builds: bool) -> None:
        """Note that a build begins now, or that the last one has ended. Worker only, one thread at a time."""
        self._words[_TURNED] = now_ns  # first: whoever sees that no build runs also sees when the last ended
        self._words[_BUILDING] = now_ns if builds else 0

    @property
    def built_ns(self) -> int:
        """When a build or tuning last made progress, or ended, on the same clock; 0 for never.

        Set by the heartbeat, which may write an older time than the end of a build.
        """
        return max(self._past(_BUILT), self._past(_TURNED))

    @built_ns.setter
    def built_ns(self, then_ns: int) -> None:
        self._words[_BUILT] = then_ns

    @property
    def plan_counts(self) -> PlanCounts:
        """Counts of the worker's plan cache, as of its last heartbeat. It may write any numbers below 2**64.

        They are written one by one, so one may be a heartbeat newer than another.
        """
        size, hits, misses, evictions = (self._read(_PLANS + word) for word in range(4))
        return PlanCounts(size=size, hits=hits, misses=misses, evictions=evictions)

    @plan_counts.setter
    def plan_counts(self, counts: PlanCounts) -> None:
        words = (counts.size, counts.hits, counts.misses, counts.evictions)
        for word, count in enumerate(words, _PLANS):
            self._words[word] = count

    @property
    def resident_bytes(self) -> int:
        """Bytes of host memory that the worker has, as of its last heartbeat."""
        return self._read(_RESIDENT)

    @resident_bytes.setter
    def resident_bytes(self, nbytes: int) -> None:
        self._words[_RESIDENT] = nbytes

    def _past(self, word: int) -> int:
        """The time in a word; 0 if it is in the future. All processes of the machine share this clock."""
        then_ns = self._read(word)
        return then_ns if then_ns <= time.monotonic_ns() else 0

    def _read(self, word: int) -> int:
        try:
            return self._words[word]
        except ValueError:  # closed
            return 0


def barrier() -> None:
    """Keep every later load after every earlier store. See the module's docstring.

    The lock is new each time. With a shared lock, threads would wait for each other here. And a thread would
    deadlock with itself if the garbage collector ran a finalizer here that withdraws a request, too.
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
