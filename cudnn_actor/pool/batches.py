"""A model of a pool, as batches run it: each on one of the members."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cudnn_actor.actors import Deadline
from cudnn_actor.actors.long_work import in_own_thread
from cudnn_actor.attached.client.shared_segments import shared_arrays
from cudnn_actor.models import Feature
from cudnn_actor.models.inputs import checked_inputs
from cudnn_actor.pool.dispatching import Dispatching
from cudnn_actor.pool.pure_requests import kind_of_run
from cudnn_actor.pool.replicas import PoolModel
from cudnn_actor.pool.replication import Replication
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.tensor import TensorSpec
from cudnn_actor.service.arrays import as_values
from cudnn_actor.service.client import CudnnRef

__all__ = ["Everywhere"]

_LOSSES_TOGETHER = 2
"""A batch of several requests that was lost with so many members is divided: one request may be the cause."""


class Everywhere:
    """What a `BatchedModel` runs: see `models.batching.Batchable`.

    Parameters
    ----------
    model
        The model.
    replication
        Has it on all members.
    dispatching
        Sends each batch to a member.
    on
        Gives a member's handle.
    """

    def __init__(
        self,
        model: PoolModel,
        replication: Replication,
        dispatching: Dispatching,
        on: Callable[[int], CudnnRef],
    ) -> None:
        self._model, self._replication = model, replication
        self._dispatching, self._on = dispatching, on

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

    def validated(self, inputs: Mapping[str, Any]) -> dict[str, BufferRef | np.ndarray]:
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
        """Run it on one of the members. Raises `QuarantinedRequest` if it was lost too often."""
        self._replication.require(self._model)

        async def work(member: int, left_s: float | None) -> dict[str, Any]:
            self._on(member)  # raises if its process has ended
            model = self._model.of(member)
            return await model.run_checked(given, Deadline(left_s), again=again, crashes=crashes)

        max_losses = None if again else _LOSSES_TOGETHER
        return await self._dispatching.run(
            kind_of_run(self._model, given), work, deadline, max_losses=max_losses
        )

    async def reserve(self, specs: Mapping[str, TensorSpec], deadline: Deadline) -> Callable[[], None]:
        """Warm it on all members. Returns what ends that, once called."""
        return await self._replication.reserve(self._model, specs, deadline)

    async def lend(self, specs: Mapping[str, TensorSpec]) -> dict[str, np.ndarray]:
        """Arrays for the inputs of a batch, in memory that every member reads without another copy."""
        made = await in_own_thread(shared_arrays, list(specs.values()))
        return dict(zip(specs, made, strict=True))


def _on_host(value: Any) -> Any:
    return as_values(value, "cpu", None)
