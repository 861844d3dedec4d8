"""Runs each batch of a pool's model on one of the members."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Hashable, Mapping
from typing import Any

import numpy as np

from cudnn_actor.actors import Deadline
from cudnn_actor.actors.long_work import in_own_thread
from cudnn_actor.attached.client.shared_segments import shared_arrays
from cudnn_actor.models import Feature
from cudnn_actor.models.inputs import checked_inputs
from cudnn_actor.models.source import Features
from cudnn_actor.pool.dispatching import Dispatching
from cudnn_actor.pool.pure_requests import kind_of_run
from cudnn_actor.pool.replicas import PoolModel
from cudnn_actor.pool.replication import Replication
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.tensor import TensorSpec
from cudnn_actor.service.arrays import as_values
from cudnn_actor.service.client import CudnnRef

__all__ = ["Batches", "Everywhere"]

_LOSSES_TOGETHER = 2
"""A batch of several requests is divided once it was lost with this many members: one request may be the
cause."""


class Batches(ABC):
    """A model that several members have, as a `BatchedModel` runs it: see `models.batching.Batchable`."""

    def __init__(self, model: Features, dispatching: Dispatching) -> None:
        self._model, self._dispatching = model, dispatching

    def __repr__(self) -> str:
        return repr(self._model)

    @property
    def inputs(self) -> tuple[Feature, ...]:
        """The model's."""
        return self._model.inputs

    @property
    def defaults(self) -> tuple[Feature, ...]:
        """The model's."""
        return self._model.defaults

    @property
    def outputs(self) -> tuple[Feature, ...]:
        """The model's."""
        return self._model.outputs

    def validated_inputs(self, inputs: Mapping[str, Any]) -> dict[str, BufferRef | np.ndarray]:
        """The inputs of a run, by name. Raises `InvalidRequest`."""
        return checked_inputs(self, _on_host, inputs)

    async def run_checked(
        self,
        given: Mapping[str, BufferRef | np.ndarray],
        deadline: Deadline,
        *,
        again: bool = True,
        crashes: int = 0,
    ) -> dict[str, Any]:
        """Run the model on one of the members. Raises `QuarantinedRequest` if the run was lost with too many
        members."""
        work = await self._sender(given, deadline, again=again, crashes=crashes)
        max_losses = None if again else _LOSSES_TOGETHER
        return await self._dispatching.run(self._kind(given), work, deadline, max_losses=max_losses)

    @abstractmethod
    def _kind(self, given: Mapping[str, Any]) -> Hashable:
        """The key of runs that take about as long as each other."""

    @abstractmethod
    async def _sender(
        self,
        given: Mapping[str, BufferRef | np.ndarray],
        deadline: Deadline,
        *,
        again: bool,
        crashes: int,
    ) -> Callable[[int, float | None], Awaitable[dict[str, Any]]]:
        """A function that sends such a run to a member: see `Dispatching.run`."""


class Everywhere(Batches):
    """A model of a `Pool`.

    Parameters
    ----------
    model
        The model.
    replication
        The replication, by which all members have the model.
    dispatching
        The dispatching, which sends each batch to a member.
    on
        A function that returns a member's handle.
    """

    def __init__(
        self,
        model: PoolModel,
        replication: Replication,
        dispatching: Dispatching,
        on: Callable[[int], CudnnRef],
    ) -> None:
        super().__init__(model, dispatching)
        self._model: PoolModel
        self._replication, self._on = replication, on

    def _kind(self, given: Mapping[str, Any]) -> Hashable:
        return kind_of_run(self._model, given)

    async def _sender(
        self,
        given: Mapping[str, BufferRef | np.ndarray],
        _deadline: Deadline,
        *,
        again: bool,
        crashes: int,
    ) -> Callable[[int, float | None], Awaitable[dict[str, Any]]]:
        self._replication.require(self._model)

        async def work(member: int, left_s: float | None) -> dict[str, Any]:
            self._on(member)  # raises if the member's process has ended
            model = self._model.of(member)
            return await model.run_checked(given, Deadline(left_s), again=again, crashes=crashes)

        return work

    async def reserve(self, specs: Mapping[str, TensorSpec], deadline: Deadline) -> Callable[[], None]:
        """Warm the model on all members. Returns a function that ends this."""
        return await self._replication.reserve(self._model, specs, deadline)

    async def lend(self, specs: Mapping[str, TensorSpec]) -> dict[str, np.ndarray]:
        """Arrays for the inputs of a batch, in memory that every member reads without another copy."""
        made = await in_own_thread(shared_arrays, list(specs.values()))
        return dict(zip(specs, made, strict=True))


def _on_host(value: Any) -> Any:
    return as_values(value, "cpu", None)
