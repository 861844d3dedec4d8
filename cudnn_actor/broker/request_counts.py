"""Counts and latencies of a service's requests, by message type and by model.

Who writes: each answer is counted once, by whoever answers it, and of these there is one at a time: the
actor's thread in thread isolation, and whoever holds the host in process isolation. `count` counts an answer;
the fast path of process isolation does the same in its own step (`isolation.process.parent.fast_path`).

Who reads: any thread, at any time, without a lock. The counts of a message type are one list, which is copied
in one call of a C function, during which no other thread runs; and an answer's lines that change it are one
step (`actors.interrupts`). So its three histograms always have the same requests. The sums are one tuple,
which is replaced in that same step.

Place k of a histogram's `BUCKETS` counts times of less than 2**k ns, and not less than half of that. To find
it takes one call of `int.bit_length`, a third of the time that a search of bounds takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import msgspec
import numpy as np

from cudnn_actor.actors import Counters, Envelope
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
    "BUCKETS",
    "MOST_MODELS",
    "OTHER",
    "Histogram",
    "RequestCounters",
    "RequestCounts",
    "RequestObserver",
    "Sums",
    "Tally",
]

BUCKETS = 72
"""Places for counts: more than the bits of any difference of two clocks, also of a worker that writes
nonsense."""
_FIRST, _LAST = 10, 36
"""Histograms tell times apart from 2**10 ns, a microsecond, to 2**36 ns, 69 seconds."""
_LARGEST = 16
_NO_TIME_US = 1e15
_clock_ns = time.perf_counter_ns
_QUEUE, _RUN, _TOTAL = 0, BUCKETS, 2 * BUCKETS
"""Histograms of batch sizes tell sizes apart up to 2**16."""
MOST_MODELS = 64
"""How many models are counted each by its name. The others are counted together."""
OTHER = "other"
"""The name under which all else is counted together."""
_MOST_LETTERS = 100
_TYPES = COMPUTE.union(each for each in vars(kinds).values() if isinstance(each, type))
"""The types of all messages that a user may send."""


class Histogram(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How often a number was how large.

    Parameters
    ----------
    bounds
        Upper bounds, ascending. Of times they are in seconds.
    counts
        How often the number was in each bucket: above the bound before and at most this one (a time that is
        this bound to the nanosecond is in the next). One more than the bounds: the last counts what is above
        all of them.
    sum
        The sum of all numbers; of times in seconds.
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
    """The requests of one message type; of runs of models, those of one model.

    Parameters
    ----------
    operation
        The message's class: "ConvFwd", "Upload", "RunModel".
    model
        The name of the model; None for all other messages.
    failed
        Requests answered with an error. The histograms have those that were answered with a result.
    queue, run, total
        Seconds from admission to start, from start to finish, and from admission until the answer was here.
        Where only the worker knows when it began (`Ping`, `Warm`, `Explain`), the start is when it was sent.
    uploaded_bytes, downloaded_bytes
        Bytes of arrays on the host that were read for these requests, and that were made for their answers.
    batches
        Samples in a batch, of the batches that `CudnnRef.batched` has put together; None for all but models.
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


_MOVED: dict[str, Callable[[Any, Any], tuple[int, int]]] = {
    Allocate.__name__: lambda message, _: (_bytes_of((message.data,)), 0),
    Upload.__name__: lambda message, _: (_bytes_of((message.data,)), 0),
    Download.__name__: lambda _, value: (0, _bytes_of((value,))),
    RunModel.__name__: lambda message, value: (_bytes_of(message.arrays.values()), _bytes_of(value.values())),
    WriteWeights.__name__: lambda message, _: (_bytes_of(message.values), 0),
}
"""Messages with arrays on the host → the bytes that a message has brought, and those of its answer."""

Sums = tuple[int, int, int, int, int, int]


class Tally:
    """The counts of one message type or model."""

    __slots__ = (
        "batches",
        "counts",
        "failed",
        "model",
        "moved",
        "operation",
        "samples",
        "sums",
    )

    def __init__(self, operation: str, model: str | None = None) -> None:
        self.operation = operation
        self.model = model
        self.counts = [0] * (3 * BUCKETS)
        """Three histograms: of the times in the queue, in the run, and together."""
        self.sums: Sums = (0, 0, 0, 0, 0, _clock_ns())
        """The sums of these three; bytes that requests have brought, and those of their answers; and when the
        last one was answered, or when this was made."""
        self.failed = 0
        self.moved = _MOVED.get(operation)
        self.batches = [0] * BUCKETS
        self.samples = 0

    @property
    def is_used(self) -> bool:
        """Whether it has counted anything."""
        return bool(self.failed or self.samples or any(self.counts))

    def snapshot(self) -> RequestCounts:
        """The counts as a record. Any thread."""
        counts, sums = tuple(self.counts), self.sums
        of_sizes = None if self.model is None else _of_sizes(tuple(self.batches), self.samples)
        return RequestCounts(
            operation=self.operation,
            model=self.model,
            failed=self.failed,
            queue=_of_times(counts[_QUEUE:_RUN], sums[0]),
            run=_of_times(counts[_RUN:_TOTAL], sums[1]),
            total=_of_times(counts[_TOTAL:], sums[2]),
            uploaded_bytes=sums[3],
            downloaded_bytes=sums[4],
            batches=of_sizes,
        )

    def absorb(self, other: Tally) -> None:
        """Add another's counts."""
        self.counts[:] = map(int.__add__, self.counts, other.counts)
        self.batches[:] = map(int.__add__, self.batches, other.batches)
        queue, run, total, up, down, _ = map(int.__add__, self.sums, other.sums)
        self.sums = (queue, run, total, up, down, max(self.sums[-1], other.sums[-1]))
        self.failed += other.failed
        self.samples += other.samples


class RequestObserver(Protocol):
    """What is told of each answer, by whoever counts it: it must be quick, call no code of the user's, and
    raise nothing. It may be told twice in a row of the same answer: see `isolation.process.parent.fast_path`.
    """

    def answered(
        self, envelope: Envelope, value: Any, error: BaseException | None, started_ns: int, run_ns: int
    ) -> None:
        """A request was answered. `started_ns` is on `time.perf_counter_ns`'s clock; 0 if it failed."""

    def replayed(self, envelope: Envelope, cause: str) -> None:
        """A request was running at a crash, and will run again."""


class RequestCounters(Counters):
    """The counters of a service, with those of each message type and model.

    The types are those of the protocol. Of models, `MOST_MODELS` names have counts of their own. If one more
    comes, the name whose last request is the longest ago gives its counts to `OTHER`, names of unloaded
    models first; what is still loaded under it is counted there from then on.
    """

    __slots__ = ("_named", "_of_model", "_of_type", "_other", "_other_model", "observer")

    def __init__(self) -> None:
        super().__init__()
        self.observer: RequestObserver | None = None
        """Told of each answer; None for none. Any thread may replace it."""
        self._of_type: dict[type, Tally] = {}
        self._other = Tally(OTHER)
        self._other_model = Tally(RunModel.__name__, OTHER)
        self._of_model: dict[int, Tally] = {}
        """By the number of a loaded model."""
        self._named: dict[str, Tally] = {OTHER: self._other_model}

    # Answers. One caller at a time.

    def count(
        self, envelope: Envelope, value: Any, error: BaseException | None, run_us: float = -1.0
    ) -> None:
        """Count an answer. `run_us`: how long the run took, if the clock here does not tell."""
        if error is not None:
            self.failed += 1
            self.tally(envelope.message).failed += 1
            if (observer := self.observer) is not None:
                observer.answered(envelope, None, error, 0, 0)
            return
        started_ns = envelope.started_ns or envelope.admitted_ns
        tally, counts, queue, run, total, sums = self.measure(envelope, value, started_ns, run_us)
        # One step.
        self.finished += 1
        counts[queue] += 1
        counts[run] += 1
        counts[total] += 1
        tally.sums = sums

    def measure(
        self, envelope: Envelope, value: Any, started_ns: int, run_us: float
    ) -> tuple[Tally, list[int], int, int, int, Sums]:
        """What an answer changes: whose counts, which three of them grow by one, and the new sums.

        Changes nothing yet, but tells the observer. `run_us`: how long the run took; if negative, it has
        lasted until now. It calls next to nothing, because it is called for each request.
        """
        now_ns, message, admitted_ns = _clock_ns(), envelope.message, envelope.admitted_ns
        tally = self._of_type.get(type(message)) or self.tally(message)
        # A worker that writes nonsense may send what is no time.
        run_ns = now_ns - started_ns if run_us < 0 else int(run_us * 1e3) if run_us < _NO_TIME_US else 0
        queue_ns, total_ns = started_ns - admitted_ns, now_ns - admitted_ns
        queue, run, total, up, down, _ = tally.sums
        if tally.moved is not None:
            given, returned = tally.moved(message, value)
            up, down = up + given, down + returned
        if (observer := self.observer) is not None:
            observer.answered(envelope, value, None, started_ns, run_ns)
        return (
            tally,
            tally.counts,
            queue_ns.bit_length(),  # _QUEUE is 0
            _RUN + run_ns.bit_length(),
            _TOTAL + total_ns.bit_length(),
            (queue + queue_ns, run + run_ns, total + total_ns, up, down, now_ns),
        )

    def tally(self, message: Any) -> Tally:
        """The counts of a message's type or model."""
        kind = type(message)
        if kind is RunModel:
            return self._of_model.get(message.model.number, self._other_model)
        return self._of_type.get(kind) or self._tally_of_type(kind)

    def _tally_of_type(self, kind: type) -> Tally:
        """The same for a type that comes for the first time. What is no message of the protocol counts as
        `OTHER`: so there are never more than the protocol has messages."""
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
        oldest = min(named, key=lambda each: (id(each) in loaded, each.sums[-1]))
        for number, tally in self._of_model.items():
            if tally is oldest:
                self._of_model[number] = self._other_model
        # A reader in between finds these counts under neither name, and finds them again a moment later.
        assert oldest.model is not None
        del self._named[oldest.model]
        self._other_model.absorb(oldest)

    def note_batch(self, number: int, samples: int) -> None:
        """Count a batch. Any thread.

        The lines that change the counts are one step (`actors.interrupts`), so two threads lose none of each
        other's. Of a model whose counts are given to `OTHER` at this very moment, the batch may be lost.
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
        kept = [*tallies.values(), self._other]
        return tuple(each.snapshot() for each in kept if each.is_used)


def _of_times(counts: tuple[int, ...], total_ns: int) -> Histogram:
    return _histogram(counts, _FIRST, _LAST, 1e-9, total_ns * 1e-9)


def _of_sizes(counts: tuple[int, ...], total: int) -> Histogram:
    return _histogram(counts, 0, _LARGEST, 1.0, float(total))


def _histogram(counts: tuple[int, ...], first: int, last: int, unit: float, total: float) -> Histogram:
    bounds = tuple(2**power * unit for power in range(first, last + 1))
    return Histogram(
        bounds=bounds,
        counts=(sum(counts[: first + 1]), *counts[first + 1 : last + 1], sum(counts[last + 1 :])),
        sum=total,
    )
