"""Swaps as part of the load: all weights of a model are overwritten every second while tasks run it.

Each answer must be of the old weights or of the new, never of both. So the reference computes each case for
each version of the weights, and an answer must be one of the versions that were there while its run was under
way: those of the last write that had ended, and of each that had begun since. A write that fails leaves the
version from before.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from cudnn_actor.models import Model
from cudnn_actor.models.source import SwappableSource
from cudnn_actor.protocol import CudnnActorError, QuarantinedRequest
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.service.client import CudnnRef
from cudnn_actor.trials.chaos.load_kinds import LoadKind
from cudnn_actor.trials.chaos.models import (
    SIZES,
    Judge,
    LeftOut,
    ModelCase,
    case_of,
    close,
    draw_inputs,
    run_each,
    specialise,
    take_turns,
)
from cudnn_actor.trials.chaos.oracle import ModelRun, WeightWrite, Wrong, text
from cudnn_actor.trials.chaos.tally import Tally

__all__ = ["SwapLoad", "Versions"]

_TASKS, _VERSIONS = 4, 3
_EVERY_S = 1.0
_LOOK_S = 0.05
_NUMBER = 7000
"""The number of the writing task; the others follow."""


class Versions:
    """The versions of the weights that a run may read, as writes begin and end."""

    def __init__(self) -> None:
        self._past: list[frozenset[int]] = [frozenset({0})]

    @property
    def now(self) -> int:
        """A mark of this moment, for `since`."""
        return len(self._past) - 1

    def since(self, mark: int) -> frozenset[int]:
        """The versions that a run may have read that was sent at a mark and is answered now."""
        return frozenset().union(*self._past[mark:])

    def begin(self, version: int) -> None:
        """A write begins."""
        self._past.append(self._past[-1] | {version})

    def end(self, version: int) -> None:
        """The write has ended: this version is there, the new one or, if it failed, the one before it."""
        self._past.append(frozenset({version}))


class SwapLoad:
    """The tasks that run a model, and one that overwrites all its weights again and again.

    Parameters
    ----------
    gpu, excused, tally
        See `ModelLoad`.
    path, source
        The file, and the model as it was read from it, to be swapped.
    seed
        Determines inputs and weights.
    """

    kind = LoadKind.SWAPS

    def __init__(
        self,
        gpu: CudnnRef,
        path: Path,
        source: SwappableSource,
        excused: tuple[type[Exception], ...],
        tally: Tally,
        *,
        seed: int,
    ) -> None:
        self._gpu, self._path, self._source, self._seed = gpu, path, source, seed
        self._judge = Judge(gpu, self.kind, excused, tally)
        self.weights: list[dict[str, np.ndarray]] = []
        """The weights of each version."""
        self._cases: list[list[ModelCase]] = []
        """The cases of each size, one for each version."""
        self._versions = Versions()

    async def warm(self) -> None:
        """Compute the weights and the cases, and run each once. Raises `LeftOut`."""
        await asyncio.to_thread(self._compute)
        model = await self._judge.load(self._source)
        for case, *_ in self._cases:
            with contextlib.suppress(CudnnActorError):  # a fault may end this run, too, as it may any other
                await model.run(case.inputs)
        await model.close()

    def _compute(self) -> None:
        given = [draw_inputs(self._source, size, [self._seed, _NUMBER, size]) for size in SIZES]
        decided = frozenset[str]().union(*(specialise(self._source, each).decided_by for each in given))
        self.weights = [
            _version(self._source.tensors, decided, self._seed, number) for number in range(_VERSIONS)
        ]
        if not self.weights[0]:
            raise LeftOut("the model has no weights of floating-point numbers that can be overwritten")
        for inputs in given:
            cases = [case_of(self._path, self._source, inputs, each) for each in self.weights]
            for one, other in itertools.combinations(cases, 2):
                if _same(one.outputs, other.outputs):
                    raise LeftOut("the model's outputs hardly depend on its weights")
            self._cases.append(cases)

    async def run(self, ending: Any) -> None:
        """Run and overwrite until `ending` is set; then each case once more. Raises `ServiceStopped`."""
        model = await self._judge.load(self._source)
        run_once, cases = partial(self._run_once, model), range(len(self._cases))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._write(model, ending))
            for task in range(_TASKS):
                tasks.create_task(take_turns(run_once, cases, _NUMBER + 1 + task, ending))
        await run_each(run_once, cases, _NUMBER)
        await model.close()

    async def _write(self, model: Model, ending: Any) -> None:
        version = 0
        for burst in itertools.count(1):
            began_s = asyncio.get_running_loop().time()
            while asyncio.get_running_loop().time() < began_s + _EVERY_S:
                if ending.is_set():
                    return
                await asyncio.sleep(_LOOK_S)
            new = (version + 1) % _VERSIONS
            weights, deed = self.weights[new], WeightWrite(new)
            self._versions.begin(new)
            outcome = await self._judge.outcome_of(lambda: model.write(weights), deed, _NUMBER, burst)  # noqa: B023
            if outcome is None:
                version = new
            elif not (isinstance(outcome, QuarantinedRequest) or self._judge.is_excused(outcome)):
                self._judge.note([Wrong(str(deed), "to be written", text(outcome))], _NUMBER, burst)
            self._versions.end(version)

    async def _run_once(self, model: Model, task: int, burst: int, number: int) -> bool:
        """Run a case, and judge its answer. Returns False if an injected fault ended it."""
        cases, deed, mark = self._cases[number], ModelRun(number), self._versions.now
        outcome = await self._judge.outcome_of(lambda: model.run(cases[0].inputs), deed, task, burst)
        compare = partial(_wrongs, str(deed), cases, self._versions.since(mark))
        return await self._judge.judge(outcome, compare, task, burst)


def _version(
    tensors: Mapping[str, np.ndarray], decided: frozenset[str], seed: int, number: int
) -> dict[str, np.ndarray]:
    """The weights of a version: those of the file for 0; else each element a little more or less."""
    rng = np.random.default_rng([seed, _NUMBER, number])
    found = {}
    for name, array in tensors.items():
        dtype = DType.of(array.dtype)
        if dtype is None or not dtype.is_floating or not array.size or name in decided:
            continue
        factor = rng.uniform(0.8, 1.25, array.shape) if number else 1.0
        found[name] = np.asarray(array.astype(np.float64) * factor).astype(array.dtype)
    return found


def _same(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> bool:
    return all(close(array, other[name]) for name, array in one.items())


def _wrongs(request: str, cases: Sequence[ModelCase], possible: frozenset[int], got: object) -> list[Wrong]:
    """The errors in an answer that may be of any of these versions."""
    wanted = " or ".join(f"version {number}" for number in sorted(possible))
    if not isinstance(got, Mapping):
        return [Wrong(request, f"outputs of {wanted}", text(got))]
    found = [number for number, case in enumerate(cases) if _same(case.outputs, got)]
    if not possible.isdisjoint(found):
        return []
    what = f"version {found[0]}" if found else "no version: a mixture"
    name = next(iter(cases[0].outputs))
    return [
        Wrong(request, f"outputs of {wanted}", f"outputs of {what}: {name} {text(np.asarray(got[name]))}")
    ]
