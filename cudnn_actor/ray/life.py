"""One incarnation of a replica's actor, as the pool reaches it. Only the pool's event loop calls this."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayActorError

from cudnn_actor.protocol.errors import ServiceStopped
from cudnn_actor.ray.packing import split, unpack_results
from cudnn_actor.ray.replica import Answer, Hello
from cudnn_actor.ray.values import RequestValues, Sending

__all__ = ["Life"]


class _Call:
    """A request that has no answer yet.

    Parameters
    ----------
    task
        The task that waits for the answer.
    """

    __slots__ = ("sent", "task", "withdrawn")

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self.task = task
        self.sent = False
        """Whether the request may have been sent."""
        self.withdrawn = False
        """Whether the task was cancelled by `Life.withdraw`."""


class Life:
    """The requests that were sent to one incarnation of a replica and have no answer yet.

    Parameters
    ----------
    actor
        Ray's handle of the actor, which outlives the incarnation.
    hello
        The incarnation's own record.
    most
        How many requests it is sent at a time. Further requests wait here.
    found_ended
        This is called with Ray's reason when an answer tells that the incarnation has ended. It calls `end`.
    """

    def __init__(self, actor: Any, hello: Hello, *, most: int, found_ended: Callable[[str], None]) -> None:
        self.hello = hello
        self.over = False
        """Whether the incarnation has ended."""
        self._actor, self._found_ended = actor, found_ended
        self._room = asyncio.Semaphore(most)
        self._calls: set[_Call] = set()
        self._why = ""
        """Why requests were last taken from the incarnation."""

    async def request(self, method: str, *args: Any, values: RequestValues | None = None) -> Any:
        """Call a method of the actor once there is room for the request, and return its answer. A
        cancellation withdraws the request.

        The values of a pure request follow the other arguments. They are made ready once there is room, so a
        request that is withdrawn before that has copied nothing.

        Raises `ServiceStopped`, which says whether the method may have run, if the incarnation ends or
        becomes unreachable first; and the errors of the method.
        """
        if self.over:
            raise ServiceStopped(reason=self._why)
        task = asyncio.current_task()
        assert task is not None, "requests are sent by tasks"
        cancelling, call = task.cancelling(), _Call(task)
        self._calls.add(call)
        try:
            async with self._room:
                if values is None:
                    call.sent = True
                    return await self.ask(method, *args)
                sending = await values.make_ready(near=self.hello.near)
                call.sent = True
                return values.note(await self.ask(method, *args, *sending.args, sending=sending))
        except asyncio.CancelledError:
            if not call.withdrawn or task.cancelling() > cancelling + 1:  # other code has cancelled it, too
                raise
            raise ServiceStopped(reason=self._why, interrupted=call.sent) from None
        finally:
            self._calls.discard(call)
            if call.withdrawn:
                task.uncancel()

    async def ask(self, method: str, *args: Any, sending: Sending | None = None) -> Any:
        """Call a method of the actor, and return its answer. `withdraw` does not end this call.

        `sending` has the pieces of memory that the actor may use until it has answered or ended. Raises as
        `request`.
        """
        answer = getattr(self._actor, method).remote(*split(self.hello.incarnation, args))
        try:
            found: Answer | bytes = await answer
        except RayActorError as error:
            why = str(error).partition("\n")[0]
            if sending is not None and isinstance(error, ActorUnavailableError):  # its process may still live
                sending.keep_while_lives(self.hello.process)
            self._found_ended(why)
            raise ServiceStopped(reason=why, interrupted=True) from None
        except asyncio.CancelledError:
            if sending is not None:
                sending.keep_until(answer, self.hello.process)
            if ray.is_initialized():  # else Ray would start a cluster here, and raise another error
                ray.cancel(answer)
            raise
        if isinstance(found, bytes):
            return unpack_results(found, None if sending is None else sending.results)
        if found.refused:  # Ray has started the actor again meanwhile
            self._found_ended("its process has ended")
            raise ServiceStopped(reason="the replica's process has ended")
        if found.error is not None:
            raise found.error
        return found.value

    def withdraw(self, why: str) -> None:
        """End all requests with `ServiceStopped`. Their answers are ignored from now on."""
        self._why = why
        for call in self._calls:
            # The current task has noticed the end, and raises the error itself.
            if call.task is not asyncio.current_task() and not call.withdrawn:
                call.withdrawn = True
                call.task.cancel()

    def end(self, why: str) -> None:
        """Note that the incarnation has ended."""
        self.over = True
        self.withdraw(why)

    async def end_service(self) -> None:
        """Let the replica end its service."""
        with contextlib.suppress(RayActorError):
            await self._actor.end.remote()
