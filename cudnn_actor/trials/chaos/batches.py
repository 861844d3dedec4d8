"""Batched requests as part of the load: many tasks send a few samples each, which run together."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

from cudnn_actor.models import BatchedModel, Model
from cudnn_actor.models.source import Source
from cudnn_actor.protocol import CudnnActorError, InvalidRequest, QuarantinedRequest
from cudnn_actor.service.client import CudnnRef
from cudnn_actor.trials.chaos.load_kinds import LoadKind
from cudnn_actor.trials.chaos.models import (
    Judge,
    LeftOut,
    ModelCase,
    case_of,
    draw_inputs,
    run_each,
    take_turns,
    wrongs,
)
from cudnn_actor.trials.chaos.oracle import BatchedRun
from cudnn_actor.trials.chaos.tally import Tally

__all__ = ["BatchedLoad"]

_TASKS, _MAX_BATCH = 16, 8
_SAMPLES = (1, 1, 1, 2, 2, 3)
"""Samples of each case."""
_OTHERS = 2
"""The size of the open dims along which no samples lie."""
_NUMBER = 6000
"""The number of the first task."""


class BatchedLoad:
    """The tasks that send samples to `gpu.batched`.

    A request that was running at two crashes is quarantined, and the task goes on: the next one with the same
    values is another request.

    Parameters
    ----------
    gpu, source, excused, tally
        As of `ModelLoad`.
    path, seed
        The file, and what determines the samples.
    """

    kind = LoadKind.BATCHED

    def __init__(
        self,
        gpu: CudnnRef,
        path: Path,
        source: Source,
        excused: tuple[type[Exception], ...],
        tally: Tally,
        *,
        seed: int,
    ) -> None:
        self._gpu, self._path, self._source, self._seed = gpu, path, source, seed
        self._judge = Judge(gpu, self.kind, excused, tally)
        self._cases: list[ModelCase] = []

    async def warm(self) -> None:
        """Compute the cases, and warm all sizes of batches. Raises `LeftOut`."""
        model = await self._judge.load(self._source)
        try:
            endpoint = await self._enter(model)
        except InvalidRequest as error:
            raise LeftOut(str(error)) from error
        finally:
            await model.close()
        await endpoint.aclose()
        self._cases = await asyncio.to_thread(self._drawn_cases)

    def _drawn_cases(self) -> list[ModelCase]:
        cases = []
        for number, samples in enumerate(_SAMPLES):
            sizes = {dim: samples for dim in self._dims if dim == self._batch_dim}
            given = draw_inputs(self._source, _OTHERS, [self._seed, _NUMBER, number], sizes)
            cases.append(case_of(self._path, self._source, given))
        return cases

    @property
    def _dims(self) -> dict[str, int]:
        """The named dims of the inputs, and the size of each but the first."""
        named = [dim for each in self._source.inputs for dim in each.dims or () if isinstance(dim, str)]
        return dict.fromkeys(named, _OTHERS)

    @property
    def _batch_dim(self) -> str:
        return next(iter(self._dims), "")

    async def _enter(self, model: Model) -> BatchedModel:
        """Warm a batched model, again after each injected fault. Raises `InvalidRequest`."""
        dims = {dim: size for dim, size in self._dims.items() if dim != self._batch_dim}
        while True:
            endpoint = self._gpu.batched(model, max_batch=_MAX_BATCH, dims=dims)
            try:
                return await endpoint.__aenter__()
            except CudnnActorError as error:
                if not isinstance(error, (QuarantinedRequest, *self._judge.excused)):
                    raise

    async def run(self, ending: Any) -> None:
        """Send samples until `ending` is set; then each case once more. Raises `ServiceStopped`."""
        model = await self._judge.load(self._source)
        endpoint = await self._enter(model)
        run_once, cases = partial(self._run_once, endpoint), range(len(self._cases))
        async with asyncio.TaskGroup() as tasks:
            for task in range(_TASKS):
                tasks.create_task(take_turns(run_once, cases, _NUMBER + task, ending))
        await run_each(run_once, cases, _NUMBER)
        await endpoint.aclose()
        await model.close()

    async def _run_once(self, endpoint: BatchedModel, task: int, burst: int, number: int) -> bool:
        """Send a case, and judge its answer. Returns False if an injected fault ended it."""
        case, deed = self._cases[number], BatchedRun(number)
        outcome = await self._judge.outcome_of(lambda: endpoint(case.inputs), deed, task, burst)
        compare = partial(wrongs, str(deed), case.outputs)
        return await self._judge.judge(outcome, compare, task, burst)
