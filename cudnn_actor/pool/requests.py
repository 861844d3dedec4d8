"""What a pool is asked: pure requests for any of its members, and what all of them have."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from cudnn_actor.actors import within
from cudnn_actor.actors.event_loop import running_loop
from cudnn_actor.actors.long_work import in_own_thread
from cudnn_actor.attached.client.shared_segments import ToShare, shared_copies
from cudnn_actor.models import BatchedModel
from cudnn_actor.models.batch_rules import BatchRules
from cudnn_actor.models.inputs import named_once
from cudnn_actor.models.sizes import Sizes
from cudnn_actor.pool.batches import Everywhere
from cudnn_actor.pool.dispatching import Dispatching
from cudnn_actor.pool.member import Member
from cudnn_actor.pool.moving import Moving
from cudnn_actor.pool.pure_requests import (
    kind_of_compute,
    kind_of_run,
    operand_fields,
    references,
    require_arrays,
    with_copies,
)
from cudnn_actor.pool.replicas import PoolBuffer, PoolModel, Replica, Version
from cudnn_actor.pool.replication import Replication
from cudnn_actor.pool.shared_source import shared
from cudnn_actor.protocol.errors import InvalidRequest, ServiceStopped, StaleBufferError, StaleReason
from cudnn_actor.protocol.graphs.named_graph import Graph
from cudnn_actor.protocol.operations import Operation
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.checks import require_type, require_whole
from cudnn_actor.protocol.types.dtypes import DTypeLike
from cudnn_actor.protocol.types.tensor import Layout, LayoutLike
from cudnn_actor.protocol.types.tune import Tune
from cudnn_actor.service.arrays import as_values, packed_like
from cudnn_actor.service.client import CudnnRef
from cudnn_actor.service.computing import Computable
from cudnn_actor.service.model_sources import name_of, read_before, read_model

__all__ = ["PoolRequests"]

T = TypeVar("T")


class PoolRequests:
    """The requests of a pool. See `Pool`, which has its life.

    Parameters
    ----------
    name
        The pool's.
    members
        Its members.
    dispatching
        Its requests that are not answered.
    """

    def __init__(self, name: str, members: Sequence[Member], dispatching: Dispatching) -> None:
        self.name = name
        self._members, self._dispatching = members, dispatching
        self._loop = running_loop()
        self._moving = Moving()
        self._replication = Replication(members, dispatching.holding)

    def __len__(self) -> int:
        """How many members it has, those that were given up included."""
        return len(self._members)

    def on(self, member: int) -> CudnnRef:
        """The handle of one member's service, for what must stay together: buffers, and requests with them.

        When the member's process ends, the handle's requests raise `ServiceStopped`, and so does this method
        until the member is back. Another member refuses its references with `StaleBufferError`. The pool does
        not count its requests when it chooses a member. Raises `InvalidRequest` for no such member.
        """
        return self._handle(require_whole("member", member, 0, len(self._members) - 1))

    def _handle(self, member: int) -> CudnnRef:
        """The handle of a member that there is. Raises `ServiceStopped` while its process does not run."""
        gpu = self._members[member].gpu
        if gpu is None:
            raise ServiceStopped(reason=f"the process of {self._members[member].name} does not run")
        return gpu

    @property
    def alive(self) -> bool:
        """Whether it has not ended. Sends no message; never blocks."""
        return not self._dispatching.closed

    # Pure requests.

    async def compute(
        self,
        what: Computable,
        arrays: Mapping[str, Any] | None = None,
        /,
        *,
        also: Sequence[str] = (),
        timeout: float | None = None,
        **named: Any,
    ) -> Any:
        """Arrays in, arrays out, on one of the members: see `CudnnRef.compute`.

        Parameters
        ----------
        what, also, timeout
            As there.
        arrays, named
            By name: an array, or what `Pool.upload` gave, which is only read; and an operation's other
            fields.

        Raises
        ------
        InvalidRequest
            A `BufferRef` was given, which belongs to one member; or a buffer of the pool was given for what
            is overwritten. Else as there.
        QuarantinedRequest
            Four members ended while they had it.
        ServiceStopped
            No member is left.
        CudnnActorError
            As there.
        """
        given = named_once(arrays, named)
        self._require_arrays(given)
        with_copies(what, given, None)  # refuses what is overwritten, before anything is sent

        async def work(member: int, left_s: float | None) -> Any:
            own = with_copies(what, given, member)
            return await self.on(member).compute(what, own, also=also, timeout=left_s)

        with within(timeout) as deadline:
            return await self._dispatching.run(kind_of_compute(what, given), work, deadline)

    def submit(
        self,
        what: Computable,
        arrays: Mapping[str, Any] | None = None,
        /,
        *,
        also: Sequence[str] = (),
        timeout: float | None = None,
        **named: Any,
    ) -> asyncio.Task[Any]:
        """A task that runs `compute`; it also raises what is wrong. Cancelling it withdraws the request."""
        given = named_once(arrays, named)
        return self._loop.create_task(self.compute(what, given, also=also, timeout=timeout))

    async def apply(
        self,
        operation: Operation[Any] | Graph,
        buffers: Mapping[str, BufferRef | PoolBuffer] | None = None,
        /,
        *,
        also: Sequence[str] = (),
        timeout: float | None = None,
        **named: BufferRef | PoolBuffer,
    ) -> Any:
        """Run an operation or a graph on buffers, and allocate its outputs: see `CudnnRef.apply`.

        It runs where the references are that it names, and the pool does not count it when it chooses
        members. With buffers of the pool alone, it runs on any member, and elsewhere if that is lost. The
        outputs are where it has run: `member_of` says where, and `move` moves them. They go with the member.

        Raises
        ------
        InvalidRequest
            References are of different members; or a buffer of the pool would be overwritten. Else as there.
        StaleBufferError
            No member has such a buffer.
        ServiceStopped
            The member has ended meanwhile, or no member is left.
        CudnnActorError
            As there.
        """
        given = dict(named_once(buffers, named))
        fields = {} if isinstance(operation, Graph) else operand_fields(operation)
        what = operation if isinstance(operation, Graph) else type(operation)
        with_copies(what, {**fields, **given}, None)

        async def work(member: int, left_s: float | None) -> Any:
            own, changed = (with_copies(what, each, member) for each in (given, fields))
            message = operation
            if not isinstance(operation, Graph):
                message = msgspec.structs.replace(operation, **changed)
            return await self.on(member).apply(message, own, also=also, timeout=left_s)

        with within(timeout) as deadline:
            if (member := self._one_member({**fields, **given})) is not None:
                return await work(member, deadline.left_s)
            shapes = kind_of_compute(what, {**fields, **given})
            return await self._dispatching.run(("apply", shapes), work, deadline)

    async def call(
        self,
        work: Callable[[CudnnRef, Callable[[Replica[Any]], Any]], Awaitable[T]],
        *,
        kind: Hashable = None,
        timeout: float | None = None,
    ) -> T:
        """Run an asynchronous function on one of the members: any pure request, with buffers that are there.

            y = await pool.call(lambda gpu, own: gpu.compute(graph, x=x, w=own(weights)))

        Parameters
        ----------
        work
            Gets the member's handle, and a function that gives the member's own buffer or model for what
            `upload` or `load` gave. If the member is lost, it is called again with another. So it must not
            matter how often it runs; what it allocates it frees.
        kind
            Calls of one kind take the device about as long as each other.
        timeout
            Seconds for all of it; then it is cancelled.

        Raises
        ------
        DeadlineExceeded
            No answer within `timeout`.
        QuarantinedRequest, ServiceStopped
            As `compute`.
        CudnnActorError
            What `work` raises on a member that was not lost, and so does whatever else it raises.
        """

        async def sent(member: int, left_s: float | None) -> T:
            if left_s is None:  # nearly all calls: to limit one costs as much as half of the rest
                return await work(self._handle(member), lambda replica: replica.of(member))
            async with deadline.limiting():
                return await work(self._handle(member), lambda replica: replica.of(member))

        with within(timeout) as deadline:
            return await self._dispatching.run(("call", kind), sent, deadline)

    async def run(
        self,
        model: PoolModel,
        inputs: Mapping[str, Any] | None = None,
        /,
        *,
        timeout: float | None = None,
        **named: Any,
    ) -> dict[str, np.ndarray]:
        """Run a model that this pool has loaded, on one of the members: see `CudnnRef.run`.

        Inputs are arrays, and so are the outputs, by name. Raises as `compute` and `CudnnRef.run`.
        """
        self._replication.require(model)
        given = named_once(inputs, named)
        self._require_arrays(given)

        async def work(member: int, left_s: float | None) -> dict[str, np.ndarray]:
            return await self.on(member).run(model.of(member), given, timeout=left_s)

        with within(timeout) as deadline:
            return await self._dispatching.run(kind_of_run(model, given), work, deadline)

    def batched(
        self,
        model: PoolModel,
        *,
        max_batch: int | None = None,
        max_delay_us: float = 2000,
        sizes: Sequence[int] | None = None,
        dims: Mapping[str, Sizes] | None = None,
        max_waiting: int = 1024,
        in_flight: int | None = None,
        timeout: float | None = None,
    ) -> BatchedModel:
        """Run requests of many tasks together: `async with pool.batched(model) as endpoint`.

        See `CudnnRef.batched`, which has the same parameters. Batches are formed for the pool as a whole, and
        each runs on one of the members; on another one if that is lost. While fewer run than there are
        members, one starts as soon as no more requests are expected. A batch of several requests that was
        lost twice is divided, and its requests run one by one. Entering warms the model on all members; one
        that is started later is warmed before it gets requests.

        Parameters
        ----------
        model
            What `load` gave. Its inputs and outputs are as there.
        max_batch, max_delay_us, sizes, dims, max_waiting, timeout
            As there.
        in_flight
            How many batches may be sent at a time; None for two for each member.

        Raises
        ------
        InvalidRequest
            As there.
        """
        self._replication.require(model)
        rules = BatchRules.of(
            model.inputs,
            model.outputs,
            max_batch=max_batch,
            sizes=sizes,
            dims=dims,
            max_delay_us=max_delay_us,
            max_waiting=max_waiting,
            in_flight=2 * len(self) if in_flight is None else in_flight,
        )
        return BatchedModel(
            Everywhere(model, self._replication, self._dispatching, self.on),
            rules,
            quarantined=lambda _digest: False,
            note_batch=lambda _samples: None,
            name=self.name,
            timeout=timeout,
            devices=len(self),
        )

    # What all members have.

    async def upload(
        self, array: Any, *, layout: LayoutLike = Layout.NCHW, dtype: DTypeLike | None = None
    ) -> PoolBuffer:
        """Copy an array to each member, and to each that is started later: weights, say. `free` frees it.

        The pool keeps a copy of the array, which all members map. Raises as `CudnnRef.upload`.
        """
        values = as_values(array, "cpu", None)
        assert isinstance(values, np.ndarray), "what is on a device was refused"
        spec = packed_like(values, None, Layout.NCHW)
        (copy,) = await in_own_thread(shared_copies, [ToShare(spec, lambda: values)])
        buffer = PoolBuffer(copy, layout, dtype)
        self._require_alive()
        await self._replication.add(buffer)
        return buffer

    async def free(self, buffer: PoolBuffer | BufferRef) -> None:
        """Free a buffer, once earlier work is done: one of the pool on all members, or one of a member.

        Raises `StaleBufferError` for a reference that no member knows.
        """
        if isinstance(buffer, BufferRef):
            await self.on(self.member_of(buffer)).free(buffer)
        else:
            await self._replication.drop(buffer)

    async def load(
        self,
        model: Any,
        *,
        dims: Mapping[str, Sizes] | None = None,
        dtype: DTypeLike | None = None,
        replace: PoolModel | None = None,
        tune: Tune | None = None,
        name: str | None = None,
    ) -> PoolModel:
        """Load a model on each member, and on each that is started later.

        It is read and imported once. Its weights lie in sealed memory, which all members map.

        Parameters
        ----------
        model, dims, dtype, tune
            As in `CudnnRef.load`.
        replace
            A model of this pool with the same inputs and outputs, which runs the new one from now on, and is
            returned. The members are changed one after the other. The one whose turn it is finishes what it
            has, and gets nothing new, as long as another is up. Each run is of the old model as a whole or of
            the new one. While members are changed, runs of both are answered; once this returns, of the new
            one alone. If a member cannot run the new one, all go back to the old one. What is None of `dims`,
            `dtype` and `tune` is as the old model was loaded with.
        name
            As there; with `replace`, that of the replaced model stays.

        Raises
        ------
        CudnnActorError
            As there. `unload` ends it.
        """
        self._require_alive()
        options: dict[str, Any] = {}
        if replace is not None:
            self._replication.require(replace, "replace")
            earlier = replace.version
            dims, tune = dims or earlier.dims, earlier.tune if tune is None else tune
            options |= getattr(earlier.source, "options", {})
        source = read_before(model, dtype=dtype)
        if source is None:
            options |= {} if dtype is None else {"dtype": dtype}
            source = await in_own_thread(read_model, model, options)
        version = Version(source=shared(source), dims=dims, tune=tune)
        if replace is not None:
            await self._replication.swap(replace, version)
            return replace
        loaded = PoolModel(version, name_of(model, name))
        await self._replication.add(loaded)
        return loaded

    async def unload(self, model: PoolModel) -> None:
        """Unload a model on all members, once its runs are done."""
        await self._replication.drop(model)

    # Buffers of one member.

    def member_of(self, buffer: BufferRef) -> int:
        """The number of the member that has a buffer. Sends no message.

        Raises `StaleBufferError` if none has it: it was freed or moved, or its member's process has ended.
        """
        require_type("buffer", buffer, BufferRef, "pass what apply, move or pool.on(number) gave")
        for member in self._members:
            if member.gpu is not None and member.gpu._state.memory.is_live(buffer):
                return member.number
        raise StaleBufferError(slot=buffer.slot, generation=buffer.generation, reason=StaleReason.FOREIGN)

    async def download(self, buffer: BufferRef, *, timeout: float | None = None) -> np.ndarray:
        """The values of a buffer of one member: see `CudnnRef.download`. Raises as `member_of`, too."""
        return await self.on(self.member_of(buffer)).download(buffer, timeout=timeout)

    async def move(self, buffer: BufferRef, *, to: int, timeout: float | None = None) -> BufferRef:
        """Move a buffer to another member: from device to device, if the one can read the other's memory.

        Else, and if it is small, its values are downloaded and uploaded. Earlier requests with it are done
        first. The given reference ends once the values have arrived: from then on it raises
        `StaleBufferError`. What writes to the buffer while it moves may be lost, or be there in part. A
        buffer that is there already stays as it is.

        Parameters
        ----------
        buffer
            A reference of one of the members.
        to
            The number of the member that gets it.
        timeout
            Seconds for all of it. Who cancels a call instead may find the buffer freed, and has no other.

        Returns
        -------
        BufferRef
            A reference of that member, of the same dims, dtype and layout.

        Raises
        ------
        StaleBufferError
            No member has such a buffer.
        OutOfMemory
            There is no room. The buffer stays where it is, and so with all other errors.
        ServiceStopped
            One of the two processes has ended.
        InvalidRequest
            There is no such member.
        """
        source, target = self.on(self.member_of(buffer)), self.on(to)
        if source is target:
            return buffer
        with within(timeout) as deadline:
            return await self._moving.move(buffer, source, target, deadline)

    # Checks.

    def _require_alive(self) -> None:
        if not self.alive:
            raise ServiceStopped(reason="the pool was closed")

    def _require_arrays(self, given: Mapping[str, Any]) -> None:
        require_arrays(given, {member.name: member.gpu for member in self._members})

    def _one_member(self, given: Mapping[str, Any]) -> int | None:
        """The member that has all references that are given; None without a reference."""
        found = {self.member_of(each): (field, each) for field, each in references(given)}
        if len(found) > 1:
            (one, (other_field, _)), (two, (field, ref)) = itertools.islice(found.items(), 2)
            names = [self._members[number].name for number in (one, two)]
            raise InvalidRequest(
                field=field,
                value=ref,
                problem=f"is a buffer of {names[1]}, and {other_field} is one of {names[0]}",
                fix=f"move it: {field} = await pool.move({field}, to={one})",
            )
        return next(iter(found), None)
