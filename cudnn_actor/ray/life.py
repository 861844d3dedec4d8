"""One life of a replica's actor, as the pool reaches it. On the pool's event loop, which alone calls it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import RayActorError

from cudnn_actor.protocol.errors import ServiceStopped
from cudnn_actor.ray.packing import split
from cudnn_actor.ray.replica import Answer, Hello

__all__ = ["Life"]


class Life:
    """What has been sent to one incarnation of a replica, and is not answered.

    Parameters
    ----------
    actor
        Ray's handle of the actor, which outlives the incarnation.
    hello
        Who the incarnation is.
    most
        How many requests it is sent at a time; others wait here.
    found_ended
        Called with what Ray says, when an answer tells that the incarnation has ended. It calls `end`.
    """

    def __init__(self, actor: Any, hello: Hello, *, most: int, found_ended: Callable[[str], None]) -> None:
        self.hello = hello
        self.over = False
        """Whether it has ended."""
        self._actor, self._found_ended = actor, found_ended
        self._room = asyncio.Semaphore(most)
        self._under_way: set[asyncio.Task[Any]] = set()
        self._why = ""
        """Why requests were taken from it last."""

    async def request(self, method: str, *args: Any) -> Any:
        """The answer of a method, once there is room for the request. Cancelled, the request is withdrawn.

        Raises `ServiceStopped`, which says whether it may have run, if the incarnation ends or becomes
        unreachable first; and what the method raises.
        """
        if self.over:
            raise ServiceStopped(reason=self._why)
        sent, caller = asyncio.Event(), asyncio.current_task()
        assert caller is not None, "requests are sent by tasks"
        cancelling = caller.cancelling()
        task = asyncio.ensure_future(self._in_turn(sent, method, args))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        try:
            return await task
        except asyncio.CancelledError:
            if caller.cancelling() > cancelling:
                raise
            raise ServiceStopped(reason=self._why, interrupted=sent.is_set()) from None  # by `withdraw`

    async def _in_turn(self, sent: asyncio.Event, method: str, args: tuple[Any, ...]) -> Any:
        async with self._room:
            sent.set()
            return await self.ask(method, *args)

    async def ask(self, method: str, *args: Any) -> Any:
        """The answer of a method, which `withdraw` does not end. Raises as `request`."""
        answer = getattr(self._actor, method).remote(*split(self.hello.incarnation, args))
        try:
            found: Answer = await answer
        except RayActorError as error:
            why = str(error).partition("\n")[0]
            self._found_ended(why)
            raise ServiceStopped(reason=why, interrupted=True) from None
        except asyncio.CancelledError:
            ray.cancel(answer)
            raise
        if found.refused:  # Ray has started the actor again since
            self._found_ended("its process has ended")
            raise ServiceStopped(reason="the replica's process has ended")
        if found.error is not None:
            raise found.error
        return found.value

    def withdraw(self, why: str) -> None:
        """End all requests with `ServiceStopped`: their answers are not waited for any more."""
        self._why = why
        for task in [*self._under_way]:
            if task is not asyncio.current_task():  # which has found out, and says so itself
                task.cancel()

    def end(self, why: str) -> None:
        """Take note that the incarnation has ended."""
        self.over = True
        self.withdraw(why)

    async def end_service(self) -> None:
        """Have the replica end its service."""
        with contextlib.suppress(RayActorError):
            await self._actor.end.remote()
