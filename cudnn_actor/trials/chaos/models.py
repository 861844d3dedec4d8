"""A model as part of the load: tasks run it beside everything else, and every result is compared.

The expected outputs are computed by ONNX's own reference evaluator, before the load begins.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from cudnn_actor.cli.user_error import UserError
from cudnn_actor.models import Feature, Model
from cudnn_actor.models.source import NeedsValues, Source, Specialised
from cudnn_actor.protocol import CudnnActorError, OutOfMemory, QuarantinedRequest, ServiceStopped, TensorSpec
from cudnn_actor.service.client import CudnnRef
from cudnn_actor.trials.chaos.load_kinds import LoadKind
from cudnn_actor.trials.chaos.oracle import ModelRun, Wrong, text, was_refused
from cudnn_actor.trials.chaos.tally import Tally

__all__ = [
    "SIZES",
    "Judge",
    "LeftOut",
    "LoadOfModel",
    "ModelCase",
    "ModelLoad",
    "case_of",
    "cases_of",
    "close",
    "draw_inputs",
    "run_each",
    "specialise",
    "take_turns",
    "wrongs",
]

SIZES = (1, 2, 3)
"""The size of every dim that the model leaves open; one case for each."""
_TASKS = 2
_NUMBER = 5000
"""The number of the first task."""
_AFTER_QUARANTINE_S = 0.02
_BOUNDS = {"float16": 3e-2, "bfloat16": 3e-2}
"""The allowed errors, as fractions of the largest value; for wider types 1e-3."""


class LeftOut(Exception):
    """Raised when the model does not allow a kind of load. Its text says why."""


class LoadOfModel(Protocol):
    """Tasks that use a model."""

    kind: LoadKind

    async def warm(self) -> None:
        """Run what will be run, before the load begins. Raises `LeftOut`."""

    async def run(self, ending: Any) -> None:
        """Run until `ending` is set; then each case once more. Raises `ServiceStopped`."""


class ModelCase(NamedTuple):
    """Inputs, and the outputs that are expected for them."""

    inputs: dict[str, np.ndarray]
    outputs: dict[str, np.ndarray]


def cases_of(path: Path, source: Source, seed: int) -> list[ModelCase]:
    """Cases with drawn inputs: floats around 0, and integers of 0 and 1. Blocks while the reference runs.

    Raises `InvalidModel` or `UnsupportedModel` if the model cannot be run with these inputs, and `UserError`
    if the reference cannot.
    """
    return [case_of(path, source, draw_inputs(source, size, [seed, size])) for size in SIZES]


def case_of(
    path: Path, source: Source, given: dict[str, np.ndarray], tensors: Mapping[str, np.ndarray] | None = None
) -> ModelCase:
    """A case with these inputs, and with `tensors` in place of initialisers. Raises as `cases_of`."""
    from cudnn_actor.onnx.reference_evaluator import reference_outputs  # noqa: PLC0415 - needs an extra

    specialise(source, given)
    try:
        return ModelCase(given, reference_outputs(path, given, tensors or {}))
    except Exception as error:
        problem = "ONNX's reference fails, so there is nothing to compare"
        raise UserError(f"{path}: {problem}: {error}") from error


def specialise(source: Source, given: Mapping[str, np.ndarray]) -> Specialised:
    """The model for these inputs. Raises `InvalidModel` or `UnsupportedModel` if it cannot be run."""
    specs = {name: TensorSpec.packed(value.shape, value.dtype) for name, value in given.items()}
    values: dict[str, np.ndarray] = {}
    while True:
        try:
            return source.specialise(specs, values)
        except NeedsValues as needs:
            values |= {name: given[name] for name in needs.names}


def draw_inputs(
    source: Source, size: int, seed: Sequence[int], sizes: Mapping[str, int] | None = None
) -> dict[str, np.ndarray]:
    """Inputs whose open dims have this size, but those in `sizes`."""
    rng = np.random.default_rng(seed)
    return {each.name: _draw_input(each, size, sizes or {}, rng) for each in source.inputs}


def _draw_input(
    feature: Feature, size: int, sizes: Mapping[str, int], rng: np.random.Generator
) -> np.ndarray:
    assert feature.dtype is not None, "the model has been read"
    dims = [dim if isinstance(dim, int) else sizes.get(dim or "", size) for dim in feature.dims or ()]
    if feature.dtype.is_floating:
        return np.asarray(rng.standard_normal(dims).astype(feature.dtype.numpy))
    return np.asarray(rng.integers(0, 2, dims).astype(feature.dtype.numpy))


RunOnce = Callable[[int, int, int], Awaitable[bool]]
"""Runs a case once. Its arguments are the numbers of the task, of the burst and of the case. It returns False
if an injected fault ended the run."""


async def take_turns(run_once: RunOnce, cases: Collection[int], task: int, ending: Any) -> None:
    """Run one case after the other until `ending` is set, or until there are none.

    `cases`: their numbers, which may become fewer meanwhile.
    """
    for burst in itertools.count(1):
        numbers = tuple(cases)
        if ending.is_set() or not numbers:
            return
        await run_once(task, burst, numbers[(task + burst) % len(numbers)])


async def run_each(run_once: RunOnce, cases: Collection[int], task: int) -> None:
    """Run each case once more, again after each injected fault. `cases`: see `take_turns`."""
    for number in tuple(cases):
        while number in cases and not await run_once(task, 0, number):
            pass


class Judge:
    """Sends requests of a kind of load, notes them, and judges their outcomes.

    Parameters
    ----------
    gpu
        The service.
    kind
        The kind of load.
    excused
        The errors that injected faults cause.
    tally
        Where requests and wrong answers are noted.
    """

    def __init__(
        self, gpu: CudnnRef, kind: LoadKind, excused: tuple[type[Exception], ...], tally: Tally
    ) -> None:
        self._gpu, self._kind, self.excused, self._tally = gpu, kind, excused, tally

    async def load(self, source: Any) -> Model:
        """Load a model, again after each injected fault."""
        while True:
            try:
                return await self._gpu.load(source)
            except self.excused:
                continue

    async def outcome_of(
        self, sending: Callable[[], Awaitable[Any]], deed: ModelRun, task: int, burst: int
    ) -> object:
        """Send a request, and note it. Returns the answer or the error; raises `ServiceStopped`."""
        generation = self._gpu.generation
        running = asyncio.ensure_future(sending())
        self._tally.note_sent(running, deed, self._kind, task, burst)
        await asyncio.wait([running])
        outcome: object = running.exception() if not running.cancelled() else asyncio.CancelledError()
        outcome = running.result() if outcome is None else outcome
        self._tally.note_outcome(running, outcome, generation)
        if isinstance(outcome, ServiceStopped | asyncio.CancelledError):
            raise outcome
        return outcome

    def note(self, wrongs: list[Wrong], task: int, burst: int) -> None:
        """Note wrong answers."""
        self._tally.note_wrongs(task, burst, wrongs)

    async def judge(
        self, outcome: object, wrongs: Callable[[object], list[Wrong]], task: int, burst: int
    ) -> bool:
        """Note what `wrongs` finds in an outcome, unless an injected fault ended the request.

        After a quarantined request, wait for a moment: the next one with the same values is another request.
        Returns False if an injected fault ended it.
        """
        if isinstance(outcome, QuarantinedRequest):
            await asyncio.sleep(_AFTER_QUARANTINE_S)
        elif self.is_excused(outcome):
            return False
        else:
            self.note(wrongs(outcome), task, burst)
        return True

    def is_excused(self, outcome: object) -> bool:
        """Whether an injected fault may have caused this outcome.

        A crash tears nothing that a run reads. So if a second run was refused, memory was short.
        """
        if was_refused(outcome):
            return OutOfMemory in self.excused
        return isinstance(outcome, self.excused)


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

    kind = LoadKind.MODELS

    def __init__(
        self,
        gpu: CudnnRef,
        source: Any,
        cases: Collection[ModelCase],
        excused: tuple[type[Exception], ...],
        tally: Tally,
    ) -> None:
        self._gpu, self._source = gpu, source
        self._judge = Judge(gpu, self.kind, excused, tally)
        self._cases = dict(enumerate(cases))

    async def warm(self) -> None:
        """Run each case once. Its plans are stored, and need not be built when a fault has ended a worker."""
        model = await self._judge.load(self._source)
        for case in self._cases.values():
            with contextlib.suppress(CudnnActorError):  # a fault may end this run, too, as it may any other
                await self._gpu.run(model, case.inputs)
        await model.close()

    async def run(self, ending: Any) -> None:
        """Run the model until `ending` is set; then each case once more. Raises `ServiceStopped`."""
        model = await self._judge.load(self._source)
        run_once = partial(self._run_once, model)
        async with asyncio.TaskGroup() as tasks:
            for task in range(_TASKS):
                tasks.create_task(take_turns(run_once, self._cases, _NUMBER + task, ending))
        await run_each(run_once, self._cases, _NUMBER)
        await model.close()

    async def _run_once(self, model: Model, task: int, burst: int, number: int) -> bool:
        """Run a case, and judge its outputs unless an injected fault ended it. Returns whether none did."""
        case, deed = self._cases[number], ModelRun(number)
        outcome = await self._judge.outcome_of(lambda: model.run(case.inputs), deed, task, burst)
        if isinstance(outcome, QuarantinedRequest):
            self._cases.pop(number, None)
        elif not self._judge.is_excused(outcome):
            self._judge.note(wrongs(str(deed), case.outputs, outcome), task, burst)
        return not self._judge.is_excused(outcome)


def wrongs(request: str, expected: Mapping[str, np.ndarray], got: object) -> list[Wrong]:
    """The errors in the outputs of a run."""
    if not isinstance(got, Mapping):
        return [Wrong(request, "its outputs", text(got))]
    return [
        Wrong(f"{request}: {name}", text(values), text(got[name]))
        for name, values in expected.items()
        if not close(np.asarray(got[name]), values)
    ]


def close(got: np.ndarray, expected: np.ndarray) -> bool:
    """Whether an output is what the reference computed, but for rounding."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    if not np.issubdtype(expected.dtype, np.floating) and expected.dtype.name not in _BOUNDS:
        return bool(np.array_equal(got, expected))
    values, wanted = got.astype(np.float64), expected.astype(np.float64)
    bound = _BOUNDS.get(expected.dtype.name, 1e-3) * np.abs(wanted).max(initial=0.0)
    return bool(np.all(np.abs(values - wanted) <= bound))
