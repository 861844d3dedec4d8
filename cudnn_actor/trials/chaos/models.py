"""A model as part of the load: tasks run it beside everything else, and every result is compared.

The expected outputs are computed by ONNX's own reference evaluator, before the load begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from cudnn_actor.cli.user_error import UserError
from cudnn_actor.models import Feature, Model
from cudnn_actor.models.source import NeedsValues, Source
from cudnn_actor.protocol import CudnnActorError, OutOfMemory, QuarantinedRequest, ServiceStopped, TensorSpec
from cudnn_actor.service.client import CudnnRef
from cudnn_actor.trials.chaos.oracle import ModelRun, Wrong, text, was_refused
from cudnn_actor.trials.chaos.settings import LoadKind
from cudnn_actor.trials.chaos.tally import Tally

__all__ = ["ModelCase", "ModelLoad", "cases_of"]

_SIZES = (1, 2, 3)
"""The size of every dim that the model leaves open; one case for each."""
_TASKS = 2
_NUMBER = 5000
"""The number of the first task."""
_BOUNDS = {"float16": 3e-2, "bfloat16": 3e-2}
"""The allowed errors, as fractions of the largest value; for wider types 1e-3."""


class ModelCase(NamedTuple):
    """Inputs, and the outputs that are expected for them."""

    inputs: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray]


def cases_of(path: Path, source: Source, seed: int) -> list[ModelCase]:
    """Cases with drawn inputs: floats around 0, and integers of 0 and 1. Blocks while the reference runs.

    Raises `InvalidModel` or `UnsupportedModel` if the model cannot be run with these inputs, and `UserError`
    if the reference cannot.
    """
    from cudnn_actor.onnx.reference_evaluator import reference_outputs  # noqa: PLC0415 - needs an extra

    found = []
    for size in _SIZES:
        rng = np.random.default_rng([seed, size])
        given = {feature.name: _drawn(feature, size, rng) for feature in source.inputs}
        _check_support(source, given)
        try:
            expected = reference_outputs(path, given)
        except Exception as error:
            problem = "ONNX's reference fails, so there is nothing to compare"
            raise UserError(f"{path}: {problem}: {error}") from error
        found.append(ModelCase(given, expected))
    return found


def _check_support(source: Source, given: Mapping[str, np.ndarray]) -> None:
    """Raise `InvalidModel` or `UnsupportedModel` unless the model can be run with these inputs."""
    specs = {name: TensorSpec.packed(value.shape, value.dtype) for name, value in given.items()}
    values: dict[str, np.ndarray] = {}
    while True:
        try:
            source.specialised(specs, values)
        except NeedsValues as needs:
            values |= {name: given[name] for name in needs.names}
        else:
            return


def _drawn(feature: Feature, size: int, rng: np.random.Generator) -> np.ndarray:
    assert feature.dtype is not None, "the model has been read"
    dims = [dim if isinstance(dim, int) else size for dim in feature.dims or ()]
    if feature.dtype.is_floating:
        return np.asarray(rng.standard_normal(dims).astype(feature.dtype.numpy))
    return np.asarray(rng.integers(0, 2, dims).astype(feature.dtype.numpy))


class ModelLoad:
    """The tasks that run a model.

    Parameters
    ----------
    gpu
        The service.
    source
        The model, as it was read. It is loaded when the load begins.
    cases
        The cases, which are run in turn. A case whose plan is quarantined is not run again.
    excused
        The errors that injected faults cause.
    tally
        Where requests and wrong answers are noted.
    """

    def __init__(
        self,
        gpu: CudnnRef,
        source: Any,
        cases: Collection[ModelCase],
        excused: tuple[type[Exception], ...],
        tally: Tally,
    ) -> None:
        self._gpu, self._source, self._excused, self._tally = gpu, source, excused, tally
        self._cases = dict(enumerate(cases))

    async def warm(self) -> None:
        """Run each case once. Its plans are stored, and need not be built when a fault has ended a worker."""
        model = await self._loaded()
        for case in self._cases.values():
            with contextlib.suppress(CudnnActorError):  # a fault may end this run, too, as it may any other
                await self._gpu.run(model, case.inputs)
        await model.close()

    async def run(self, ending: Any) -> None:
        """Run the model until `ending` is set; then each case once more. Raises `ServiceStopped`."""
        model = await self._loaded()
        async with asyncio.TaskGroup() as tasks:
            for task in range(_TASKS):
                tasks.create_task(self._run(model, _NUMBER + task, ending))
        for number in tuple(self._cases):
            while number in self._cases and not await self._run_once(model, _NUMBER, 0, number):
                pass
        await model.close()

    async def _loaded(self) -> Model:
        while True:
            try:
                return await self._gpu.load(self._source)
            except self._excused:
                continue

    async def _run(self, model: Model, task: int, ending: Any) -> None:
        for burst in itertools.count(1):
            if ending.is_set() or not self._cases:
                return
            numbers = tuple(self._cases)
            await self._run_once(model, task, burst, numbers[(task + burst) % len(numbers)])

    async def _run_once(self, model: Model, task: int, burst: int, number: int) -> bool:
        """Run a case, and judge its outputs unless an injected fault ended it. Returns whether none did."""
        case = self._cases[number]
        generation = self._gpu.generation
        running = asyncio.ensure_future(model.run(case.inputs))
        deed = ModelRun(number)
        self._tally.sent(running, deed, LoadKind.MODELS, task, burst)
        await asyncio.wait([running])
        outcome: object = running.exception() if not running.cancelled() else asyncio.CancelledError()
        outcome = running.result() if outcome is None else outcome
        self._tally.ended(running, outcome, generation)
        if isinstance(outcome, ServiceStopped | asyncio.CancelledError):
            raise outcome
        if isinstance(outcome, QuarantinedRequest):
            self._cases.pop(number, None)
        elif not self._is_excused(outcome):
            self._tally.judged(task, burst, _wrongs(str(deed), case.outputs, outcome))
        return not self._is_excused(outcome)

    def _is_excused(self, outcome: object) -> bool:
        """Whether an injected fault may have caused this outcome.

        A crash tears nothing that a run reads. So if a second run was refused, memory was short.
        """
        if was_refused(outcome):
            return OutOfMemory in self._excused
        return isinstance(outcome, self._excused)


def _wrongs(request: str, expected: Mapping[str, np.ndarray], got: object) -> list[Wrong]:
    if not isinstance(got, Mapping):
        return [Wrong(request, "its outputs", text(got))]
    return [
        Wrong(f"{request}: {name}", text(values), text(got[name]))
        for name, values in expected.items()
        if not _close(np.asarray(got[name]), values)
    ]


def _close(got: np.ndarray, expected: np.ndarray) -> bool:
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    if not np.issubdtype(expected.dtype, np.floating) and expected.dtype.name not in _BOUNDS:
        return bool(np.array_equal(got, expected))
    values, wanted = got.astype(np.float64), expected.astype(np.float64)
    bound = _BOUNDS.get(expected.dtype.name, 1e-3) * np.abs(wanted).max(initial=0.0)
    return bool(np.all(np.abs(values - wanted) <= bound))
