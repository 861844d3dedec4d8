"""Scopes: a scope owns the buffers and models that are made in it, and frees them at its end."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, Self, TypeVar, overload

from cudnn_actor.models import Model
from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.messages.any_message import Answer, AnyMessage
from cudnn_actor.protocol.messages.messages import Allocate, DeployModel, Free, Message
from cudnn_actor.protocol.messages.model_messages import ModelRef
from cudnn_actor.protocol.messages.receipts import Receipt
from cudnn_actor.protocol.operations import Operation
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.service.requests import Requests

__all__ = ["Scope"]

Owned = BufferRef | ModelRef | Model
KeptT = TypeVar("KeptT", bound=Owned)


class Scope(Requests):
    """The requests of a service, and the owner of the buffers and models that they make: `async with
    gpu.scope() as scope`.

    It owns the buffers of `scope.upload`, `empty`, `apply`, `loop`, `conv_fwd` and its siblings, what
    `scope.run(model, keep=...)` leaves on the device, the answers to `ask(Allocate(...))`, and the models of
    `scope.load`. At its end they are freed, once earlier requests on them are done, whether its body returns,
    raises or is cancelled. A buffer that was freed before, or was lost with the device's context, is left
    alone. References themselves own nothing: after the end, all copies of a reference are stale.

    Made by `CudnnRef.scope`. Any number of tasks, threads and event loops may share one.

    Parameters
    ----------
    gpu
        The handle to send requests by.
    """

    def __init__(self, gpu: Requests) -> None:
        super().__init__(gpu._service)
        self._gpu = gpu
        self._owned: dict[object, Owned] = {}
        self._open = True

    def __repr__(self) -> str:
        state = f"owns {len(self._owned)}" if self._open else "ended"
        return f"<Scope on {self._state.name!r}: {state}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.end()

    def keep(self, what: KeptT) -> KeptT:
        """Take a buffer or a model from the scope that owns it: it outlives the scope, and is yours to free.
        Returns it. Raises `InvalidRequest` if the scope does not own it. Any thread; never blocks.
        """
        named: object = what  # a caller may pass anything, also an object that is not hashable
        if not isinstance(named, Owned) or self._owned.pop(_key(named), None) is None:
            raise InvalidRequest(
                field="what",
                value=what,
                problem="is not owned by this scope",
                fix="keep what one of its methods gave, once, before the scope ends",
            )
        return what

    def end(self) -> None:
        """Free the buffers and models that the scope owns, without waiting. Later requests of the scope are
        refused.

        `async with` calls it. Idempotent; any thread; never blocks.
        """
        # This is before the loop. So an answer that arrives meanwhile either is in the dict, or finds the
        # scope closed.
        self._open = False
        while self._owned:
            try:
                _, what = self._owned.popitem()
            except KeyError:  # another thread has taken the last one
                return
            self._give_back(what)

    @overload
    async def ask(self, message: Operation[BufferRef], *, timeout: float | None = None) -> Receipt: ...
    @overload
    async def ask(self, message: AnyMessage[Answer], *, timeout: float | None = None) -> Answer: ...
    async def ask(self, message: Message, *, timeout: float | None = None) -> Any:
        """Send a request as `CudnnRef.ask` does. The scope owns the answers to `Allocate` and `DeployModel`.

        Also raises `InvalidRequest` once the scope has ended.
        """
        self._require_open()
        # Nothing is awaited between the answer and `_note`, so a cancellation cannot come between them.
        answer = await super().ask(message, timeout=timeout)
        self._note(message, answer)
        return answer

    @overload
    def submit(
        self, message: Operation[BufferRef], *, timeout: float | None = None
    ) -> asyncio.Future[Receipt]: ...
    @overload
    def submit(
        self, message: AnyMessage[Answer], *, timeout: float | None = None
    ) -> asyncio.Future[Answer]: ...
    def submit(self, message: Message, *, timeout: float | None = None) -> asyncio.Future[Any]:
        """Send a request as `CudnnRef.submit` does. The scope owns the same answers as for `ask`, and raises
        the same error."""
        self._require_open()
        future = super().submit(message, timeout=timeout)
        if type(message) in _NOTED:
            future.add_done_callback(partial(self._note_answered, message))
        return future

    def tell(self, message: Message) -> None:
        """Send a request as `CudnnRef.tell` does. Also raises `InvalidRequest` once the scope has ended."""
        self._require_open()
        super().tell(message)

    @property
    def _without_scope(self) -> Requests:
        return self._gpu

    def _discard(self, ref: BufferRef) -> None:
        self._owned.pop(_key(ref), None)
        super()._discard(ref)

    def _require_open(self) -> None:
        super()._require_open()
        if not self._open:
            raise InvalidRequest(
                field="scope", value=self, problem="has ended", fix="make another: async with gpu.scope()"
            )

    def _note_answered(self, message: Message, future: asyncio.Future[Any]) -> None:
        if not future.cancelled() and future.exception() is None:
            self._note(message, future.result())

    def _note(self, message: Message, answer: Any) -> None:
        if type(message) in (Allocate, DeployModel):
            self._own(answer)
        elif isinstance(message, Free):
            self._owned.pop(_key(message.buffer), None)

    def _own(self, what: Owned) -> None:
        self._owned[_key(what)] = what
        # This is checked after the insertion, and `end` closes before it empties the dict. So one of the two
        # frees it.
        if not self._open and self._owned.pop(_key(what), None) is not None:
            self._give_back(what)

    def _give_back(self, what: Owned) -> None:
        if isinstance(what, Model):
            what.end()
        else:
            self._state.discard(what)


_NOTED = (Allocate, DeployModel, Free)


def _key(what: object) -> object:
    """The key of a buffer or a model in the scope. A reference may have been copied, or decoded from a
    message."""
    return (what.slot, what.generation) if isinstance(what, BufferRef) else what
