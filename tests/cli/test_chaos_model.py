"""A model in the load of `cudnn-actor chaos`: run beside everything else, killed, and compared."""

from __future__ import annotations

import asyncio
import json
import threading
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from cudnn_actor.cli.user_error import UserError
from cudnn_actor.onnx import OnnxModel
from cudnn_actor.protocol import ExecutionFailed, OutcomeUnknown, OutOfMemory
from cudnn_actor.trials.chaos.faults import FaultKind
from cudnn_actor.trials.chaos.models import ModelLoad, case_of, cases_of
from cudnn_actor.trials.chaos.swaps import SwapLoad, Versions
from cudnn_actor.trials.chaos.tally import Tally

from ..onnx.small_models import FLOAT, image_model, model_of, node
from .chaos_until import chaos_until
from .terminal import cudnn_actor, cudnn_actor_here


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    onnx.save(image_model(), path)
    return path


@pytest.mark.parametrize("standby", [0, 1])
def test_a_model_is_served_batched_and_swapped_through_kills(
    path: Path, tmp_path: Path, standby: int
) -> None:
    words = ["--kill-every", "0.4", "--standby", str(standby), "--seed", str(standby)]
    words += ["--tasks", "1", "--problems", "8", "--load", "tasks,models,batched,swaps"]
    wanted = Counter({"ModelRun": 4, "BatchedRun": 4, "WeightWrite": 2, "restarts": 1})
    done, record = chaos_until(wanted, tmp_path / "chaos.json", "--model", str(path), *words)
    counts = record["counts"]
    assert (counts["lost"], counts["wrong"], record["stuck"], record["stopped"]) == (0, 0, [], ""), (
        done.stdout
    )
    assert Counter(record["messages"]) + Counter(restarts=counts["restarts"]) >= wanted


@pytest.mark.parametrize(
    ("kind", "batch", "why"),
    [
        ("batched", 2, "has no leading dim with a name"),
        ("swaps", "N", "no weights of floating-point numbers"),
    ],
)
def test_what_a_model_does_not_allow_is_left_out_unless_it_is_asked_for(
    kind: str, batch: int | str, why: str, tmp_path: Path
) -> None:
    path, out = tmp_path / "plain.onnx", tmp_path / "chaos.json"
    port: Any = (FLOAT, [batch, 3])
    onnx.save(model_of([node("Relu", "x", "y")], {"x": port}, {"y": port}), path)
    words = ["chaos", "--model", str(path), "--isolation", "thread", "--seconds", "0.1"]
    words += ["--faults", "none", "--out", str(out)]
    asked = cudnn_actor_here(*words, "--load", kind)
    assert asked.returncode == 2
    assert why in asked.stderr
    assert f"leave {kind} out" in asked.stderr
    done = cudnn_actor(
        *words, "--problems", "1", "--without", "loops,threads,pykka,alarms,uploads,attached,doomed"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    left_out = json.loads(out.read_text())["left_out"]
    assert [kind in each and why in each for each in left_out].count(True) == 1


def test_an_answer_may_be_of_each_version_that_was_there_meanwhile() -> None:
    versions = Versions()
    first = versions.now
    assert versions.since(first) == {0}
    versions.begin(1)
    second = versions.now
    assert versions.since(first) == versions.since(second) == {0, 1}
    versions.end(1)
    third = versions.now
    assert versions.since(second) == {0, 1}
    assert versions.since(third) == {1}
    versions.begin(2)
    versions.end(1)  # it failed
    assert versions.since(third) == {1, 2}
    assert versions.since(versions.now) == {1}


class Mixing:
    """A service whose model answers with a version of its weights, or with a mixture."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer
        self.generation = 1

    async def load(self, source: object) -> Mixing:
        return self

    async def run(self, inputs: Mapping[str, np.ndarray]) -> Any:
        return await asyncio.to_thread(self._answer, inputs)

    async def close(self) -> None:
        pass


@pytest.mark.parametrize(("shown", "wrong"), [("old", False), ("new", True), ("mixed", True)])
def test_an_answer_of_both_versions_is_wrong(path: Path, shown: str, wrong: bool) -> None:
    source = OnnxModel(path, swappable=True)

    def answer(inputs: Mapping[str, np.ndarray]) -> Any:
        weights = dict(source.tensors)
        given = load.weights[1]
        names = {"old": [], "new": list(given), "mixed": list(given)[:1]}[shown]
        return case_of(path, source, dict(inputs), weights | {name: given[name] for name in names}).outputs

    tally, ending = Tally(), threading.Event()
    gpu: Any = Mixing(answer)
    load = SwapLoad(gpu, path, source, (), tally, seed=0)
    asyncio.run(load.warm())
    ending.set()
    asyncio.run(load.run(ending))
    assert (tally.wrong > 0) == wrong


class Answering:
    """A service and its model in one: each run takes the next outcome, then gives what is right."""

    def __init__(self, right: Any, *outcomes: Any) -> None:
        self._right, self._outcomes = right, list(outcomes)
        self.generation = 2
        self.closed = False

    async def load(self, source: object) -> Answering:
        return self

    async def run(self, inputs: Mapping[str, np.ndarray]) -> Any:
        outcome = self._outcomes.pop(0) if self._outcomes else self._right(inputs)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def close(self) -> None:
        self.closed = True


FAILED = ExecutionFailed(status="INJECTED", detail="it was asked for", plan="none")


@pytest.mark.parametrize(
    ("change", "wrong"),
    [
        (lambda outputs: outputs, False),
        (lambda outputs: FAILED, False),
        (lambda outputs: {name: value * np.float32(1.01) for name, value in outputs.items()}, True),
        (lambda outputs: {name: value[:, :1] for name, value in outputs.items()}, True),
        (lambda outputs: {name: value * np.float32("nan") for name, value in outputs.items()}, True),
        (lambda outputs: OutOfMemory(requested=1, in_use=0, limit=0), True),
    ],
    ids=["right", "an injected error", "off", "other dims", "NaN", "an error that was not injected"],
)
def test_each_result_is_judged(path: Path, change: Any, wrong: bool) -> None:
    source = OnnxModel(path)
    cases = cases_of(path, source, 0)[:1]
    (case,) = cases
    gpu: Any = Answering(lambda inputs: case.outputs, change(case.outputs))
    tally, ending = Tally(), threading.Event()
    ending.set()
    load = ModelLoad(gpu, source, cases, (ExecutionFailed,), tally)
    if isinstance(change(case.outputs), OutOfMemory):  # it is wrong once, however often it would come
        gpu._outcomes += [change(case.outputs)] * 100
    asyncio.run(load.run(ending))
    assert (0 < tally.wrong < 3) == wrong  # at most once for each output
    assert gpu.closed
    assert tally.lost_requests() == []


@pytest.mark.parametrize("injected", [True, False])
def test_a_second_run_may_be_short_of_memory_only_if_that_is_injected(path: Path, injected: bool) -> None:
    source = OnnxModel(path)
    (case,) = cases_of(path, source, 0)[:1]
    why = "its second run was refused: out of memory: 0 bytes requested, 0 bytes in use"
    refused = OutcomeUnknown(request_id=1, cause="a worker that has died", why=why)
    gpu: Any = Answering(lambda inputs: case.outputs, refused)
    tally, ending = Tally(), threading.Event()
    ending.set()
    excused = (ExecutionFailed, OutOfMemory) if injected else (ExecutionFailed,)
    asyncio.run(ModelLoad(gpu, source, [case], excused, tally).run(ending))
    assert tally.wrong == (0 if injected else 1)


def test_a_run_that_a_later_worker_was_sent_ends_a_fault(path: Path) -> None:
    source = OnnxModel(path)
    (case,) = cases_of(path, source, 0)[:1]
    gpu: Any = Answering(lambda inputs: case.outputs)
    tally, ending = Tally(), threading.Event()
    ending.set()
    tally.note_fault(FaultKind.KILL, generation=1)
    tally.note_fault(FaultKind.KILL, generation=2)
    asyncio.run(ModelLoad(gpu, source, [case], (), tally).run(ending))
    assert (len(tally.recoveries), tally.unrecovered_faults) == (1, 1)


def test_models_need_a_file() -> None:
    done = cudnn_actor_here("chaos", "--load", "models", "--seconds", "1")
    assert done.returncode == 2
    assert "there is no model; give one with --model FILE" in done.stderr


@pytest.mark.parametrize(
    ("operator", "problem"),
    [
        (None, "is no file"),
        ("RandomUniformLike", "node 'n' (RandomUniformLike): draws random numbers from no seed"),
        ("Bernoulli", "node 'n' (Bernoulli): draws random numbers from no seed"),
    ],
)
def test_a_model_that_cannot_be_run_is_one_line(operator: str | None, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "model.onnx"
    if operator is not None:
        port: Any = (FLOAT, ["N", 3])
        onnx.save(model_of([node(operator, "x", "y", name="n")], {"x": port}, {"y": port}), path)
    words = ["--model", str(path), "--isolation", "thread", "--seconds", "1", "--load", "models"]
    done = cudnn_actor_here("chaos", *words)
    assert done.returncode == 2
    assert problem in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_model_that_the_reference_cannot_run_is_a_user_error(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("it cannot")

    monkeypatch.setattr("cudnn_actor.onnx.reference_evaluator.reference_outputs", fail)
    with pytest.raises(UserError, match="ONNX's reference fails, so there is nothing to compare: it cannot"):
        cases_of(path, OnnxModel(path), 0)
