"""The requests of a `RayPool`: pure requests for any replica, and requests for the models and buffers that
all replicas have."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from cudnn_actor.actors import within
from cudnn_actor.actors.event_loop import running_loop
from cudnn_actor.models import BatchedModel
from cudnn_actor.models.batch_rules import BatchRules
from cudnn_actor.models.inputs import named_once
from cudnn_actor.models.sizes import Sizes
from cudnn_actor.pool import MemberState
from cudnn_actor.pool.dispatching import Dispatching
from cudnn_actor.pool.pure_requests import kind_of_compute
from cudnn_actor.protocol.errors import MailboxFull, ServiceStopped
from cudnn_actor.protocol.types.checks import require_whole
from cudnn_actor.protocol.types.dtypes import DTypeLike
from cudnn_actor.protocol.types.tensor import Layout, LayoutLike
from cudnn_actor.protocol.types.tune import Tune
from cudnn_actor.ray.batches import RayBatches
from cudnn_actor.ray.held import BufferRecipe, Held, ModelRecipe, RayBuffer, RayModel, Reservation, short_name
from cudnn_actor.ray.one_replica import OneReplica, Work
from cudnn_actor.ray.packing import pack
from cudnn_actor.ray.replication import Replication
from cudnn_actor.ray.settings import Settings
from cudnn_actor.ray.values import Values, require_held, require_pure
from cudnn_actor.ray.watching import Watched
from cudnn_actor.service.computing import Computable
from cudnn_actor.service.model_sources import name_of, source_of

__all__ = ["RayRequests"]

T = TypeVar("T")


class ModelOptions(NamedTuple):
    """The options with which a pool's model was loaded: see `RayRequests.load`. `options` are the
    reader's."""

    dims: Mapping[str, Sizes] | None
    tune: Tune | None
    options: Mapping[str, Any]


class RayRequests:
    """The requests of a pool. `RayPool` adds its start and its end.

    Parameters
    ----------
    settings
        The pool's settings.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings, self.name = settings, settings.name
        self._id = uuid.uuid4().hex
        self._dispatching = Dispatching(settings.num_replicas)
        self._replication = Replication(
            self._dispatching.holding, self._require_alive, settings.ready_within_s
        )
        self._values = Values()
        self._members: tuple[Watched, ...] = ()
        self._submitted: set[asyncio.Task[Any]] = set()
        self._loaded: dict[RayModel, ModelOptions] = {}
        """For each model: the options with which it was last loaded."""

    def __len__(self) -> int:
        """How many replicas the pool has, including those that were given up."""
        return self._settings.num_replicas

    def on(self, member: int) -> OneReplica:
        """One replica, for buffers, and requests with them, that must stay together.

        The pool does not count its calls when it chooses a replica. Raises `InvalidRequest` if there is no
        such replica.
        """
        return OneReplica(self._members[require_whole("member", member, 0, len(self._members) - 1)])

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
        """Compute on one of the replicas, with arrays as arguments and results: see `CudnnRef.compute`.

        Parameters
        ----------
        what, also, timeout
            See `CudnnRef.compute`.
        arrays, named
            Arguments by name: arrays, references to arrays in Ray's store (`ray.ObjectRef`), buffers of
            `upload`, which are only read, and an operation's other fields. Do not change arrays before the
            answer is there.

        Returns
        -------
        Any
            The results, as `CudnnRef.compute` returns them. Arrays of more than 100 KiB lie in memory that a
            replica of this machine has mapped, or in Ray's object store, and are read-only.

        Raises
        ------
        InvalidRequest
            A `BufferRef` was given, which belongs to one replica; or a buffer of the pool would be
            overwritten. For other causes, see `CudnnRef.compute`.
        QuarantinedRequest
            Four replicas ended while they had the request.
        DeadlineExceeded
            No answer within `timeout` seconds.
        ServiceStopped
            No replica is left.
        CudnnActorError
            See `CudnnRef.compute`.
        """
        given = named_once(arrays, named)
        require_pure(what, given, self._replication.held)
        with within(timeout) as deadline:
            kind = kind_of_compute(what, given)
            values = self._values.of(kind, given)

            async def work(member: int, left_s: float | None) -> Any:
                return await self._members[member].request(
                    deadline, "compute", pack(what), tuple(also), left_s, values=values
                )

            return await self._dispatching.run(kind, work, deadline)

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
        Cancelling it withdraws the request.

        Raises `MailboxFull` if there are `mailbox` open requests for each replica that is not given up.
        """
        given = named_once(arrays, named)
        routing = self._dispatching.routing
        left = [state for state in routing.states if state is not MemberState.REMOVED]
        capacity = self._settings.mailbox * max(1, len(left))
        if len(self._submitted) >= capacity:
            raise MailboxFull(capacity=capacity)
        task = running_loop().create_task(self.compute(what, given, also=also, timeout=timeout))
        self._submitted.add(task)
        task.add_done_callback(self._submitted.discard)
        return task

    async def call(self, work: Work[T], *, kind: Hashable = None, timeout: float | None = None) -> T:
        """Run an asynchronous function in one of the replicas, for any pure request with models and buffers
        of the pool.

            y = await pool.call(lambda gpu, own: gpu.compute(graph, x=x, w=own(weights)))

        Parameters
        ----------
        work
            The function. Its arguments are the handle of a replica's service, and a function from a buffer or
            a model of the pool to the replica's own. Ray sends the function with the objects that it refers
            to (cloudpickle), and its result back. If the replica is lost, another one runs it again. So it
            must not matter how often it runs, and it must free its buffers.
        kind
            Calls of one kind take the device about as long as each other.
        timeout
            Seconds for everything together; then `work` is cancelled.

        Raises
        ------
        DeadlineExceeded, QuarantinedRequest, ServiceStopped
            See `compute`.
        BaseException
            `work` has raised it in a replica that was not lost.
        """
        with within(timeout) as deadline:

            async def send(member: int, _left_s: float | None) -> T:
                found: T = await self._members[member].request(deadline, "call", work)
                return found

            return await self._dispatching.run(("call", kind), send, deadline)

    async def run(
        self,
        model: RayModel,
        inputs: Mapping[str, Any] | None = None,
        /,
        *,
        timeout: float | None = None,
        **named: Any,
    ) -> dict[str, np.ndarray]:
        """Run a model that this pool has loaded, on one of the replicas: see `CudnnRef.run`.

        Inputs are arrays or references to arrays in Ray's store, by name; outputs are arrays by name, as for
        `compute`. Raises as `compute` and `CudnnRef.run`.
        """
        require_held("model", model, self._replication.held)
        given = named_once(inputs, named)
        require_pure(None, given, self._replication.held)
        with within(timeout) as deadline:
            kind = model, kind_of_compute(None, given)
            values = self._values.of(kind, given)

            async def work(member: int, left_s: float | None) -> dict[str, np.ndarray]:
                found: dict[str, np.ndarray] = await self._members[member].request(
                    deadline, "run", short_name(model), left_s, values=values
                )
                return found

            return await self._dispatching.run(kind, work, deadline)

    def batched(
        self,
        model: RayModel,
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

        See `Pool.batched`, which has the same parameters. Batches are formed in this process, for the pool as
        a whole. Each runs on one of the replicas, and on another one if that replica is lost. Entering warms
        the model on all replicas; on a replica that starts later, it is warmed before the replica gets
        requests.

        Parameters
        ----------
        model
            A model of `load`.
        max_batch, max_delay_us, sizes, dims, max_waiting, in_flight, timeout
            See `Pool.batched`.

        Raises
        ------
        InvalidRequest
            See `Pool.batched`.
        """
        require_held("model", model, self._replication.held)
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
            RayBatches(model, self._replication, self._dispatching, self._values),
            rules,
            quarantined=lambda _digest: False,
            note_batch=lambda _samples: None,
            name=self.name,
            timeout=timeout,
            devices=len(self),
        )

    # Copies on all replicas.

    async def upload(
        self, array: Any, *, layout: LayoutLike = Layout.NCHW, dtype: DTypeLike | None = None
    ) -> RayBuffer:
        """Copy an array, such as weights, to each replica, also to replicas that start later. `free` frees
        it.

        The array lies in Ray's object store, and is sent to each node once. Raises `InvalidRequest` and
        `OutOfMemory` as `CudnnRef.upload`.
        """
        values = np.asarray(array)
        recipe = BufferRecipe(values, layout, dtype)
        buffer = RayBuffer(pool=self._id, number=self._replication.next_number(), dims=values.shape)
        await self._replication.add(buffer, recipe)
        return buffer

    async def free(self, buffer: RayBuffer) -> None:
        """Free a buffer of the pool on all replicas, once earlier work is done."""
        await self._replication.drop(buffer)

    async def load(
        self,
        model: Any,
        *,
        dims: Mapping[str, Sizes] | None = None,
        dtype: DTypeLike | None = None,
        replace: RayModel | None = None,
        tune: Tune | None = None,
        name: str | None = None,
    ) -> RayModel:
        """Load a model on each replica, also on replicas that start later.

        This process reads the model, once, and Ray's object store sends it to each node. `unload` unloads it.
        If no replica is up, this returns when the first that is has loaded the model.

        Parameters
        ----------
        model, dims, dtype, tune
            As in `CudnnRef.load`.
        replace
            A model of this pool with the same inputs and outputs. The object runs the new model from then on,
            and is returned. The replicas change to the new model one after the other, as the members of
            `Pool.load` do. Each run is of the old model as a whole, or of the new one; once this returns,
            only of the new one. If a replica cannot run the new model, all go back to the old one. If `dims`,
            `dtype` or `tune` is None, the value with which the old model was loaded holds.
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
            require_held("replace", replace, self._loaded)
            earlier = self._loaded[replace]
            dims, tune = dims or earlier.dims, earlier.tune if tune is None else tune
            options = earlier.options
        source = await source_of(model, {"dtype": dtype}, options)
        found = ModelOptions(dims, tune, getattr(source, "options", {}))
        if replace is not None:
            await self._replication.swap(replace, ModelRecipe(source, replace.name, dims, tune))
            self._loaded[replace] = found
            return replace
        loaded = RayModel(
            pool=self._id,
            number=self._replication.next_number(),
            name=name_of(model, name),
            inputs=tuple(source.inputs),
            defaults=tuple(source.defaults),
            outputs=tuple(source.outputs),
        )
        await self._replication.add(loaded, ModelRecipe(source, loaded.name, dims, tune))
        self._loaded[loaded] = found
        return loaded

    async def unload(self, model: RayModel) -> None:
        """Unload a model on all replicas, once its runs are done."""
        self._loaded.pop(model, None)
        while reserved := [each for each in self._replication.held if _is_of(each, model)]:
            await self._replication.drop(reserved[0])  # first: no replica can make one without the model
        # No other task runs between the last look and the first step of this. So there are no reservations.
        await self._replication.drop(model)

    def _require_alive(self) -> None:
        if self._dispatching.closed:
            raise ServiceStopped(reason="the pool was closed")


def _is_of(held: Held, model: RayModel) -> bool:
    """Whether this is a reservation of a model."""
    return isinstance(held, Reservation) and held.model == model
