"""A model in the load of `cudnn-actor chaos`: run beside everything else, killed, and compared."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from cudnn_actor.cli.user_error import UserError
from cudnn_actor.onnx import OnnxModel
from cudnn_actor.protocol import ExecutionFailed, OutcomeUnknown, OutOfMemory
from cudnn_actor.trials.chaos.models import ModelLoad, cases_of
from cudnn_actor.trials.chaos.settings import FaultKind
from cudnn_actor.trials.chaos.tally import Tally

from ..onnx.small_models import FLOAT, image_model, model_of, node
from .terminal import cudnn_actor, cudnn_actor_here


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "model.onnx"
    onnx.save(image_model(), path)
    return path


def test_a_model_is_served_through_kills(path: Path, tmp_path: Path) -> None:
    out = tmp_path / "chaos.json"
    words = [
        "--seconds",
        "4",
        "--kill-every",
        "0.3",
        "--standby",
        "1",
        "--tasks",
        "1",
        "--load",
        "tasks,models",
    ]
    done = cudnn_actor("chaos", "--model", str(path), *words, "--out", str(out))
    assert out.exists(), done.stdout + done.stderr
    record = json.loads(out.read_text())
    counts = record["counts"]
    assert (counts["lost"], counts["wrong"], record["stuck"], record["stopped"]) == (0, 0, [], ""), (
        done.stdout
    )
    assert record["messages"]["ModelRun"] > 3
    assert counts["restarts"] > 0


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
    assert tally.lost() == []


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
    assert (len(tally.recoveries), tally.unrecovered) == (1, 1)


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
    done = cudnn_actor_here("chaos", "--model", str(path), "--seconds", "1", "--load", "models")
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
