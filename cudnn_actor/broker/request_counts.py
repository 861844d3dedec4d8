"""Counts and latencies of a service's requests, by message type and by model.

Writers: each answer is counted once, by the thread that answers it. There is one such thread at a time: the
actor's in thread isolation, and the one that holds the host in process isolation. `count` counts an answer;
the fast path of process isolation does the same in its own step (`isolation.process.parent.fast_path`).

Readers: any thread, at any time, without a lock. Times are read from `AnswerTimes`: the three histograms of
a message type always have the same requests. Bytes are one tuple for each type, which is replaced.
"""

from __future__ import annotations

import contextvars
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from cudnn_actor.actors import Counters, Envelope
from cudnn_actor.broker.answer_times import (
    BUCKETS,
    MOST_WAITING,
    NO_TIME_US,
    AnswerTimes,
    Stamps,
    Times,
    together,
)
from cudnn_actor.protocol.messages import kinds
from cudnn_actor.protocol.messages.messages import (
    COMPUTE,
    Allocate,
    Download,
    Free,
    RunModel,
    Upload,
    WriteWeights,
)
from cudnn_actor.protocol.types.short_repr import short_repr

__all__ = [
    "MOST_MODELS",
    "NONE_MOVED",
    "NO_TALLY",
    "OTHER",
    "Histogram",
    "RequestCounters",
    "RequestCounts",
    "RequestObserver",
    "Tally",
]

_FIRST, _LAST = 10, 36
"""Histograms tell times apart from 2**10 ns, a microsecond, to 2**36 ns, 69 seconds."""
_LARGEST = 16
"""Histograms of batch sizes tell sizes apart up to 2**16."""
MOST_MODELS = 64
"""How many models are counted by name. The others are counted together."""
OTHER = "other"
"""The name under which all else is counted together."""
_MOST_LETTERS = 100
_TYPES = COMPUTE.union(each for each in vars(kinds).values() if isinstance(each, type))
"""The types of all messages that a user may send."""


class Histogram(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A histogram: how often a number was in each of several ranges.

    Parameters
    ----------
    bounds
        Upper bounds, ascending; in seconds for times.
    counts
        How often the number was in each bucket: above the bound before and at most this one (a time that is
        this bound to the nanosecond is in the next). One more than the bounds: the last counts what is above
        all of them.
    sum
        The sum of all numbers; in seconds for times.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    def __repr__(self) -> str:
        return f"<Histogram of {self.count:,}: mean {self.mean:.3g}, p99 {self.quantile(0.99):.3g}>"

    @property
    def count(self) -> int:
        """How many numbers there are."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """The mean; 0 without numbers."""
        return self.sum / self.count if self.count else 0.0

    def quantile(self, fraction: float) -> float:
        """An upper bound of the smallest numbers that are this fraction of all: `quantile(0.99)`.

        At most twice the true quantile, between the first and the last bound. Infinity where the quantile is
        above the last bound; 0 without numbers.
        """
        wanted, below = fraction * self.count, 0
        if not self.count:
            return 0.0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            below += count
            if count and below >= wanted:
                return bound
        return float("inf")


class RequestCounts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The requests of one message type, or, for runs of models, of one model.

    Parameters
    ----------
    operation
        The message's class: "ConvFwd", "Upload", "RunModel".
    model
        The name of the model; None for all other messages.
    failed
        Requests that were answered with an error. The histograms have the requests that were answered with a
        result.
    queue, run, total
        Seconds from admission to start, from start to finish, and from admission until the answer was here.
        Where only the worker knows when it began (`Ping`, `Warm`, `Explain`), the start is when it was sent.
    uploaded_bytes, downloaded_bytes
        Bytes of arrays on the host that were read for these requests, and that were made for their answers.
    batches
        The samples of the batches that `CudnnRef.batched` has put together; None except for models.
    """

    operation: str
    model: str | None
    failed: int
    queue: Histogram
    run: Histogram
    total: Histogram
    uploaded_bytes: int
    downloaded_bytes: int
    batches: Histogram | None = None

    __repr__ = short_repr

    @property
    def finished(self) -> int:
        """Requests answered with a result."""
        return self.total.count


def _bytes_of(values: Iterable[Any]) -> int:
    """Bytes of the arrays on the host."""
    return sum([value.nbytes for value in values if isinstance(value, np.ndarray)])


def _moved_by_run(message: RunModel, value: Mapping[str, Any]) -> tuple[int, int]:
    """Flat, because runs of models come more often than all else that moves bytes."""
    given = returned = 0
    for array in message.arrays.values():
        if isinstance(array, np.ndarray):
            given += array.nbytes
    for array in value.values():
        if isinstance(array, np.ndarray):
            returned += array.nbytes
    return given, returned


_MOVED: dict[str, Callable[[Any, Any], tuple[int, int]]] = {
    Allocate.__name__: lambda message, _: (_bytes_of((message.data,)), 0),
    Upload.__name__: lambda message, _: (_bytes_of((message.data,)), 0),
    Download.__name__: lambda _, value: (0, _bytes_of((value,))),
    RunModel.__name__: _moved_by_run,
    WriteWeights.__name__: lambda message, _: (_bytes_of(message.values), 0),
}
"""Messages with arrays on the host → the bytes of arrays in a message, and in its answer."""

_numbers = itertools.count()
NONE_MOVED = 0, 0


class Tally:
    """The counts of one message type or model, except the times."""

    __slots__ = ("batches", "bytes", "failed", "made_ns", "model", "moves", "number", "operation", "samples")

    def __init__(self, operation: str, model: str | None = None) -> None:
        self.number = next(_numbers)
        """The number of the tally's times. Each tally has another number."""
        self.operation = operation
        self.model = model
        self.moves = _MOVED.get(operation)
        """The bytes of an answer, from its message and its value; None if there never are any."""
        self.bytes = NONE_MOVED
        """The bytes of host arrays in requests, and in their answers."""
        self.failed = 0
        self.batches = [0] * BUCKETS
        self.samples = 0
        self.made_ns = time.perf_counter_ns()

    def snapshot(self, times: Times | None) -> RequestCounts | None:
        """The counts as a record; None if there are none. Any thread. `times`: the times of the answers."""
        if not (self.failed or self.samples or times):
            return None
        up, down = self.bytes
        queue, run, total = _of_times(times)
        return RequestCounts(
            operation=self.operation,
            model=self.model,
            failed=self.failed,
            queue=queue,
            run=run,
            total=total,
            uploaded_bytes=up,
            downloaded_bytes=down,
            batches=None if self.model is None else _of_sizes(tuple(self.batches), self.samples),
        )

    def absorb(self, other: Tally) -> None:
        """Add another's counts."""
        self.batches[:] = map(int.__add__, self.batches, other.batches)
        up, down = map(int.__add__, self.bytes, other.bytes)
        self.bytes = up, down
        self.failed += other.failed
        self.samples += other.samples


NO_TALLY = Tally("")
"""A tally that counts nothing, for an answer of which only the times are counted."""


class RequestObserver(Protocol):
    """An observer of answers. The thread that counts an answer calls it. It must be quick, call no code of
    the user's, and raise nothing. It may be told of the same answer twice in a row: see
    `isolation.process.parent.fast_path`.
    """

    def answered(
        self, envelope: Envelope, value: Any, error: BaseException | None, started_ns: int, run_ns: int
    ) -> None:
        """A request was answered. `started_ns` is on `time.perf_counter_ns`'s clock; 0 if it failed."""

    def not_run(self, envelope: Envelope, error: BaseException) -> None:
        """A request ended and was not run: its caller has left, or its time or the service is over.

        Any thread may call it.
        """

    def replayed(self, envelope: Envelope, cause: str) -> None:
        """A request was running at a crash, and will run again."""

    def sent(self, envelope: Envelope) -> dict[str, str] | None:
        """Note that a request is sent to another process. Returns the headers to send with it; None for
        none."""

    def received(self, headers: Mapping[str, str]) -> contextvars.Context:
        """Note that a request has come from another process. Returns the context to send it in: a copy of the
        present one, with the values of `sent` in the headers, if there are any."""


class RequestCounters(Counters):
    """The counters of a service, with those of each message type and model.

    The types are those of the protocol. Only `MOST_MODELS` names of models have counts of their own. If
    another name comes, the least recently used name gives its counts to `OTHER`, names of unloaded models
    first. Models that are still loaded under that name are counted there from then on.
    """

    __slots__ = ("_named", "_observer", "_of_model", "_of_type", "_other", "_other_model", "_plain", "_times")

    def __init__(self) -> None:
        super().__init__()
        self._times: AnswerTimes = AnswerTimes()
        self._observer: RequestObserver | None = None
        self._of_type: dict[type, Tally] = {}
        self._plain: dict[type, int] = {}
        """The numbers of the types for whose answers only times are counted. Empty while there is an
        observer."""
        self._other = Tally(OTHER)
        self._other_model = Tally(RunModel.__name__, OTHER)
        self._of_model: dict[int, Tally] = {}
        """The counts of each loaded model, by its number."""
        self._named: dict[str, Tally] = {OTHER: self._other_model}

    @property
    def observer(self) -> RequestObserver | None:
        """The observer of answers; None for none. Any thread may replace it."""
        return self._observer

    @observer.setter
    def observer(self, observer: RequestObserver | None) -> None:
        self._observer = observer
        self._plain = {}

    # Answers. One caller at a time.

    def count(
        self,
        envelope: Envelope,
        value: Any,
        error: BaseException | None,
        now_ns: int,
        run_us: float = -1.0,
    ) -> None:
        """Count an answer. `run_us`: how long the run took, if the clock here does not tell."""
        message = envelope.message
        kind, plain = type(message), self._plain
        # This runs for each request, amid much else, so it calls next to nothing, and lines come twice.
        if error is None:
            if kind in plain:  # nearly all answers
                waiting = self._times.kept[2]
                if len(waiting) >= MOST_WAITING:
                    waiting = self._times.pack()
                stamps = plain[kind], envelope.admitted_ns, envelope.started_ns, now_ns, run_us
                # One step.
                self.finished += 1
                waiting += stamps
                return
            if kind is RunModel and self._observer is None:
                tally = self._of_model.get(message.model.number, self._other_model)
                uploaded, downloaded = tally.bytes
                given, returned = _moved_by_run(message, value)
                moved = uploaded + given, downloaded + returned
                waiting = self._times.kept[2]
                if len(waiting) >= MOST_WAITING:
                    waiting = self._times.pack()
                stamps = tally.number, envelope.admitted_ns, envelope.started_ns, now_ns, run_us
                # One step.
                self.finished += 1
                tally.bytes = moved
                waiting += stamps
                return
        self._count_one(envelope, value, error, now_ns, run_us)

    def _count_one(
        self, envelope: Envelope, value: Any, error: BaseException | None, now_ns: int, run_us: float
    ) -> None:
        if error is not None:
            self.failed += 1
            self.tally(envelope.message).failed += 1
            if (observer := self._observer) is not None:
                observer.answered(envelope, None, error, 0, 0)
            return
        started_ns = envelope.started_ns or envelope.admitted_ns
        waiting, stamps, tally, moved = self.measure(envelope, value, started_ns, now_ns, run_us)
        # One step.
        self.finished += 1
        tally.bytes = moved
        waiting += stamps

    def measure(
        self, envelope: Envelope, value: Any, started_ns: int, now_ns: int, run_us: float
    ) -> tuple[list[Any], Stamps, Tally, tuple[int, int]]:
        """The changes that an answer makes: a list, the stamps to append to it, the tally, and its new bytes.

        This counts nothing yet, but tells the observer. `run_us`: how long the run took; if negative, it has
        lasted until now.
        """
        waiting = self._times.kept[2]
        if len(waiting) >= MOST_WAITING:
            waiting = self._times.pack()
        message, plain = envelope.message, self._plain
        if type(message) is RunModel and self._observer is None:
            tally = self._of_model.get(message.model.number, self._other_model)
            moved = tally.bytes
            if message.arrays or value:
                given, returned = _moved_by_run(message, value)
                moved = moved[0] + given, moved[1] + returned
            return waiting, (tally.number, envelope.admitted_ns, started_ns, now_ns, run_us), tally, moved
        number, tally, moved = plain.get(type(message)), NO_TALLY, NONE_MOVED
        if number is None:
            tally = self.tally(message)
            number, moved, moves = tally.number, tally.bytes, tally.moves
            if moves is not None:
                given, returned = moves(message, value)
                moved = moved[0] + given, moved[1] + returned
            if (observer := self._observer) is not None:
                told_ns = int(run_us * 1e3) if run_us < NO_TIME_US else 0
                run_ns = now_ns - started_ns if run_us < 0 else told_ns
                observer.answered(envelope, value, None, started_ns, run_ns)
            elif moves is None and type(message) in self._of_type:
                plain[type(message)] = number  # a thread that has set an observer has replaced the dict
        return waiting, (number, envelope.admitted_ns, started_ns, now_ns, run_us), tally, moved

    def of_upload(self, message: Any, nbytes: int) -> tuple[int, Tally, tuple[int, int]] | None:
        """What `measure` will find out about the answer to an upload of `nbytes` bytes on the host, without
        its times: the tally's number, the tally, and its new bytes. None while an observer is to be told."""
        if self._observer is not None:
            return None
        tally = self.tally(message)
        uploaded, downloaded = tally.bytes
        return tally.number, tally, (uploaded + nbytes, downloaded)

    def count_not_run(self, envelope: Envelope, error: Exception) -> None:
        """See `Counters`."""
        super().count_not_run(envelope, error)
        self.tell_not_run(envelope, error)

    def tell_not_run(self, envelope: Envelope, error: Exception) -> None:
        """Tell the observer of a request that is not run, which is counted elsewhere. Any thread."""
        if (observer := self._observer) is not None:
            observer.not_run(envelope, error)

    def tally(self, message: Any) -> Tally:
        """The counts of a message's type or model."""
        kind = type(message)
        if kind is RunModel:
            return self._of_model.get(message.model.number, self._other_model)
        return self._of_type.get(kind) or self._tally_of_type(kind)

    def _tally_of_type(self, kind: type) -> Tally:
        """The counts of a type that comes for the first time. An object that is no message of the protocol
        counts as `OTHER`, so there are never more tallies than the protocol has messages."""
        known = Free if issubclass(kind, Free) else kind  # the service's own messages are derived from it
        if known not in _TYPES:
            return self._other
        tally = self._of_type.setdefault(known, Tally(known.__name__))
        self._of_type[kind] = tally
        return tally

    # Models. One caller at a time.

    def name_model(self, number: int, name: str) -> None:
        """Count runs of a model under a name. Models of one name are counted together."""
        name = name[:_MOST_LETTERS] or OTHER
        if name not in self._named:
            if len(self._named) > MOST_MODELS:
                self._forget_one()
            self._named[name] = Tally(RunModel.__name__, name)
        self._of_model[number] = self._named[name]

    def forget_model(self, number: int) -> None:
        """Note that a model is unloaded. Its counts stay until another name takes their place."""
        self._of_model.pop(number, None)

    def _forget_one(self) -> None:
        loaded = set(map(id, self._of_model.values()))
        named = (each for name, each in self._named.items() if name != OTHER)
        times = dict(self._times.read())
        oldest = min(
            named,
            key=lambda each: (
                id(each) in loaded,
                times[each.number].last_ns if each.number in times else each.made_ns,
            ),
        )
        for number, tally in self._of_model.items():
            if tally is oldest:
                self._of_model[number] = self._other_model
        # A reader in between finds these counts under neither name, and finds them again a moment later.
        assert oldest.model is not None
        del self._named[oldest.model]
        self._other_model.absorb(oldest)
        if (its := times.pop(oldest.number, None)) is not None:
            others = times.get(self._other_model.number)
            times[self._other_model.number] = its if others is None else together(others, its)
            self._times.replace(times)

    def note_batch(self, number: int, samples: int) -> None:
        """Count a batch. Any thread.

        The lines that change the counts are one step (`actors.interrupts`), so two threads lose none of each
        other's counts. If the model's counts are given to `OTHER` at this very moment, the batch may be lost.
        """
        tally, bucket = self._of_model.get(number, self._other_model), (samples - 1).bit_length()
        # One step.
        tally.batches[bucket] += 1
        tally.samples += samples

    # Any thread.

    def snapshots(self) -> tuple[RequestCounts, ...]:
        """The counts of all message types and models that have come so far."""
        # Each `tuple` is one call of a C function: no other thread changes the dict meanwhile.
        tallies = {id(each): each for each in (*tuple(self._of_type.values()), *tuple(self._named.values()))}
        times = self._times.read()
        found = (each.snapshot(times.get(each.number)) for each in (*tallies.values(), self._other))
        return tuple(each for each in found if each is not None)


def _of_times(times: Times | None) -> Iterator[Histogram]:
    """The histograms of times in the queue, in the run, and together."""
    counts, sums = (
        ([[0] * BUCKETS] * 3, (0, 0, 0)) if times is None else (times.counts.tolist(), times.sums_ns)
    )
    for of_kind, sum_ns in zip(counts, sums, strict=True):
        yield _histogram(of_kind, _FIRST, _LAST, 1e-9, sum_ns * 1e-9)


def _of_sizes(counts: tuple[int, ...], total: int) -> Histogram:
    return _histogram(counts, 0, _LARGEST, 1.0, float(total))


def _histogram(counts: Sequence[int], first: int, last: int, unit: float, total: float) -> Histogram:
    bounds = tuple(2**power * unit for power in range(first, last + 1))
    return Histogram(
        bounds=bounds,
        counts=(sum(counts[: first + 1]), *counts[first + 1 : last + 1], sum(counts[last + 1 :])),
        sum=total,
    )
