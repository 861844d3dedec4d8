"""Dynamic batching: requests of one or a few samples each, which run together.

The file is long because a batch's whole way is one class: how it forms, waits, runs, and is handed out.
"""

from __future__ import annotations

import asyncio
from asyncio import _get_running_loop as running_loop_or_none
from collections.abc import Callable, Hashable, Mapping, Sequence
from itertools import repeat
from operator import attrgetter, methodcaller
from time import perf_counter_ns
from typing import Any, Protocol

import numpy as np

from cudnn_actor.actors import Deadline, forks, within
from cudnn_actor.actors.deadline import require_timeout
from cudnn_actor.actors.event_loop import running_loop, tolerating_closed
from cudnn_actor.actors.interrupts import run_through
from cudnn_actor.actors.kept_threads import KeptThreads
from cudnn_actor.actors.logs import Log, speaking_for
from cudnn_actor.actors.waking import Waking
from cudnn_actor.models.batch_arrays import (
    Gather,
    assemble,
    batch_specs,
    concatenate,
    divide_results,
    total_nbytes,
)
from cudnn_actor.models.batch_records import BatchStatistics, BatchTimes
from cudnn_actor.models.batch_requests import Batch, Fitting, Kinds, Request, comparison, kinds_of
from cudnn_actor.models.batch_rules import BatchRules
from cudnn_actor.models.forming import FormingBatches
from cudnn_actor.models.inputs import named_once
from cudnn_actor.models.source import Features
from cudnn_actor.protocol.errors import (
    CudnnActorError,
    DeadlineExceeded,
    ExecutionFailed,
    InvalidRequest,
    MailboxFull,
    OutcomeUnknown,
    OutOfMemory,
    QuarantinedRequest,
    Words,
)
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["BatchStatistics", "Batchable", "BatchedModel"]

log = Log("cudnn_actor")

_ON_LOOP_BYTES = 2 << 20
"""Arrays with more bytes than this are copied on a thread, not on the event loop."""

_EXPECTED_WITHIN_S = 1e-3
"""The most seconds that an idle device waits for one more request. For all requests of a batch together, it
waits twice as long. A server gets a request about every 300 us."""

_Future = asyncio.Future
_FUTURE, _IS_DONE = attrgetter("future"), methodcaller("done")
_INPUTS, _SAMPLES = attrgetter("inputs"), attrgetter("samples")
_SINCE_NS, _TIMER = attrgetter("since_ns"), attrgetter("timer")
"""With `map`, these read all requests of a batch, and Python runs no code for each of them."""

_NOBODY = object()
"""In place of an event loop: none may send requests."""

_DIVIDED = (OutcomeUnknown, QuarantinedRequest, ExecutionFailed, OutOfMemory)
"""After these errors, the requests of a batch run one by one: one request may be the cause, or less memory
may do."""


class Batchable(Features, Protocol):
    """A model that batches run on: a `Model`, or a pool's model, which each member has a copy of."""

    def validated_inputs(self, inputs: Mapping[str, Any]) -> Mapping[str, BufferRef | np.ndarray]:
        """See `Model.validated_inputs`."""

    async def run_checked(
        self,
        given: Mapping[str, BufferRef | np.ndarray],
        deadline: Deadline,
        *,
        again: bool = True,
        crashes: int = 0,
    ) -> dict[str, Any]:
        """See `Model.run_checked`."""

    async def reserve(self, specs: Mapping[str, TensorSpec], deadline: Deadline) -> Callable[[], None]:
        """See `Model.reserve`."""

    async def lend(self, specs: Mapping[str, TensorSpec]) -> dict[str, np.ndarray]:
        """See `Model.lend`."""


class BatchedModel:
    """A model that runs requests of many tasks together. `CudnnRef.batched` makes it; use it in `async with`.

    Every method runs on the event loop that entered it, so none runs between two awaits of another.

    Parameters
    ----------
    model
        The model that is run.
    rules
        How batches are formed.
    quarantined
        Whether the service refuses graphs of a digest.
    note_batch
        This is called with the number of samples of each batch.
    name
        The service's name in its log lines.
    timeout
        Seconds that entering the `async with` block may take.
    devices
        How many devices run batches.
    gather
        The function that copies the inputs of a batch which is put together on a thread; None for NumPy's.
    """

    def __init__(
        self,
        model: Batchable,
        rules: BatchRules,
        *,
        quarantined: Callable[[str], bool],
        note_batch: Callable[[int], None],
        name: str | None,
        timeout: float | None,
        devices: int = 1,
        gather: Gather | None = None,
    ) -> None:
        require_timeout(timeout)
        self._model = model
        self._rules = rules
        self._quarantined = quarantined
        self._note_batch = note_batch
        self._name = name
        self._timeout = timeout
        self._gather = gather or concatenate
        self._forming: FormingBatches[Request] = FormingBatches(
            rules.sizes,
            rules.max_delay_us / 1e6,
            rules.in_flight,
            devices,
            expected_within=min(rules.max_delay_us / 2e6, _EXPECTED_WITHIN_S),
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open = False
        self._serves: Any = _NOBODY
        """The event loop, while this is open."""
        self._waking = False
        self._timer: asyncio.TimerHandle | None = None
        self._batches: set[Batch] = set()
        self._groups: set[Hashable] = set()
        """The groups (`BatchRules.group_of`) that were warmed."""
        self._names = tuple(each.name for each in model.inputs)
        self._accepted: dict[Kinds, tuple[Hashable, int]] = {}
        self._alike = comparison(self._names, self._accepted)
        """See `comparison`."""
        self._turns = asyncio.Semaphore(rules.in_flight)
        """Each batch that is sent holds one of these."""
        self._memory: dict[Hashable, list[dict[str, np.ndarray]]] = {}
        """For each group: staging memory for the inputs of a batch of the largest size, which no batch uses
        now."""
        self._refusals: dict[Hashable, CudnnActorError] = {}
        """Groups with no size left → the error that their requests get."""
        self._counts = {"batches": 0, "samples": 0, "padded": 0, "divided": 0}
        self.on_batch: Callable[[BatchTimes], object] | None = None
        """This is called on the event loop for each batch that was answered. It must be quick, and raise
        nothing."""
        self._copying = KeptThreads(devices + 1, "batches")
        """The threads that copy: one for each device, and one for results."""
        self._releases: list[Callable[[], None]] = [self._copying.end]
        forks.finalize(self, _release_all, self._releases).atexit = False

    def __repr__(self) -> str:
        closed = "" if self._loop is None or self._open else "closed, "
        return f"<{closed}batched to {self._rules.sizes[-1]} along {self._rules.dim}: {self._model!r}>"

    # Life.

    async def __aenter__(self) -> BatchedModel:
        """Make the model ready: warm every size and run it once, so that no request waits for a plan to be
        built.

        Raises
        ------
        InvalidRequest
            This was entered before; the size of a named dim is missing; or an output's leading dim is not the
            batch's.
        CudnnActorError
            As `Model.warm` and `CudnnRef.run`.
        """
        if self._loop is not None:
            raise self._error("was entered before", "make another: gpu.batched(model, ...)")
        self._loop = running_loop()
        try:
            with within(self._timeout) as deadline:
                for specs in self._rules.sets_of_specs(self._model.inputs):
                    self._releases.append(await self._model.reserve(specs, deadline))
                    zeros = {name: np.zeros(spec.dims, spec.dtype.numpy) for name, spec in specs.items()}
                    results = await self._model.run_checked(zeros, deadline)
                    self._rules.check_results(results, zeros)
                    group, size = self._rules.group_of(zeros), len(next(iter(zeros.values())))
                    self._groups.add(group)
                    if size == self._rules.sizes[-1]:
                        started = range(self._forming.most_in_flight)
                        self._memory[group] = [await self._model.lend(specs) for _ in started]
        except BaseException:
            _release_all(self._releases)
            raise
        self._callers = Waking(self._loop, before=_note_nothing, after=_note_nothing)
        self._open, self._serves = True, self._loop
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Refuse further requests, and wait until the accepted ones have been answered. Idempotent.

        If the wait is cancelled, the requests that have no answer yet are cancelled, too.
        """
        if self._loop not in (None, running_loop()):
            raise self._error("belongs to another event loop", "close it there")
        self._open, self._serves = False, _NOBODY
        self._forming.expect_no_more()
        self._start()  # from now on the end of each batch starts the next
        try:
            while self._batches:
                await asyncio.wait([batch.task for batch in self._batches if batch.task is not None])
        finally:
            for request in self._forming.clear():
                request.future.cancel()
            for batch in tuple(self._batches):
                batch.cancel()
            if self._timer is not None:
                self._timer.cancel()
            self._memory.clear()
            _release_all(self._releases)

    # Requests.

    async def __call__(
        self,
        inputs: Mapping[str, Any] | None = None,
        /,
        *,
        timeout: float | None = None,
        **named: Any,
    ) -> dict[str, np.ndarray]:
        """Run the model on one or a few samples, in a batch with samples of other requests.

        Any number of requests may wait, each in a task of its own. Cancelling the wait withdraws a request
        whose batch has not started; else its answer is dropped.

        Parameters
        ----------
        inputs, named
            All inputs by name, as for `CudnnRef.run`, but on the host. The leading dim of each counts the
            samples: (1, 3, 224, 224) for one image, (4, 3, 224, 224) for four. An input that is named
            `timeout` can only be given in `inputs`. The arrays must not change until the answer is there.
        timeout
            Seconds after which to give up.

        Returns
        -------
        dict
            The outputs by name: new arrays, with as many samples as the inputs have.

        Raises
        ------
        InvalidRequest
            The inputs do not fit the model or each other, are on the device, or have dims that were not
            warmed; there are no samples, or more than a batch may have; the batched model is closed; or
            another event loop has entered it.
        DeadlineExceeded
            No answer within `timeout`. `started`: whether its batch had started.
        QuarantinedRequest
            The request was running at two crashes, at the second one alone. The other requests of its batch
            have run again. Or the graph of the only size that holds the request is quarantined: then the
            request has not run.
        ServiceStopped
            The service has ended.
        CudnnActorError
            The run has failed for another reason.
        """
        # The same as `_accept`, inlined: each sample comes this way.
        loop: Any = running_loop_or_none()
        if loop is not self._serves:  # None is not, either
            raise self._misuse()
        given = named if inputs is None else named_once(inputs, named) if named else inputs
        views, (group, samples) = self._alike(given) or self._check_in_full(given)
        future: asyncio.Future[dict[str, np.ndarray]] = _Future(loop=loop)
        request = Request(future, views, group, samples, perf_counter_ns())
        if timeout is not None or self._refusals:
            self._limit(request, timeout)
        forming = self._forming
        if samples == 1 and len(forming.arrived) < forming.room:
            forming.arrived.append((request, group, loop.time()))
        elif forming.add(request, group, samples, loop.time()) and not self._waking:
            self._wake()
        try:
            return await future
        except BaseException:
            # The task was cancelled, or closed with its loop. If an error is the answer, this does nothing.
            with tolerating_closed(loop):
                future.cancel()
                self._withdraw(request)
            raise

    def submit(
        self,
        inputs: Mapping[str, Any] | None = None,
        /,
        *,
        timeout: float | None = None,
        **named: Any,
    ) -> asyncio.Future[dict[str, np.ndarray]]:
        """Send a request as a call does, but return the future of its answer at once; cancelling it withdraws
        the request.

        Raises `MailboxFull` if `max_waiting` requests wait, and `InvalidRequest`; any other error is the
        future's.
        """
        if len(self._forming) >= self._rules.max_waiting:
            raise MailboxFull(capacity=self._rules.max_waiting, batched=True)
        request = self._accept(inputs, named, timeout)
        request.future.add_done_callback(lambda _: self._withdraw(request))  # its holder may cancel it
        return request.future

    @property
    def max_batch(self) -> int:
        """The most samples that a batch may have; a request may have no more either."""
        return self._rules.sizes[-1]

    def statistics(self) -> BatchStatistics:
        """The counts of batches and samples so far, and of the requests that wait now."""
        return BatchStatistics(**self._counts, waiting=len(self._forming), running=self._forming.running)

    def _accept(
        self, inputs: Mapping[str, Any] | None, named: Mapping[str, Any], timeout: float | None
    ) -> Request:
        loop: Any = running_loop_or_none()
        if loop is not self._serves:  # None is not, either
            raise self._misuse()
        given = named if inputs is None else named_once(inputs, named) if named else inputs
        views, (group, samples) = self._alike(given) or self._check_in_full(given)
        request = Request(_Future(loop=loop), views, group, samples, perf_counter_ns())
        if timeout is not None or self._refusals:
            self._limit(request, timeout)
        if self._forming.add(request, group, samples, loop.time()) and not self._waking:
            self._wake()
        return request

    def _misuse(self) -> InvalidRequest:
        """Why requests are refused on this event loop, or at all. Raises `NoEventLoop`."""
        loop = running_loop()
        if self._loop is None:
            return self._error("is not open", "use it in: async with gpu.batched(model, ...) as endpoint")
        if loop is not self._loop:
            return self._error(
                "belongs to another event loop", "make one in each loop: gpu.batched(model, ...)"
            )
        return self._error("is closed", "make another: gpu.batched(model, ...)")

    def _check_in_full(self, inputs: Mapping[str, Any]) -> Fitting:
        """The inputs, if they fit the model and were warmed. Raises `InvalidRequest`."""
        given = self._on_host(inputs)
        if (group := self._rules.group_of(given)) not in self._groups:
            raise self._rules.not_warmed(given)
        self._rules.check_samples(samples := self._rules.samples_of(given))
        arrays = tuple(given[name] for name in self._names)
        fits = self._accepted[kinds_of(arrays)] = group, samples
        return arrays, fits

    def _on_host(self, inputs: Mapping[str, Any]) -> dict[str, np.ndarray]:
        given = self._model.validated_inputs(inputs)
        for each in self._model.defaults:
            if each.name in given:
                raise InvalidRequest(
                    field=each.name,
                    value=Words("input"),
                    problem="has a default in the model, which batches keep",
                    fix="leave it out, or run the model by itself: await gpu.run(model, ...)",
                )
        for name, value in given.items():
            if isinstance(value, BufferRef):
                raise InvalidRequest(
                    field=name,
                    value=value,
                    problem="is on the device, and batches are put together on the host",
                    fix="give an array, or run it by itself: await gpu.run(model, ...)",
                )
        return given  # type: ignore[return-value]  # checked above

    def _limit(self, request: Request, timeout: float | None) -> None:
        """Start the time of a request. Raises its group's refusal if a batch cannot have so many samples."""
        if timeout is not None:
            require_timeout(timeout)  # after the names: an input may be named so
        sizes = self._forming.sizes(request.group)
        if not sizes or request.samples > sizes[-1]:
            raise self._refusals[request.group].again()
        if timeout is not None:
            request.timeout_s = timeout
            request.timer = request.future.get_loop().call_later(timeout, self._expire, request)

    def _error(self, problem: str, fix: str) -> InvalidRequest:
        return InvalidRequest(field="endpoint", value=self, problem=problem, fix=fix)

    def _expire(self, request: Request) -> None:
        if not request.future.done():
            assert request.timeout_s is not None
            started = request.batch is not None
            error = DeadlineExceeded(timeout_s=request.timeout_s, started=started)
            request.future.set_exception(error)
            self._withdraw(request)

    def _withdraw(self, request: Request) -> None:
        """Forget a request whose future is done. If it was answered, nothing of it is left.

        A batch that has not started is withdrawn once nobody waits for any of its requests.
        """
        if request.timer is not None:
            request.timer.cancel()
        if self._forming.remove(request, request.group) and self._open:
            self._wake()
        batch, request.batch = request.batch, None
        if batch is not None:
            batch.awaited -= 1
            if not batch.awaited:
                batch.cancel()

    # Batches.

    def _wake(self) -> None:
        """Look for batches to start, once every callback that is ready on the loop has run.

        So the tasks that a batch's answers have woken send their next requests before another batch starts.
        """
        if not self._waking:
            self._waking = True
            assert self._loop is not None
            self._loop.call_soon(self._start)

    def _start(self) -> None:
        """Start the batches that may start now."""
        self._waking = False
        if self._loop is None:
            return
        while (requests := self._forming.take(self._loop.time())) is not None:
            # If a future is done already, its `_withdraw` is scheduled, and will find nothing to do.
            taken = len(requests)
            if any(map(_IS_DONE, map(_FUTURE, requests))):
                requests = [each for each in requests if not each.future.done()]
            batch = Batch(requests, taken)
            if not requests:
                self._forming.end(batch.taken, self._loop.time())
                continue
            run_through(map(setattr, requests, repeat("batch"), repeat(batch)))
            self._batches.add(batch)
            batch.task = self._loop.create_task(self._run(batch))
        at, timer = self._forming.next_at(), self._timer
        if at is None or (timer is not None and timer.when() <= at):
            return  # a timer that comes too early looks again: that costs less than a timer for each request
        if timer is not None:
            timer.cancel()
        self._timer = self._loop.call_at(at, self._look_again)

    def _look_again(self) -> None:
        self._timer = None
        self._wake()

    async def _run(self, batch: Batch) -> None:
        loop = self._loop
        assert loop is not None
        try:
            batch.begin()
            await self._answer(batch.requests)
        except asyncio.CancelledError:
            for request in batch.requests:
                request.future.cancel()
            raise
        except Exception as error:  # noqa: BLE001 - the answer to whoever has none yet
            self._fail(batch.requests, error)
        finally:
            self._batches.discard(batch)
            batch.requests = ()  # they refer to the batch
            self._forming.end(batch.taken, loop.time())
            if self._open:
                self._wake()
            else:
                self._start()  # while it closes, every batch is in the set that is waited for

    async def _answer(self, requests: Sequence[Request], crashes: int = 0) -> None:
        """Run requests together, and answer each. If that fails, run them one by one.

        A batch of several requests does not run again after a crash. Each of its requests runs again, alone,
        and counts the batch's crash as its first. So the request that is the cause ends one more worker and
        is quarantined: two restarts, as if it had been sent alone.
        """
        group, several = requests[0].group, len(requests) > 1
        counts = [*map(_SAMPLES, requests)]
        size = self._forming.size_for(group, samples := sum(counts))
        if size is None:  # the size was left out meanwhile
            self._fail(requests, self._refusals[group])
            return
        self._counts["batches"] += 1
        self._counts["samples"] += samples
        self._counts["padded"] += size - samples
        self._note_batch(samples)
        began_ns = assembled_ns = perf_counter_ns()
        try:
            parts = [*map(_INPUTS, requests)]
            if not several and samples == size:
                async with self._turns:
                    inputs = dict(zip(self._names, parts[0], strict=True))
                    results = await self._model.run_checked(inputs, Deadline(), crashes=crashes)
            else:
                results, assembled_ns = await self._run_together(
                    parts, group, size, again=not several, crashes=crashes
                )
        except _DIVIDED as error:
            refused = isinstance(error, QuarantinedRequest) and self._quarantined(error.digest)
            first = refused and self._leave_out(group, size, error)
            if several:
                await self._answer_one_by_one(requests, size, error)
            elif refused and not first:  # another batch has had this size left out: try the next size
                await self._answer(requests, crashes)
            else:
                self._fail(requests, error)
        else:
            moments = began_ns, assembled_ns, perf_counter_ns()
            self._hand_out(requests, await self._divide(results, counts, size), moments)

    def _hand_out(
        self,
        requests: Sequence[Request],
        parts: Sequence[dict[str, np.ndarray]],
        moments: tuple[int, int, int],
    ) -> None:
        """Answer the requests of a batch. `moments`: when batch and run began, and when the run ended."""
        began_ns, assembled_ns, ran_ns = moments
        samples = sum(map(_SAMPLES, requests))
        futures = [*map(_FUTURE, requests)]
        if any(map(_IS_DONE, futures)):
            pairs = [*zip(requests, parts, strict=True)]
            requests = [request for request, _ in pairs if not request.future.done()]
            parts = [part for request, part in pairs if not request.future.done()]
            futures = [*map(_FUTURE, requests)]
        self._set_results(futures, parts)
        for timer in filter(None, map(_TIMER, requests)):
            timer.cancel()
        if self.on_batch is not None:
            times = BatchTimes(
                samples=samples,
                waited_ns=began_ns * len(requests) - sum(map(_SINCE_NS, requests)),
                assembled_ns=assembled_ns - began_ns,
                ran_ns=ran_ns - assembled_ns,
                divided_ns=perf_counter_ns() - ran_ns,
            )
            self.on_batch(times)

    def _set_results(
        self, futures: list[asyncio.Future[dict[str, np.ndarray]]], parts: Sequence[dict[str, np.ndarray]]
    ) -> None:
        """Give answers to futures. Their tasks run in a next callback of the loop."""
        try:
            self._callers.set_all_results(futures, parts)
        finally:
            self._callers.wake_soon()

    async def _divide(
        self, results: Mapping[str, np.ndarray], counts: Sequence[int], size: int
    ) -> list[dict[str, np.ndarray]]:
        """The outputs of each request. See `batch_arrays.divide_results`."""
        if total_nbytes(results.values()) > _ON_LOOP_BYTES:
            return await self._copying.run(divide_results, results, counts, size)
        return divide_results(results, counts, size, locked=self._copying.under_way > 0)

    async def _run_together(
        self, parts: Sequence[tuple[np.ndarray, ...]], group: Hashable, size: int, **options: Any
    ) -> tuple[dict[str, np.ndarray], int]:
        """Assemble a batch in memory that the device reads without another copy, and run it.

        Returns the outputs, and when the run began. Another batch gets the memory only if this one was
        answered: a run that nobody waits for may still read it.
        """
        unused = self._memory.setdefault(group, [])
        memory = (
            unused.pop()
            if unused
            else await self._model.lend(batch_specs(self._names, parts[0], self.max_batch))
        )
        arrays = [memory[name][:size] for name in self._names]
        if total_nbytes(arrays) <= _ON_LOOP_BYTES:
            assemble(parts, arrays)
        else:
            await self._copying.run(assemble, parts, arrays, self._gather)
        assembled_ns = perf_counter_ns()
        async with self._turns:
            batch = dict(zip(self._names, arrays, strict=True))
            results = await self._model.run_checked(batch, Deadline(), **options)
        if self._open:
            unused.append(memory)
        return results, assembled_ns

    async def _answer_one_by_one(
        self, requests: Sequence[Request], size: int, error: CudnnActorError
    ) -> None:
        self._counts["divided"] += 1
        samples = sum(each.samples for each in requests)
        # An `OutcomeUnknown` tells the sender to send the request again. The sender is this endpoint.
        why = f"a crash ended it ({error.cause})" if isinstance(error, OutcomeUnknown) else str(error)
        then = "its requests run one by one"
        with speaking_for(self._name):
            log.warning(
                "batch.divided", requests=len(requests), samples=samples, size=size, error=f"{why}; {then}"
            )
        crashes = int(isinstance(error, OutcomeUnknown))
        for request in requests:
            if not request.future.done():
                try:
                    await self._answer([request], crashes)
                except Exception as failure:  # noqa: BLE001 - the answer to this one
                    self._fail([request], failure)

    def _leave_out(self, group: Hashable, size: int, error: CudnnActorError) -> bool:
        """Form no more batches of a size that the service refuses. Returns False if that was so before."""
        if size not in self._forming.sizes(group):
            return False
        with speaking_for(self._name):
            log.error("batch.size_left_out", size=size, error=str(error))
        self._refusals[group] = error
        self._fail(self._forming.leave_out(group, size), error)
        return True

    @staticmethod
    def _fail(requests: Sequence[Request], error: Exception) -> None:
        for request in requests:
            request.batch = None
            if not request.future.done():
                own = error.again() if isinstance(error, CudnnActorError) else error
                request.future.set_exception(own)


def _note_nothing() -> None:
    """Nothing is noted before and after the callers of a batch are called."""


def _release_all(releases: list[Callable[[], None]]) -> None:
    while releases:
        releases.pop()()
