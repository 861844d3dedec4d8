"""`BlockingRef`, the handle without asyncio that `blocking.spawn` returns."""

from __future__ import annotations

import concurrent.futures
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar, overload

import pykka

from cudnn_actor.actors import forks
from cudnn_actor.actors.threads import ThreadRefused
from cudnn_actor.blocking.methods import blocking, nothing
from cudnn_actor.blocking.models import BlockingBatchedModel, BlockingModel, async_model
from cudnn_actor.blocking.portal import Portal
from cudnn_actor.models.sizes import Sizes
from cudnn_actor.protocol.errors import ServiceStopped, StartFailed
from cudnn_actor.protocol.messages.any_message import Answer, AnyMessage
from cudnn_actor.protocol.messages.messages import Message
from cudnn_actor.protocol.messages.model_messages import ModelRef
from cudnn_actor.protocol.messages.receipts import Receipt
from cudnn_actor.protocol.operations import Operation
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.checks import require_seconds
from cudnn_actor.protocol.types.dtypes import DTypeLike
from cudnn_actor.protocol.types.tune import Tune
from cudnn_actor.service.client import DRAIN_S, CudnnRef
from cudnn_actor.service.computing import Computable
from cudnn_actor.service.health import Health
from cudnn_actor.service.metrics import Metrics
from cudnn_actor.service.requests import Requests
from cudnn_actor.service.scopes import Scope
from cudnn_actor.service.service import CudnnService
from cudnn_actor.supervision import Fired, LifecycleEvent

__all__ = ["BlockingRef", "BlockingRequests", "BlockingScope", "portal_for"]

KeptT = TypeVar("KeptT", bound=BufferRef | ModelRef | BlockingModel)


class _ScopeOfACall(Scope):
    """The owner of what a single call makes."""

    shown_as = "BlockingRef"
    """The class of the object that the caller has, for texts about arguments."""


class BlockingRequests:
    """The requests that a service takes, for threads: the methods of `CudnnRef` without `await`.

    Each blocks until it has its answer. Any number of threads may call at once; the requests of each run in
    its order. Parameters, results and errors are those of the method of the same name of `CudnnRef`.

    If a signal handler raises in a call (Ctrl-C), the request is withdrawn unless it has started, and what
    it has allocated is freed.
    """

    def __init__(self, portal: Portal, gpu: Requests) -> None:
        self._portal, self._requests = portal, gpu

    def _for_a_call(self) -> tuple[Requests, Callable[[], None]]:
        """The sender of a call's requests, and a function that frees their results if the caller does not get
        them."""
        scope = _ScopeOfACall(self._requests)
        return scope, scope.end

    def _handle(self) -> BlockingRequests:
        """The handle that is closed when it is collected. Objects that need it to live hold a reference to
        it."""
        return self

    if TYPE_CHECKING:  # `blocking` would take one of the overloads

        @overload
        def ask(self, message: Operation[BufferRef], *, timeout: float | None = None) -> Receipt: ...
        @overload
        def ask(self, message: AnyMessage[Answer], *, timeout: float | None = None) -> Answer: ...
        def ask(self, message: Message, *, timeout: float | None = None) -> Any:
            """See `CudnnRef.ask`."""
    else:
        ask = blocking(Requests.ask)

    @overload
    def submit(
        self, message: Operation[BufferRef], *, timeout: float | None = None
    ) -> concurrent.futures.Future[Receipt]: ...
    @overload
    def submit(
        self, message: AnyMessage[Answer], *, timeout: float | None = None
    ) -> concurrent.futures.Future[Answer]: ...
    def submit(self, message: Message, *, timeout: float | None = None) -> concurrent.futures.Future[Any]:
        """Send a request and return the future of its answer at once; cancelling it withdraws the request.

        Never blocks. Raises `ServiceStopped` once this handle is closed. The future raises all other errors
        of `CudnnRef.submit`, such as `MailboxFull`. Callbacks of the future run on a thread that must not
        make blocking calls.
        """
        requests, undo = self._for_a_call()
        send = functools.partial(requests.submit, message, timeout=timeout)
        try:
            future = self._portal.submit(send, undo)
        except BaseException:  # as in `blocking`
            undo()
            raise
        return future

    def tell(self, message: Message) -> None:
        """Send a request without waiting for its answer; a failure is logged. Raises as `CudnnRef.tell`.

        Blocks for a moment, until the request has been sent.
        """

        async def send() -> None:
            self._requests.tell(message)

        self._portal.call(send)

    upload = blocking(Requests.upload)
    empty = blocking(Requests.empty)
    write = blocking(Requests.write)
    download = blocking(Requests.download)
    view = blocking(Requests.view)
    copy = blocking(Requests.copy)
    fill = blocking(Requests.fill)
    free = blocking(Requests.free)
    apply = blocking(Requests.apply)
    loop = blocking(Requests.loop)
    conv_fwd = blocking(Requests.conv_fwd)
    conv_bwd_data = blocking(Requests.conv_bwd_data)
    conv_bwd_filter = blocking(Requests.conv_bwd_filter)
    staging = blocking(Requests.staging)
    ping = blocking(Requests.ping)
    statistics = blocking(Requests.statistics)
    warm = blocking(Requests.warm)
    clear_plans = blocking(Requests.clear_plans)
    explain = blocking(Requests.explain)
    reserve_nbytes = blocking(Requests.reserve_nbytes)
    plans = blocking(Requests.plans)
    drain = blocking(Requests.drain)

    def load(
        self,
        model: Any,
        *,
        dims: Mapping[str, Sizes] | None = None,
        dtype: DTypeLike | None = None,
        random: int | None = None,
        swappable: bool | None = None,
        replace: BlockingModel | None = None,
        tune: Tune | None = None,
        name: str | None = None,
        timeout: float | None = None,
    ) -> BlockingModel:
        """Load a model; see `CudnnRef.load`. `with gpu.load(path) as model` closes it at the end. Blocks."""
        loaded = self._load(
            model,
            dims=dims,
            dtype=dtype,
            random=random,
            swappable=swappable,
            replace=async_model(replace),
            tune=tune,
            name=name,
            timeout=timeout,
        )
        return BlockingModel(self._handle(), self._portal, loaded) if replace is None else replace

    _load = blocking(Requests.load)

    def run(
        self,
        model: BlockingModel,
        inputs: Mapping[str, Any] | None = None,
        /,
        *,
        keep: Sequence[str] = (),
        timeout: float | None = None,
        **named: Any,
    ) -> dict[str, Any]:
        """Run a model that this service loaded: `run(model, image=x)`. See `CudnnRef.run`. Blocks."""
        requests, undo = self._for_a_call()
        run = functools.partial(requests.run, async_model(model), inputs, keep=keep, timeout=timeout, **named)
        try:
            results = self._portal.call(run)
        except BaseException:  # as in `blocking`
            undo()
            raise
        return results

    def batched(
        self,
        model: BlockingModel,
        *,
        max_batch: int | None = None,
        max_delay_us: float = 2000,
        sizes: Sequence[int] | None = None,
        dims: Mapping[str, Sizes] | None = None,
        max_waiting: int = 1024,
        in_flight: int = 2,
        timeout: float | None = None,
    ) -> BlockingBatchedModel:
        """Run requests of many threads together: `with gpu.batched(model) as endpoint`.

        Then `endpoint(image=x)` runs one sample, or a few, in a batch with samples of other threads. See
        `CudnnRef.batched`. Entering blocks; this call does not.
        """
        given: Any = async_model(model)
        endpoint = self._requests.batched(
            given,
            max_batch=max_batch,
            max_delay_us=max_delay_us,
            sizes=sizes,
            dims=dims,
            max_waiting=max_waiting,
            in_flight=in_flight,
            timeout=timeout,
        )
        return BlockingBatchedModel(self._handle(), self._portal, endpoint)


class BlockingRef(BlockingRequests):
    """A service, for code without asyncio. Any number of threads may share one.

    It has the methods of `CudnnRef`, without `await`, and hands them to an event loop on a thread of its own.
    So it may be used where an event loop runs, as in notebooks, but its calls block that loop.

    `with spawn(...) as gpu:` closes it at the end. For a service that you have started yourself, make a
    handle by `BlockingRef(service)`: closing it ends the service, dropping it does not. In a forked child,
    its calls raise `ServiceStopped`, and closing it does nothing: spawn after the fork.

    Parameters
    ----------
    service
        A started service.
    portal
        The thread that runs its calls, for a service that belongs to an event loop; None for a new one.

    Raises
    ------
    StartFailed
        The system cannot start a thread.
    """

    def __init__(self, service: CudnnService, *, portal: Portal | None = None) -> None:
        portal = portal or portal_for(service.name)
        gpu = self._gpu = CudnnRef(service)
        super().__init__(portal, gpu)
        self._service = service
        # Calls that are under way then still get their answers.
        forks.finalize(self, portal.close_soon, _leave_running).atexit = False

    def _end_when_collected(self) -> Self:
        """Let the service end, with a warning, when this handle is collected: no other object can end it.

        Returns the handle.
        """
        forks.finalize(self, _end_unclosed, self._service).atexit = False
        return self

    def __repr__(self) -> str:
        return repr(self._gpu).replace("CudnnRef", "BlockingRef", 1)

    def _repr_html_(self) -> str:
        return self._service._html(repr(self))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close it. Raises `ServiceStopped` if the service gave up, `on_give_up` is "raise" and the body has
        raised nothing."""
        self.close()
        if kind is None and self._service.options.on_give_up == "raise" and not self._service.forked:
            failure = self._service.failure()
            if failure is not None:
                raise failure

    def close(self, *, drain_s: float = DRAIN_S) -> None:
        """Wait up to `drain_s` seconds for earlier requests to finish, then stop. Idempotent. Blocks.

        Calls of other threads that have not finished by then, and later ones, raise `ServiceStopped`. If a
        signal handler raises meanwhile, the service is stopped at once, and the error raised then. Raises
        `InvalidRequest` if `drain_s` is not a number of seconds >= 0. In a forked child it returns at once,
        and the parent's service keeps running.
        """
        if self._service.forked:
            return
        require_seconds("drain_s", drain_s)
        self._portal.close(functools.partial(self._gpu.aclose, drain_s=drain_s))

    def scope(self) -> BlockingScope:
        """A scope: `with gpu.scope() as scope:` frees at its end the buffers of `scope.upload` and its other
        methods; see `Scope`."""
        return BlockingScope(self)

    def compute(
        self,
        what: Computable,
        arrays: Mapping[str, Any] | None = None,
        /,
        *,
        also: Sequence[str] = (),
        timeout: float | None = None,
        **named: Any,
    ) -> Any:
        """Compute the results of a graph, an operation or a convolution, with arrays as arguments and
        results. Blocks.

        See `CudnnRef.compute`.
        """
        work = functools.partial(self._gpu.compute, what, arrays, also=also, timeout=timeout, **named)
        return self._portal.call(work)

    def events(self) -> Iterator[LifecycleEvent]:
        """All lifecycle events since the service's start, then each new one as it happens, until it stops.

        Blocks between two events. Raises `ServiceStopped` in a forked child.
        """
        following = self._gpu.events()  # raises in a forked child, at once
        return self._follow(following)

    def _follow(self, following: Any) -> Iterator[LifecycleEvent]:
        seen = 0
        try:
            while True:
                event = self._portal.call(lambda: _next(following))
                if event is None:
                    return
                seen += 1
                yield event
        except ServiceStopped:
            if self._service.forked:
                raise
            yield from self._service.events.all[seen:]  # it is closed, so no further events come

    @property
    def device(self) -> str:
        """ "cpu" or "cuda:N"."""
        return self._gpu.device

    @property
    def worker_pid(self) -> int | None:
        """Process id of the serving worker; None in thread isolation, and while no worker serves."""
        return self._gpu.worker_pid

    @property
    def generation(self) -> int:
        """The number of the actor's current incarnation, counted from 1."""
        return self._gpu.generation

    @property
    def alive(self) -> bool:
        """Whether the service has not ended. Sends no message; never blocks."""
        return self._gpu.alive

    @property
    def ready(self) -> bool:
        """Whether an incarnation of the actor serves now. Sends no message; never blocks."""
        return self._gpu.ready

    def health(self) -> Health:
        """The service's state, as far as this process knows. Sends no message; never blocks.

        Raises `ServiceStopped` in a forked child.
        """
        return self._gpu.health()

    def metrics(self) -> Metrics:
        """See `CudnnRef.metrics`. Sends no message; any thread."""
        return self._gpu.metrics()

    @property
    def actor_ref(self) -> pykka.ActorRef[Any]:
        """A pykka reference to the actor, which stays valid across restarts."""
        return self._gpu.actor_ref

    @property
    def faults_fired(self) -> tuple[Fired, ...]:
        """The scripted faults that have fired so far, in order; for tests."""
        return self._gpu.faults_fired

    def is_of(self, service: object) -> bool:
        """Whether it talks to this `CudnnService`."""
        return self._gpu.is_of(service)


class BlockingScope(BlockingRequests):
    """A `Scope` for threads: `with gpu.scope() as scope`. Made by `BlockingRef.scope`."""

    def __init__(self, gpu: BlockingRef) -> None:
        self._gpu = gpu
        self._scope = Scope(gpu._requests)
        super().__init__(gpu._portal, self._scope)

    def _for_a_call(self) -> tuple[Requests, Callable[[], None]]:
        return self._scope, nothing  # it owns the results at once

    def _handle(self) -> BlockingRequests:
        return self._gpu

    def __repr__(self) -> str:
        return repr(self._scope).replace("Scope", "BlockingScope", 1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def keep(self, what: KeptT) -> KeptT:
        """Give up a buffer or a model that the scope owns; see `Scope.keep`. Never blocks."""
        self._scope.keep(async_model(what))
        return what

    def end(self) -> None:
        """Free the buffers and models that the scope owns, without waiting; see `Scope.end`. Idempotent;
        never blocks."""
        self._scope.end()


def portal_for(service: str) -> Portal:
    """A thread with an event loop for calls to a service. Raises `StartFailed`."""
    try:
        return Portal(f"blocking calls to {service}")
    except ThreadRefused as error:
        raise StartFailed(detail=str(error)) from error


async def _next(following: Any) -> LifecycleEvent | None:
    """The next event; None at the end."""
    return await anext(following, None)


async def _leave_running() -> None:
    """Do nothing: the service, which may have other handles, goes on after the portal has ended."""


def _end_unclosed(service: CudnnService) -> None:
    if service.alive and not service.ending:
        warnings.warn(
            f"unclosed service {service.name!r}: use `with spawn(...) as gpu`, or `gpu.close()`",
            ResourceWarning,
            stacklevel=2,
        )
        service.end("its handle was collected")
