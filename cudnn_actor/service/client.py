"""The handle that async code holds: `spawn` gives it, every await goes through it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Iterable, Sequence
from typing import Any, overload

import numpy as np
import pykka

from cudnn_actor.actors import ask, submit, tell
from cudnn_actor.protocol.buffers import BufferRef
from cudnn_actor.protocol.checks import require_seconds
from cudnn_actor.protocol.conv import ConvSpec
from cudnn_actor.protocol.dtypes import DType, DTypeLike
from cudnn_actor.protocol.epilogue import Epilogue
from cudnn_actor.protocol.errors import (
    CudnnActorError,
)
from cudnn_actor.protocol.messages import (
    COMPUTE,
    Allocate,
    Compute,
    ConvBwdData,
    ConvBwdFilter,
    ConvFwd,
    Copy,
    Download,
    Drain,
    Fill,
    Free,
    GetStatistics,
    Message,
    Ping,
    Upload,
    View,
    Warm,
)
from cudnn_actor.protocol.numerics import Numerics
from cudnn_actor.protocol.receipts import Receipt, Statistics
from cudnn_actor.protocol.tensor import Layout, LayoutLike, TensorSpec
from cudnn_actor.service.arrays import packed_like
from cudnn_actor.service.health import Health
from cudnn_actor.service.sending import check_message, require_operands
from cudnn_actor.service.service import CudnnService
from cudnn_actor.supervision import FaultInjector, Fired, LifecycleEvent

__all__ = ["CudnnRef"]

_DRAIN_S = 10.0


class CudnnRef:
    """A service, from asyncio. Any number of tasks and event loops may share one.

    Requests of one sender run in the order in which it sent them. Every request ends exactly once: in
    its answer or in a typed error (`protocol.errors`).

    Parameters
    ----------
    service
        A service that has been started.
    """

    def __init__(self, service: CudnnService) -> None:
        self._service = service
        self._state = service.state

    # The service.

    @property
    def device(self) -> str:
        """ "cpu" or "cuda:N"."""
        return self._service.device

    @property
    def worker_pid(self) -> int | None:
        """Process id of the worker that serves; None in thread isolation, and while there is none."""
        return self._service.worker_pid

    @property
    def generation(self) -> int:
        """Which incarnation of the actor is serving, counted from 1."""
        return self._state.generation

    @property
    def alive(self) -> bool:
        """Whether the service has not ended. No message; any thread; never blocks."""
        return self._service.alive

    @property
    def ready(self) -> bool:
        """Whether an incarnation of the actor serves now. No message; any thread; never blocks.

        False while the actor is replaced, though requests that are sent then wait for its successor.
        """
        return self._service.ready

    def health(self) -> Health:
        """How the service is, as far as this process knows. No message; any thread; never blocks.

        Raises `ServiceStopped` in a forked child.
        """
        return self._service.health()

    @property
    def actor_ref(self) -> pykka.ActorRef[Any]:
        """A pykka reference to the actor, for any thread; it stays good across restarts."""
        return self._service.actor_ref

    def events(self) -> AsyncGenerator[LifecycleEvent, None]:
        """Every lifecycle event from the service's start on, then each as it happens, until it stops.

        Raises `ServiceStopped` in a forked child.
        """
        self._state.mailbox.check_process()
        return self._service.events.follow()

    async def aclose(self, *, drain_s: float = _DRAIN_S) -> None:
        """Let what was sent before finish, for up to `drain_s` seconds, then stop. Idempotent.

        What has not finished by then gets `ServiceStopped`. A cancellation while it waits is honoured
        once the service has stopped. Raises `InvalidRequest` for a `drain_s` that is no time in seconds.
        Returns at once in a forked child, whose parent's service goes on.
        """
        if self._service.forked:
            return
        require_seconds("drain_s", drain_s)
        try:
            with contextlib.suppress(CudnnActorError):  # whatever befalls the drain, the end comes next
                await self.ask(Drain(), timeout=drain_s)
        finally:
            stopped = self._service.end("closed")
            await _outlast(asyncio.wrap_future(stopped), self._service)

    @property
    def faults_fired(self) -> tuple[Fired, ...]:
        """The scripted faults that have come so far, in order; for tests."""
        faults = self._state.faults
        return faults.fired if isinstance(faults, FaultInjector) else ()

    # Requests.

    @overload
    async def ask(
        self, message: Compute | Upload | Copy | Fill, *, timeout: float | None = None
    ) -> Receipt: ...
    @overload
    async def ask(self, message: Allocate, *, timeout: float | None = None) -> BufferRef: ...
    @overload
    async def ask(self, message: Download, *, timeout: float | None = None) -> np.ndarray: ...
    @overload
    async def ask(self, message: View, *, timeout: float | None = None) -> Any: ...
    @overload
    async def ask(self, message: Ping | Warm, *, timeout: float | None = None) -> int: ...
    @overload
    async def ask(self, message: GetStatistics, *, timeout: float | None = None) -> Statistics: ...
    @overload
    async def ask(self, message: Free | Drain, *, timeout: float | None = None) -> None: ...
    async def ask(self, message: Message, *, timeout: float | None = None) -> Any:
        """Send a request, waiting for room in the mailbox if need be, and await its answer.

        Cancelling the wait withdraws a request that has not started; one that has runs to its end.

        Parameters
        ----------
        message
            Any message of the protocol; its class says what the answer is.
        timeout
            Seconds after which to give up; a request that has not started by then is dropped unrun.

        Raises
        ------
        InvalidRequest, StaleBufferError
            The request cannot mean anything, or names a buffer that is gone. Nothing was sent.
        DeadlineExceeded
            No answer within `timeout`.
        ServiceStopped
            The service has ended, or ends before it takes the request up.
        CudnnActorError
            Whatever became of the request; see `protocol.errors`.
        """
        check_message(self._state, message)
        discard = self._state.discard if type(message) is Allocate else None
        return await ask(self._state.mailbox, message, timeout=timeout, discard=discard)

    @overload
    def submit(
        self, message: Compute | Upload | Copy | Fill, *, timeout: float | None = None
    ) -> asyncio.Future[Receipt]: ...
    @overload
    def submit(self, message: Allocate, *, timeout: float | None = None) -> asyncio.Future[BufferRef]: ...
    @overload
    def submit(self, message: Download, *, timeout: float | None = None) -> asyncio.Future[np.ndarray]: ...
    @overload
    def submit(self, message: View, *, timeout: float | None = None) -> asyncio.Future[Any]: ...
    @overload
    def submit(self, message: Ping | Warm, *, timeout: float | None = None) -> asyncio.Future[int]: ...
    @overload
    def submit(
        self, message: GetStatistics, *, timeout: float | None = None
    ) -> asyncio.Future[Statistics]: ...
    @overload
    def submit(self, message: Free | Drain, *, timeout: float | None = None) -> asyncio.Future[None]: ...
    def submit(self, message: Message, *, timeout: float | None = None) -> asyncio.Future[Any]:
        """Send a request and return the future of its answer at once; cancelling it withdraws the request.

        Raises `MailboxFull` when there is no room, and what `ask` raises before it sends.
        """
        check_message(self._state, message)
        discard = self._state.discard if type(message) is Allocate else None
        return submit(self._state.mailbox, message, timeout=timeout, discard=discard)

    def tell(self, message: Message) -> None:
        """Send a request whose answer nobody waits for; a failure is logged. Raises as `submit` does."""
        check_message(self._state, message)
        tell(self._state.mailbox, message)

    # Memory.

    async def upload(
        self,
        array: Any,
        *,
        layout: LayoutLike = Layout.NCHW,
        dtype: DTypeLike | None = None,
    ) -> BufferRef:
        """Copy values into a new buffer.

        Parameters
        ----------
        array
            Anything that NumPy takes, or an array of PyTorch, JAX, CuPy or another library that speaks
            DLPack or the CUDA array interface; dims in N, C, spatial order. One that lies on the service's
            device is copied there, behind the work that its own stream has now. It must not change until
            this returns.
        layout
            How the buffer lies in memory.
        dtype
            The buffer's; None for the array's own. Values on a device are not cast: it is theirs or None.

        Raises
        ------
        InvalidRequest
            Objects, strings, complex numbers; values that do not fit the dtype; an array on another device
            than the service's.
        OutOfMemory
            No room; nothing was taken.
        """
        values = self._service.values(array)
        return await self.ask(Allocate(spec=packed_like(values, dtype, layout), data=values))

    async def empty(
        self,
        dims: Sequence[int],
        *,
        dtype: DTypeLike = DType.FLOAT32,
        layout: LayoutLike = Layout.NCHW,
    ) -> BufferRef:
        """A new buffer whose contents are undefined. Raises `InvalidRequest`, `OutOfMemory`."""
        return await self.ask(Allocate(spec=TensorSpec.packed(dims, dtype, layout)))

    async def write(self, dst: BufferRef, array: Any) -> Receipt:
        """Overwrite a buffer with values of the same dims, on the host or the device as for `upload`.

        Values on the host are cast to the buffer's dtype within their kind; those on the device must have
        it. Raises as `upload` does, and `StaleBufferError`.
        """
        return await self.ask(Upload(dst=dst, data=self._service.values(array)))

    async def download(self, src: BufferRef) -> np.ndarray:
        """A buffer's values as a new C-contiguous array, dims in N, C, spatial order whatever the layout."""
        return await self.ask(Download(src=src))

    async def view(self, buffer: BufferRef) -> Any:
        """A buffer itself, not copied, as an array of the device's own array library; thread isolation only.

        NumPy's on the CPU, CuPy's on CUDA (from there to others: `torch.from_dlpack(array)`), dims in N, C,
        spatial order with the buffer's strides. It comes once the work sent before that uses the buffer is
        done, so any stream may read it. From then on it is the memory itself: requests sent later write
        into it, and whoever writes through it orders that against requests himself, by waiting for his own
        stream before he sends one.

        While the array lives, or a slice or a DLPack capsule of it, the bytes are given to no other buffer:
        after `free`, which makes the reference stale at once as always, after a restart of the actor, and
        after the service's end. They count towards `memory_limit` for as long.

        Raises
        ------
        StaleBufferError
            The buffer is gone.
        """
        return await self.ask(View(buffer=buffer))

    async def copy(self, src: BufferRef, dst: BufferRef) -> Receipt:
        """Copy a buffer to another of the same dims and dtype, in any layouts."""
        return await self.ask(Copy(src=src, dst=dst))

    async def fill(self, dst: BufferRef, value: float) -> Receipt:
        """Set every element to `value`."""
        return await self.ask(Fill(dst=dst, value=value))

    async def free(self, buffer: BufferRef) -> None:
        """Give a buffer back, once the work sent before is done. Using it again is `StaleBufferError`."""
        await self.ask(Free(buffer=buffer))

    # Convolutions that allocate their result.

    async def conv_fwd(
        self,
        x: BufferRef,
        w: BufferRef,
        *,
        conv: ConvSpec,
        bias: BufferRef | None = None,
        epilogue: Epilogue | None = None,
        alpha: float = 1.0,
        numerics: Numerics | None = None,
        dtype: DTypeLike | None = None,
    ) -> BufferRef:
        """Convolution forward into a new buffer; see `ConvFwd`.

        The buffer has x's layout (NCHW where that is strided) and `dtype`; None for x's own, except that
        int8 and uint8 give int32, which holds every result.
        """
        require_operands(x=x, w=w, conv=conv)
        y = await self._result(conv.output_dims(x.spec.dims, w.spec.dims), like=x, dtype=dtype)
        message = ConvFwd(
            x=x,
            w=w,
            y=y,
            conv=conv,
            bias=bias,
            epilogue=epilogue or Epilogue(),
            alpha=alpha,
            numerics=numerics or Numerics(),
        )
        return await self._filled(y, message)

    async def conv_bwd_data(
        self,
        dy: BufferRef,
        w: BufferRef,
        *,
        conv: ConvSpec,
        dims: Sequence[int] | None = None,
        alpha: float = 1.0,
        numerics: Numerics | None = None,
    ) -> BufferRef:
        """Gradient by the input into a new buffer of dy's dtype and layout; see `ConvBwdData`.

        `dims` are the result's; None for the smallest input that has such an output. With a stride over
        1 several do.
        """
        require_operands(dy=dy, w=w, conv=conv)
        wanted = conv.input_dims(dy.spec.dims, w.spec.dims) if dims is None else dims
        dx = await self._result(wanted, like=dy)
        message = ConvBwdData(dy=dy, w=w, dx=dx, conv=conv, alpha=alpha, numerics=numerics or Numerics())
        return await self._filled(dx, message)

    async def conv_bwd_filter(
        self,
        x: BufferRef,
        dy: BufferRef,
        *,
        conv: ConvSpec,
        dims: Sequence[int],
        alpha: float = 1.0,
        numerics: Numerics | None = None,
    ) -> BufferRef:
        """Gradient by the filter, of dims (K, C / groups, filter), into a new buffer; see `ConvBwdFilter`."""
        require_operands(x=x, dy=dy, conv=conv)
        dw = await self._result(dims, like=x)
        message = ConvBwdFilter(x=x, dy=dy, dw=dw, conv=conv, alpha=alpha, numerics=numerics or Numerics())
        return await self._filled(dw, message)

    async def _result(
        self, dims: Sequence[int], *, like: BufferRef, dtype: DTypeLike | None = None
    ) -> BufferRef:
        layout = Layout.NHWC if like.spec.layout is Layout.NHWC else Layout.NCHW
        if dtype is None:
            dtype = like.spec.dtype if like.spec.dtype.is_floating else DType.INT32
        return await self.empty(dims, dtype=dtype, layout=layout)

    async def _filled(self, result: BufferRef, message: Compute) -> BufferRef:
        """The result once `message` has filled it; if it does not, the buffer is given back."""
        try:
            await self.ask(message)
        except BaseException:
            self._state.discard(result)
            raise
        return result

    # Control.

    async def ping(self) -> int:
        """The serving incarnation's number: a sign of life that overtakes a full mailbox."""
        return await self.ask(Ping())

    async def statistics(self) -> Statistics:
        """The service's counters."""
        return await self.ask(GetStatistics())

    async def warm(self, messages: Sequence[Compute]) -> int:
        """Build the plans of `messages` without running them; returns how many were not there yet."""
        given: Any = messages
        one = type(given) in COMPUTE or not isinstance(given, Iterable)  # which check_warm refuses
        return await self.ask(Warm(messages=(given,) if one else tuple(given)))

    async def drain(self) -> None:
        """Wait until everything sent before has been answered."""
        await self.ask(Drain())


async def _outlast(stopped: Awaitable[Any], service: CudnnService) -> None:
    """Wait for `stopped` whatever happens, then honour a cancellation that came meanwhile.

    In a forked child, where `stopped` never comes, a cancellation is honoured at once.
    """
    waiting = asyncio.ensure_future(stopped)
    cancelled: asyncio.CancelledError | None = None
    while not waiting.done():
        try:
            await asyncio.shield(waiting)
        except asyncio.CancelledError as error:
            cancelled = error
            if service.forked:
                break
    if cancelled is not None:
        raise cancelled
