"""A replica: an asynchronous Ray actor with a service. This module runs in the actor's process.

Whenever Ray starts the actor again, it calls the constructor, and nothing else. So the constructor starts the
service. The pool gives a replica its models and buffers. It first asks each incarnation of the actor for its
name, and names it in each request. An incarnation refuses requests for another one, because it does not have
the buffers of that one.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Concatenate, ParamSpec, TypeVar

import ray

from cudnn_actor.actors import Deadline
from cudnn_actor.actors.long_work import in_own_thread
from cudnn_actor.options import make_options
from cudnn_actor.processes.process_state import ProcessName
from cudnn_actor.protocol.errors import CudnnActorError, InvalidRequest, Words
from cudnn_actor.ray.held import Held, Recipe
from cudnn_actor.ray.node_memory import ArrayPlace, MappedMemory, MemoryName
from cudnn_actor.ray.packing import Given, Head, PackedResults, join, pack_results, unpack
from cudnn_actor.service.client import CudnnRef
from cudnn_actor.service.service import start_checked
from cudnn_actor.supervision import Restarted, Restarting

__all__ = ["Answer", "Beat", "Hello", "Replica"]

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Hello:
    """The identity of an incarnation of a replica.

    Parameters
    ----------
    incarnation
        A name that no other incarnation has.
    pid
        The id of its process on its node.
    node
        Ray's id of the node.
    device
        The device of its service: "cpu" or "cuda:N".
    near
        Whether it has mapped the pool's memory, because it is on the same node.
    process
        The name of its process, if it is near.
    """

    incarnation: str
    pid: int
    node: str
    device: str
    near: bool = False
    process: ProcessName | None = None


@dataclass(frozen=True)
class Beat:
    """A replica's regular sign of life: whether its service's worker serves, and the id of the worker's
    process, None without one."""

    ready: bool
    worker_pid: int | None


@dataclass(frozen=True)
class Answer:
    """The outcome of a request in a replica: a value, an error of this package, or a refusal, if the request
    was for another incarnation."""

    value: Any = None
    error: CudnnActorError | None = None
    refused: bool = False


def _answering(
    work: Callable[Concatenate[Replica, P], Awaitable[Any]],
) -> Callable[..., Awaitable[Answer | PackedResults]]:
    """Decorate a method: it gets its arguments as `packing.split` sends them, and returns an `Answer`, or
    the results that the method has packed.

    Errors of this package are returned as values, since Ray would raise them as a class of its own.
    """

    async def answer(self: Replica, head: Head | bytes, /, *apart: Any) -> Answer | PackedResults:
        incarnation, args = join(head, apart)
        if incarnation != self.hello_of_this.incarnation:
            return Answer(refused=True)
        try:
            found = await work(self, *args)  # type: ignore[call-arg]
        except CudnnActorError as error:
            return Answer(error=error.with_traceback(None))
        return found if isinstance(found, PackedResults) else Answer(found)

    answer.__name__, answer.__doc__ = work.__name__, work.__doc__  # no `__wrapped__`: Ray reads the signature
    return answer


class Replica:
    """The class of the actors. Ray runs its constructor on the thread of the actor's event loop.

    Parameters
    ----------
    options
        The options of `spawn`, as plain data. If the service gives up, the process ends.

    Raises
    ------
    StartFailed, InvalidRequest
        The service cannot be started. Then Ray does not start the actor again.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        service = start_checked(make_options({**options, "on_give_up": "exit"}))
        self._gpu = CudnnRef(service)
        self.hello_of_this = Hello(
            incarnation=uuid.uuid4().hex,
            pid=os.getpid(),
            node=ray.get_runtime_context().get_node_id(),
            device=self._gpu.device,
        )
        self._made: dict[int, tuple[Recipe, Any]] = {}
        self._memory: MappedMemory | None = None
        self._changed = asyncio.Event()
        self._following: asyncio.Task[None] | None = None

    async def hello(self, memory: MemoryName | None) -> Hello:
        """The identity of this incarnation. It maps the pool's memory if it can."""
        if self._following is None:
            self._following = asyncio.create_task(self._follow())
        if self._memory is None and memory is not None:
            self._memory = await in_own_thread(MappedMemory.open, memory)
            if self._memory is not None:
                self.hello_of_this = replace(self.hello_of_this, near=True, process=self._memory.process)
        return self.hello_of_this

    async def _follow(self) -> None:
        async for event in self._gpu.events():
            if isinstance(event, Restarting | Restarted):
                self._changed.set()

    @_answering
    async def beat(self, known: Beat | None, period_s: float) -> Beat:
        """The state of the service. Waits until it differs from `known`, or for `period_s` seconds."""
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
        """Make a copy by a recipe, unless this replica has it."""
        if number not in self._made:
            self._made[number] = recipe, await recipe.make(self._gpu, self._own)

    @_answering
    async def replace(self, number: int, recipe: Recipe) -> None:
        """Replace a copy by one of another recipe."""
        _, made = self._made[number]
        self._made[number] = recipe, await recipe.replace(self._gpu, made)

    @_answering
    async def drop(self, number: int) -> None:
        """Free a copy, if this replica has it."""
        if (found := self._made.pop(number, None)) is not None:
            recipe, made = found
            await recipe.drop(self._gpu, made)

    @_answering
    async def compute(
        self,
        what: Any,
        also: Sequence[str],
        timeout: float | None,
        given: Given,
        *values: Any,
    ) -> Any:
        """Run `CudnnRef.compute`. The values are separate arguments, so that Ray replaces its references by
        their objects. Large results are copied to `given.room`."""
        arrays = given.by_name(map(self._own, values))
        found = await self._gpu.compute(unpack(what), arrays, also=also, timeout=timeout)
        return pack_results(found, self._memory, given.room)

    @_answering
    async def run(self, model: Held, timeout: float | None, given: Given, *values: Any) -> Any:
        """Run `CudnnRef.run`, with values and results as in `compute`."""
        arrays = given.by_name(map(self._array, values))
        found = await self._gpu.run(self._own(model), arrays, timeout=timeout)
        return pack_results(found, self._memory, given.room)

    @_answering
    async def run_batch(
        self,
        model: Held,
        left_s: float | None,
        again: bool,
        crashes: int,
        given: Given,
        *values: Any,
    ) -> Any:
        """Run `Model.run_checked`, with values and results as in `compute`."""
        own, arrays = self._own(model), given.by_name(map(self._array, values))
        found = await own.run_checked(
            own.validated_inputs(arrays), Deadline(left_s), again=again, crashes=crashes
        )
        return pack_results(found, self._memory, given.room)

    @_answering
    async def call(self, work: Callable[[CudnnRef, Callable[[Held], Any]], Awaitable[Any]]) -> Any:
        """Run a caller's function. Its arguments are the handle, and the function from a `Held` to this
        replica's copy."""
        return await work(self._gpu, self._own)

    async def end(self) -> None:
        """End the service. The pool has waited for its requests before."""
        await self._gpu.aclose(drain_s=0.0)

    def _own(self, value: Any) -> Any:
        """This replica's copy of a `Held`; any other value as it is. Raises `InvalidRequest` if there is no
        copy."""
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
        return self._array(value)

    def _array(self, value: Any) -> Any:
        """The array at a place in the pool's memory; any other value as it is."""
        if isinstance(value, ArrayPlace):
            assert self._memory is not None, "the pool was told that it is mapped"
            return self._memory.array(value)
        return value
