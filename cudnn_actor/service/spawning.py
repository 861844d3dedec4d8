"""`spawn`: starts and stops a service for async code."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Generator
from types import TracebackType
from typing import Any, NoReturn

from cudnn_actor.actors import forks
from cudnn_actor.actors.body import Body
from cudnn_actor.actors.event_loop import running_loop, tolerating_closed
from cudnn_actor.actors.long_work import in_own_thread
from cudnn_actor.actors.threads import ThreadRefused
from cudnn_actor.engines import EngineChoice, check_device
from cudnn_actor.options import Options, takes_options
from cudnn_actor.protocol.errors import ServiceStopped, StartFailed
from cudnn_actor.service.client import CudnnRef
from cudnn_actor.service.engine_choice import engine_for
from cudnn_actor.service.service import CudnnService

__all__ = ["Spawning", "spawn"]

_START = "use `async with spawn(...) as gpu`, or `gpu = await spawn(...)`"


@takes_options(Options)
def spawn(options: Options) -> Spawning:
    """Start a service: `async with spawn(...) as gpu:`, or `gpu = await spawn(...)` and `await gpu.aclose()`.

    When the service gives up for good, the `async with` body is cancelled and `ServiceStopped` is raised
    in its place; `on_give_up` changes this. Leaving the body drains for up to 10 seconds, then stops.

    Raises
    ------
    InvalidRequest
        An option is out of its range, or `device` does not name a device: raised at once. The device is not
        available here: raised when awaited or entered, since a thread queries the system for it.
    StartFailed
        The actor could not be started. Raised when awaited or entered.
    NoEventLoop
        It is awaited or entered where no asyncio event loop runs, under trio for example.
    """
    check_device(options.device)
    return Spawning(options=options)


async def _found_engine(options: Options) -> EngineChoice:
    """The engine for the options. A thread finds it, because that reads files, and may wait for a driver.

    Raises `StartFailed` if the system cannot start a thread.
    """
    try:
        return await in_own_thread(engine_for, options)
    except ThreadRefused as error:
        raise StartFailed(detail=str(error)) from error


class Spawning:
    """A service that is about to start: the result of `spawn`.

    Parameters
    ----------
    service
        The service. With None, it is created when it starts, from `options`, because finding its engine takes
        a moment, and is done on a thread.
    """

    def __init__(self, service: CudnnService | None = None, *, options: Options | None = None) -> None:
        self._made = service
        self._options = options
        self._body: Body | None = None

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"the result of spawn() has no {name!r} before it is awaited or entered: {_START}"
        )

    def __repr__(self) -> str:  # `asyncio.run(spawn(...))` says nothing but this
        starts = "which starts a service when it is awaited"
        return f"<the result of spawn(), {starts}: inside an `async def`, {_START}>"

    def __enter__(self, *_: object) -> NoReturn:
        raise TypeError(f"the result of spawn() cannot be entered by a plain `with`: {_START}")

    __exit__ = __enter__  # Python looks for `__exit__` before it calls `__enter__`

    def __await__(self) -> Generator[Any, None, CudnnRef]:
        return self._start().__await__()

    @property
    def _service(self) -> CudnnService:
        assert self._made is not None, "the service is created when it starts"
        return self._made

    async def _start(self) -> CudnnRef:
        running_loop()  # first: under trio, the `await`s below would fail once the service has begun
        if self._made is None:
            assert self._options is not None
            self._made = CudnnService(self._options, engine=await _found_engine(self._options))
        self._service.launch()
        try:
            await asyncio.wrap_future(self._service.started)
        except (asyncio.CancelledError, GeneratorExit):  # the second: dropped with its event loop
            self._service.end("cancelled while it started")
            raise
        gpu = CudnnRef(self._service)
        forks.finalize(gpu, _warn_if_unclosed, self._service).atexit = False
        return gpu

    async def __aenter__(self) -> CudnnRef:
        gpu = await self._start()
        self._body = Body()
        loop = running_loop()

        def note_end(_: Any) -> None:
            with tolerating_closed(loop):  # the body has ended with it
                loop.call_soon_threadsafe(self._fail_body)

        self._gpu = gpu
        self._service.stopped.add_done_callback(note_end)
        return gpu

    def _fail_body(self) -> None:
        if self._failure() is not None and self._body is not None:
            self._body.cancel()

    def _failure(self) -> ServiceStopped | None:
        """The error that the body raises, if `on_give_up` is "raise"."""
        return self._service.failure() if self._service.options.on_give_up == "raise" else None

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._body is not None, "it was entered"
        self._body.end()
        if self._service.forked:
            return
        if kind is GeneratorExit:  # the body was dropped with its event loop, so nothing can be awaited
            self._service.end("its event loop has closed")
            return
        failure = self._failure()
        if failure is None:
            await self._gpu.aclose()
            failure = self._failure()
        ours_alone = self._body.cancelled_alone()
        if failure is not None and (kind is None or (kind is asyncio.CancelledError and ours_alone)):
            raise failure from error


def _warn_if_unclosed(service: CudnnService) -> None:
    """Warn of a service whose handle was collected while the service ran: it goes on, and nobody can close
    it."""
    if service.alive and not service.ending:
        warnings.warn(
            f"unclosed service {service.name!r}: use `async with spawn(...) as gpu`, or `await gpu.aclose()`",
            ResourceWarning,
            stacklevel=2,
        )
