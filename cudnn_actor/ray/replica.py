"""A replica: an asynchronous Ray actor with a service. This module is what runs in its process.

Ray calls the constructor again whenever it starts the actor again, and nothing else: so the service starts
there. What else a replica needs (models, buffers) it is given by its pool, which asks each incarnation of the
actor for its name first, and names it in each request. An incarnation refuses what was meant for another: it
does not have what that had.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray

from cudnn_actor.actors import Deadline
from cudnn_actor.options import make_options
from cudnn_actor.protocol.errors import CudnnActorError, InvalidRequest, Words
from cudnn_actor.ray.held import Held, Recipe
from cudnn_actor.ray.packing import Head, joined, unpacked
from cudnn_actor.service.client import CudnnRef
from cudnn_actor.service.service import started
from cudnn_actor.supervision import Restarted, Restarting

__all__ = ["Answer", "Beat", "Hello", "Replica"]

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Hello:
    """Who an incarnation of a replica is.

    Parameters
    ----------
    incarnation
        A name that no other incarnation has.
    pid
        The id of its process, on its node.
    node
        Ray's id of the node.
    device
        What its service runs on: "cpu" or "cuda:N".
    """

    incarnation: str
    pid: int
    node: str
    device: str


@dataclass(frozen=True)
class Beat:
    """What a replica says regularly: whether its service's worker serves, and the id of the worker's process;
    None without one."""

    ready: bool
    worker_pid: int | None


@dataclass(frozen=True)
class Answer:
    """How a request has ended in a replica: with a value, with an error of ours, or, if it was meant for
    another incarnation, not at all."""

    value: Any = None
    error: CudnnActorError | None = None
    refused: bool = False


def _answering(
    work: Callable[Concatenate[Replica, P], Awaitable[Any]],
) -> Callable[..., Awaitable[Answer]]:
    """A method that gets its arguments as `packing.split` sends them, and returns an `Answer`.

    Our errors are values, since Ray would raise them as a class of its own.
    """

    async def answer(self: Replica, head: Head, /, *apart: Any) -> Answer:
        if head.incarnation != self.hello_of_this.incarnation:
            return Answer(refused=True)
        try:
            return Answer(await work(self, *joined(head, apart)))  # type: ignore[call-arg]
        except CudnnActorError as error:
            return Answer(error=error.with_traceback(None))

    answer.__name__, answer.__doc__ = work.__name__, work.__doc__  # no `__wrapped__`: Ray reads the signature
    return answer


class Replica:
    """The class of the actors. Ray runs its constructor on the thread of the actor's event loop.

    Parameters
    ----------
    options
        `spawn`'s, as plain data. If the service gives up, the process ends.

    Raises
    ------
    StartFailed, InvalidRequest
        The service cannot be started. Then Ray does not start the actor again.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        service = started(make_options({**options, "on_give_up": "exit"}))
        self._gpu = CudnnRef(service)
        self.hello_of_this = Hello(
            incarnation=uuid.uuid4().hex,
            pid=os.getpid(),
            node=ray.get_runtime_context().get_node_id(),
            device=self._gpu.device,
        )
        self._made: dict[int, tuple[Recipe, Any]] = {}
        self._changed = asyncio.Event()
        self._following: asyncio.Task[None] | None = None

    async def hello(self) -> Hello:
        """Who this incarnation is."""
        if self._following is None:
            self._following = asyncio.create_task(self._follow())
        return self.hello_of_this

    async def _follow(self) -> None:
        async for event in self._gpu.events():
            if isinstance(event, Restarting | Restarted):
                self._changed.set()

    @_answering
    async def beat(self, known: Beat | None, period_s: float) -> Beat:
        """The state of the service: once it is not the known one, or after so many seconds."""
        try:
            async with asyncio.timeout(period_s):
                while known == (found := Beat(self._gpu.ready, self._gpu.worker_pid)):
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            pass
        return found

    @_answering
    async def make(self, number: int, recipe: Recipe) -> None:
        """Make something that all replicas have, unless it is there."""
        if number not in self._made:
            self._made[number] = recipe, await recipe.make(self._gpu, self._own)

    @_answering
    async def replace(self, number: int, recipe: Recipe) -> None:
        """Make something that is there by another recipe, in its place."""
        _, made = self._made[number]
        self._made[number] = recipe, await recipe.replace(self._gpu, made)

    @_answering
    async def drop(self, number: int) -> None:
        """Free something that all replicas have, if it is there."""
        if (found := self._made.pop(number, None)) is not None:
            recipe, made = found
            await recipe.drop(self._gpu, made)

    @_answering
    async def compute(
        self, what: Any, also: Sequence[str], timeout: float | None, names: Sequence[str], *values: Any
    ) -> Any:
        """`CudnnRef.compute`. The values stand apart, so that Ray gives objects in place of references."""
        given = dict(zip(names, map(self._own, values), strict=True))
        return await self._gpu.compute(unpacked(what), given, also=also, timeout=timeout)

    @_answering
    async def run(self, model: Held, timeout: float | None, names: Sequence[str], *values: Any) -> Any:
        """`CudnnRef.run`, likewise."""
        given = dict(zip(names, values, strict=True))
        return await self._gpu.run(self._own(model), given, timeout=timeout)

    @_answering
    async def run_batch(
        self,
        model: Held,
        left_s: float | None,
        again: bool,
        crashes: int,
        names: Sequence[str],
        *values: Any,
    ) -> Any:
        """`Model.run_checked`, likewise."""
        own, given = self._own(model), dict(zip(names, values, strict=True))
        return await own.run_checked(own.validated(given), Deadline(left_s), again=again, crashes=crashes)

    @_answering
    async def call(self, work: Callable[[CudnnRef, Callable[[Held], Any]], Awaitable[Any]]) -> Any:
        """Run a caller's function, which gets the handle, and what gives this replica's own."""
        return await work(self._gpu, self._own)

    async def end(self) -> None:
        """End the service. The pool has waited for its requests."""
        await self._gpu.aclose(drain_s=0.0)

    def _own(self, value: Any) -> Any:
        """This replica's own of what all have; anything else is itself. Raises `InvalidRequest`."""
        if isinstance(value, Held):
            if value.number not in self._made:
                raise InvalidRequest(
                    field="value",
                    value=Words(type(value).__name__),
                    problem="was freed or unloaded meanwhile",
                    fix="upload or load it again",
                )
            return self._made[value.number][1]
        if isinstance(value, tuple | list):
            return tuple(self._own(each) for each in value)
        return value
