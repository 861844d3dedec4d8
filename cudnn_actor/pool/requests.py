"""The requests of a pool: pure requests for any member, and requests for the models and buffers that all
members have."""

from __future__ import annotations

import asyncio
import functools
import itertools
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy as np

from cudnn_actor.actors import Deadline, within
from cudnn_actor.actors.event_loop import running_loop
from cudnn_actor.actors.long_work import in_own_thread
from cudnn_actor.attached.client.shared_segments import ToShare, gather_at_once, shared_copies
from cudnn_actor.memory.container import processors
from cudnn_actor.models import BatchedModel
from cudnn_actor.models.batch_arrays import Gather, concatenate
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
from cudnn_actor.pool.shared_source import share_source
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
from cudnn_actor.service.model_sources import name_of, source_of

__all__ = ["PoolRequests"]

T = TypeVar("T")
Work: TypeAlias = Callable[[CudnnRef, Callable[[Replica[Any]], Any]], Awaitable[T]]
"""See `PoolRequests.call`."""
_ENDLESS = Deadline()

_PROCESSORS = 4
"""With fewer processors for each member, batches are copied in the way that takes less of their time."""


def _gather(members: int) -> Gather | None:
    """The function that copies the inputs of large batches; None for NumPy's.

    With one member, the interpreter's lock is mostly free, and NumPy's copy takes half of the processor time.
    The first call counts the processors: that reads files, and `gather` is called on the threads that copy.
    """
    if members < 2:
        return None
    are_spare = functools.cache(lambda: processors() >= _PROCESSORS * members)

    def gather(arrays: Sequence[np.ndarray], whole: np.ndarray) -> None:
        (gather_at_once if are_spare() else concatenate)(arrays, whole)

    return gather


def _copy_of(member: int, replica: Replica[T]) -> T:
    """A member's copy of a buffer or a model of the pool."""
    return replica.of(member)


class PoolRequests:
    """The requests of a pool. `Pool` adds its start and its end.

    Parameters
    ----------
    name
        The pool's name.
    members
        The pool's members.
    dispatching
        The pool's open requests.
    """

    def __init__(self, name: str, members: Sequence[Member], dispatching: Dispatching) -> None:
        self.name = name
        self._members, self._dispatching = members, dispatching
        self._own = [functools.partial(_copy_of, member.number) for member in members]
        """For each member: the function from a buffer or a model of the pool to the member's own."""
        self._loop = running_loop()
        self._moving = Moving()
        self._replication = Replication(members, dispatching.holding)

    def __len__(self) -> int:
        """How many members the pool has, including those that were given up."""
        return len(self._members)

    def on(self, member: int) -> CudnnRef:
        """The handle of one member's service, for buffers, and requests with them, that must stay together.

        When the member's process ends, the handle's requests raise `ServiceStopped`, and so does this method
        until the member is back. Another member refuses its references with `StaleBufferError`. The pool does
        not count its requests when it chooses a member. Raises `InvalidRequest` if there is no such member.
        """
        return self._handle(require_whole("member", member, 0, len(self._members) - 1))

    def _handle(self, member: int) -> CudnnRef:
        """The handle of an existing member. Raises `ServiceStopped` while its process does not run."""
        gpu = self._members[member].gpu
        if gpu is None:
            raise ServiceStopped(reason=f"the process of {self._members[member].name} does not run")
        return gpu

    @property
    def alive(self) -> bool:
        """Whether the pool has not ended. Sends no message; never blocks."""
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
        """Compute on one of the members, with arrays as arguments and results: see `CudnnRef.compute`.

        Parameters
        ----------
        what, also, timeout
            See `CudnnRef.compute`.
        arrays, named
            Arguments by name: arrays, buffers of `Pool.upload`, which are only read, and an operation's other
            fields.

        Raises
        ------
        InvalidRequest
            A `BufferRef` was given, which belongs to one member; or a buffer of the pool would be
            overwritten. For other causes, see `CudnnRef.compute`.
        QuarantinedRequest
            Four members ended while they had the request.
        ServiceStopped
            No member is left.
        CudnnActorError
            See `CudnnRef.compute`.
        """
        given = named_once(arrays, named)
        self._require_arrays(given)
        with_copies(what, given, None)  # refuses buffers that would be overwritten, before anything is sent

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
        """Start a task that runs `compute`, and return it. Errors of arguments are the task's, too.
        Cancelling it withdraws the request."""
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

        It runs on the member that has the given references, and the pool does not count it when it chooses
        members. With buffers of the pool alone, it runs on any member, and on another one if that is lost.
        The outputs are buffers of the member on which it has run: `member_of` gives its number, and `move`
        moves them. They end with the member.

        Raises
        ------
        InvalidRequest
            References are of different members; or a buffer of the pool would be overwritten. For other
            causes, see `CudnnRef.apply`.
        StaleBufferError
            No member has such a buffer.
        ServiceStopped
            The member has ended meanwhile, or no member is left.
        CudnnActorError
            See `CudnnRef.apply`.
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
        """Run an asynchronous function on one of the members, for any pure request with models and buffers of
        the pool.

            y = await pool.call(lambda gpu, own: gpu.compute(graph, x=x, w=own(weights)))

        Parameters
        ----------
        work
            The function. Its arguments are the member's handle, and a function from a buffer or a model of
            the pool to the member's own. If the member is lost, it is called again with another member. So it
            must not matter how often it runs, and it must free its buffers.
        kind
            Calls of one kind take the device about as long as each other.
        timeout
            Seconds for everything together; then `work` is cancelled.

        Raises
        ------
        DeadlineExceeded
            No answer within `timeout`.
        QuarantinedRequest, ServiceStopped
            See `compute`.
        CudnnActorError
            `work` has raised it on a member that was not lost. Any other exception of `work` is raised, too.
        """

        dispatching = self._dispatching
        if timeout is not None:
            with within(timeout) as deadline:
                return await dispatching.run(("call", kind), self._sender(work, deadline), deadline)
        request = dispatching.begin(("call", kind))
        moves = request.moves
        try:
            if (member := request.member) is not None:  # nearly always: in the fewest steps
                try:
                    found = await work(self._members[member].gpu or self._handle(member), self._own[member])
                except BaseException as error:
                    if not dispatching.has_moved(request, moves, error):
                        raise
                else:
                    dispatching.end(request, member)
                    return found
            return await dispatching.go_on(request, self._sender(work, _ENDLESS), _ENDLESS)
        except BaseException:
            dispatching.withdraw(request)
            raise

    def _sender(self, work: Work[T], deadline: Deadline) -> Callable[[int, float | None], Awaitable[T]]:
        """A function that sends a call to a member: see `Dispatching.run`."""

        async def send(member: int, left_s: float | None) -> T:
            gpu, own = self._handle(member), self._own[member]
            if left_s is None:
                return await work(gpu, own)
            async with deadline.limiting():
                return await work(gpu, own)

        return send

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

        See `CudnnRef.batched`, which has the same parameters. Batches are formed for the pool as a whole.
        Each runs on one of the members, and on another one if that member is lost. While fewer batches run
        than there are members, a batch starts as soon as no more requests are expected. A batch of several
        requests that was lost twice is divided, and its requests run one by one. Entering warms the model on
        all members; on a member that starts later, it is warmed before the member gets requests.

        Parameters
        ----------
        model
            A model of `load`. For its inputs and outputs, see `CudnnRef.batched`.
        max_batch, max_delay_us, sizes, dims, max_waiting, timeout
            See `CudnnRef.batched`.
        in_flight
            How many batches may be sent at a time; None for twice the number of members.

        Raises
        ------
        InvalidRequest
            See `CudnnRef.batched`.
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
            gather=_gather(len(self)),
        )

    # Copies on all members.

    async def upload(
        self, array: Any, *, layout: LayoutLike = Layout.NCHW, dtype: DTypeLike | None = None
    ) -> PoolBuffer:
        """Copy an array, such as weights, to each member, also to members that start later. `free` frees it.

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
        """Free a buffer, once earlier work is done: a buffer of the pool on all members, or a member's
        buffer.

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
        """Load a model on each member, also on members that start later.

        The model is read and imported once. Its weights lie in sealed memory, which all members map.

        Parameters
        ----------
        model, dims, dtype, tune
            As in `CudnnRef.load`.
        replace
            A model of this pool with the same inputs and outputs. The object runs the new model from then on,
            and is returned. The members change to the new model one after the other. A member finishes its
            requests before that, and gets no new ones, as long as another member is up. Each run is of the
            old model as a whole, or of the new one. While members change, there are answers of both; once
            this returns, only of the new one. If a member cannot run the new model, all go back to the old
            one. If `dims`, `dtype` or `tune` is None, the value with which the old model was loaded holds.
        name
            See `CudnnRef.load`; with `replace`, the name of the replaced model stays.

        Raises
        ------
        CudnnActorError
            See `CudnnRef.load`.
        """
        self._require_alive()
        options: Mapping[str, Any] = {}
        if replace is not None:
            self._replication.require(replace, "replace")
            earlier = replace.version
            dims, tune = dims or earlier.dims, earlier.tune if tune is None else tune
            options = getattr(earlier.source, "options", {})
        source = await source_of(model, {"dtype": dtype}, options)
        version = Version(source=share_source(source), dims=dims, tune=tune)
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

        Raises `StaleBufferError` if no member has it: it was freed or moved, or its member's process has
        ended.
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
        """Move a buffer to another member: from device to device, if one device can read the other's memory.

        Otherwise, or if the buffer is small, its values are downloaded and uploaded. Earlier requests with
        the buffer are done first. Once the values have arrived, the given reference raises
        `StaleBufferError`. A write to the buffer while it moves may be lost, or be there in part. A buffer
        that belongs to the target member already stays as it is.

        Parameters
        ----------
        buffer
            A reference of one of the members.
        to
            The number of the member that gets it.
        timeout
            Seconds for everything together. If you cancel the call instead, the buffer may be freed, and you
            have no new reference.

        Returns
        -------
        BufferRef
            A reference of the target member, with the same dims, dtype and layout.

        Raises
        ------
        StaleBufferError
            No member has such a buffer.
        OutOfMemory
            There is no room on the target. As with all other errors, the buffer stays where it is.
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
        """The member to which all given references belong; None without a reference."""
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
