"""Runs each batch of a `RayPool`'s model on one of the replicas."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Hashable, Mapping
from functools import partial
from typing import Any

import numpy as np

from cudnn_actor.actors import Deadline
from cudnn_actor.pool.batches import Batches
from cudnn_actor.pool.dispatching import Dispatching
from cudnn_actor.pool.pure_requests import kind_of_compute
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.tensor import TensorSpec
from cudnn_actor.ray.held import RayModel, Reservation, ReservationRecipe, short_name
from cudnn_actor.ray.replication import Replication
from cudnn_actor.ray.values import Values, require_held

__all__ = ["RayBatches"]


class RayBatches(Batches):
    """A model of a `RayPool`.

    Parameters
    ----------
    model
        The model.
    replication
        The replication, by which all replicas have the model.
    dispatching
        The dispatching, which sends each batch to a replica.
    values
        The object that copies large arrays to where replicas find them.
    """

    def __init__(
        self, model: RayModel, replication: Replication, dispatching: Dispatching, values: Values
    ) -> None:
        super().__init__(model, dispatching)
        self._model: RayModel
        self._replication, self._values = replication, values
        self._ending = set[asyncio.Task[None]]()

    def _kind(self, given: Mapping[str, Any]) -> Hashable:
        return self._model, kind_of_compute(None, given)

    async def _sender(
        self, given: Mapping[str, BufferRef | np.ndarray], deadline: Deadline, *, again: bool, crashes: int
    ) -> Callable[[int, float | None], Awaitable[dict[str, Any]]]:
        require_held("model", self._model, self._replication.held)
        values = self._values.of(self._kind(given), given)

        async def work(member: int, left_s: float | None) -> dict[str, Any]:
            replica = self._replication.members[member]
            found: dict[str, Any] = await replica.request(
                deadline, "run_batch", short_name(self._model), left_s, again, crashes, values=values
            )
            return found

        return work

    async def reserve(self, specs: Mapping[str, TensorSpec], deadline: Deadline) -> Callable[[], None]:
        """Warm the model on all replicas, also on replicas that start later. Returns a function that ends
        this."""
        model, number = self._model, self._replication.next_number()
        held = Reservation(pool=model.pool, number=number, model=model)
        async with deadline.limiting():
            await self._replication.add(held, ReservationRecipe(model, dict(specs)), of=model)
        return partial(self._release, asyncio.get_running_loop(), held)

    def _release(self, loop: asyncio.AbstractEventLoop, held: Reservation) -> None:
        """End a reservation soon. Any thread may call this, since an endpoint that nobody closes may be
        collected on any thread."""

        def begin() -> None:
            task = loop.create_task(self._replication.drop(held))
            self._ending.add(task)  # the loop has only a weak reference
            task.add_done_callback(self._ending.discard)

        with contextlib.suppress(RuntimeError):  # the loop has closed, and the pool with it
            loop.call_soon_threadsafe(begin)

    async def lend(self, specs: Mapping[str, TensorSpec]) -> dict[str, np.ndarray]:
        """Arrays for the inputs of a batch. Each run copies large arrays to where its replica finds them."""
        return {name: np.zeros(spec.dims, spec.dtype.numpy) for name, spec in specs.items()}
