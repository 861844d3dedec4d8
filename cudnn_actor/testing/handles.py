"""The handles that tests get: the package's own, which also note the buffers and models that requests have
made."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from cudnn_actor.blocking import BlockingRef
from cudnn_actor.models import Model
from cudnn_actor.protocol.messages.messages import Allocate, DeployModel, Message
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.service.client import CudnnRef
from cudnn_actor.service.requests import Requests
from cudnn_actor.service.scopes import Scope
from cudnn_actor.service.service import CudnnService
from cudnn_actor.testing.made import Made, line_of_caller

__all__ = ["WatchedBlockingRef", "WatchedRef"]

_MAKING = (Allocate, DeployModel)


class WatchedRef(CudnnRef):
    """A `CudnnRef` that notes the buffers and models that its requests have made, and the lines of the
    test."""

    def __init__(self, service: CudnnService, made: Made) -> None:
        super().__init__(service)
        self._made = made

    async def ask(self, message: Message, *, timeout: float | None = None) -> Any:
        """See `CudnnRef.ask`."""
        line = line_of_caller()
        number = self._made.begin(message, line)
        try:
            answer: Any = await super().ask(message, timeout=timeout)
        except asyncio.CancelledError:
            raise  # it may run yet
        except BaseException:
            self._made.end(number)
            raise
        self._made.end(number)
        if type(message) in _MAKING:
            self._made.note(answer, line)
        return answer

    def submit(self, message: Message, *, timeout: float | None = None) -> asyncio.Future[Any]:
        """See `CudnnRef.submit`."""
        line = line_of_caller()
        future: asyncio.Future[Any] = super().submit(message, timeout=timeout)
        number = self._made.begin(message, line)

        def note_answer(future: asyncio.Future[Any]) -> None:
            if future.cancelled():
                return  # it may run yet
            self._made.end(number)
            if future.exception() is None and type(message) in _MAKING:
                self._made.note(future.result(), line)

        future.add_done_callback(note_answer)
        return future

    def scope(self) -> Scope:
        """See `CudnnRef.scope`."""
        return _WatchedScope(self._without_scope, self._made)

    @property
    def _without_scope(self) -> Requests:
        return _RefOfModels(self._service, self._made)

    def _own(self, what: BufferRef | Model) -> None:
        self._made.note(what, line_of_caller())


class WatchedBlockingRef(BlockingRef):
    """A `BlockingRef` that notes the buffers and models that its requests have made, and the lines of the
    test."""

    def __init__(self, service: CudnnService, made: Made) -> None:
        super().__init__(service)
        self._made = made

    def leave(self) -> None:
        """End the handle's thread, but not the service. Blocks until its calls have ended."""
        self._portal.close(_leave_running)

    def _for_a_call(self) -> tuple[Requests, Callable[[], None]]:
        line = line_of_caller()  # here: the rest of the call is on the portal's thread
        scope = _WatchedScope(_RefOfModels(self._service, self._made), self._made, line)
        return scope, scope.end


class _WatchedScope(Scope):
    """A scope that notes the buffers and models that it owns. `line`: the test's line, for requests that
    another thread sends."""

    def __init__(self, gpu: Requests, made: Made, line: str | None = None) -> None:
        super().__init__(gpu)
        self._made, self._line = made, line

    def _own(self, what: Any) -> None:
        self._made.note(what, self._line or line_of_caller())
        super()._own(what)


class _RefOfModels(CudnnRef):
    """The handle by which models send their own requests."""

    def __init__(self, service: CudnnService, made: Made) -> None:
        super().__init__(service)
        self._made = made

    async def ask(self, message: Message, *, timeout: float | None = None) -> Any:
        """See `CudnnRef.ask`."""
        answer: Any = await super().ask(message, timeout=timeout)
        if type(message) is Allocate:
            self._made.note_of_model(answer)
        return answer


async def _leave_running() -> None:
    """Do nothing at the handle's end: the service's fixture stops the service."""
