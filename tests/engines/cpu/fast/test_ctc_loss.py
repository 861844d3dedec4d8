"""CTC loss in the fast CPU engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cudnn_actor.engines.cpu import CpuEngine
from cudnn_actor.engines.cpu.fast import ctc_loss
from cudnn_actor.engines.cpu.fast.plan import FastPlan
from cudnn_actor.engines.cpu.scratch import Scratch, aligned_bytes
from cudnn_actor.protocol import GraphBuilder, TensorSpec
from cudnn_actor.protocol.operations import CTCLoss

from .kernel_cases import Make, check
from .kernel_runs import array_of, peak_of_second, run_kernel

MAKES: dict[Any, Make] = {CTCLoss: ctc_loss.ctc_loss}


def test_random_problems_are_right_within_their_bounds_on_any_number_of_lanes() -> None:
    check("ctc_loss", MAKES, 60)


def test_rows_may_be_kept_for_a_few_frames_and_blocks_have_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctc_loss, "_CELLS", 1)
    monkeypatch.setattr(ctc_loss, "MOST_SCRATCH", 1)
    check("ctc_loss", MAKES, 40)


@pytest.mark.parametrize(("frames", "labels"), [(5, 0), (0, 0), (0, 3)])
@pytest.mark.parametrize("zero_infinity", [False, True])
def test_losses_without_labels_or_frames_are_numbers(frames: int, labels: int, zero_infinity: bool) -> None:
    rng = np.random.default_rng(38)
    given = {
        "log_probs": np.log(rng.dirichlet(np.ones(4), (frames, 3))).reshape(frames, 3, 4),
        "targets": np.ones((3, labels), np.int64),
        "input_lengths": np.array([frames, 2, 0]),
        "target_lengths": np.array([labels, 0, 0]),
    }
    names: Any = {name: name for name in (*given, "losses", "dlog_probs")}
    operation: Any = CTCLoss(**names, zero_infinity=zero_infinity)
    specs = {
        name: TensorSpec.packed(values.shape, "float32" if values.dtype.kind == "f" else "int64")
        for name, values in given.items()
    }
    specs |= operation.infer(specs)
    found = run_kernel(ctc_loss.ctc_loss, operation, specs, given, 2)
    for name, wanted in operation.evaluate(np, given, specs).items():
        np.testing.assert_allclose(found[name], wanted, rtol=1e-5, atol=1e-7)


def test_a_graph_of_losses_without_labels_runs_in_blocks() -> None:
    g = GraphBuilder()
    scores, labels = g.input("scores", (4, 3, 5)), g.input("labels", (3, 0), "int32")
    lengths = [g.input(name, (3,), "int32") for name in ("frames", "counts")]
    graph = g.build(y=g.ctc_loss(scores, labels, *lengths))
    plan = CpuEngine().build(graph.body, workspace_limit=None)
    assert isinstance(plan, FastPlan)
    assert all("block by block" in piece.step for piece in plan.pieces)


@pytest.mark.usefixtures("small_buffers")
@pytest.mark.parametrize("wanted", [("losses",), ("losses", "dlog_probs")], ids=len)
@pytest.mark.parametrize(("samples", "labels"), [(1, 4000), (40, 100), (2600, 0)])
def test_a_run_with_many_states_allocates_no_arrays(
    samples: int, labels: int, wanted: tuple[str, ...]
) -> None:
    rng, frames = np.random.default_rng(39), 3
    given: dict[str, Any] = {
        "log_probs": rng.standard_normal((frames, samples, 4)).astype(np.float32),
        "targets": rng.integers(0, 4, (samples, labels)),
        "input_lengths": rng.integers(0, frames + 1, samples),
        "target_lengths": rng.integers(0, labels + 1, samples),
    }
    names: Any = {name: name for name in (*given, *wanted)}
    operation: Any = CTCLoss(**names, zero_infinity=True)
    specs = {name: TensorSpec.packed(values.shape, values.dtype.name) for name, values in given.items()}
    specs |= {name: spec for name, spec in operation.infer(specs).items() if name in wanted}
    kernel = ctc_loss.ctc_loss(operation, specs)
    assert kernel is not None
    scratch = Scratch(aligned_bytes(kernel.footprint(1)))
    steps = kernel.bind(given, {name: array_of(specs[name]) for name in wanted}, [scratch])

    def run() -> None:
        with np.errstate(all="ignore"):
            for step in steps:
                for call in step:
                    call()

    assert peak_of_second(run) < 8000


def test_memory_for_many_samples_of_very_many_classes_is_bounded() -> None:
    g = GraphBuilder()
    scores, labels = g.input("scores", (2, 300, 1_000_000)), g.input("labels", (300, 2), "int32")
    lengths = [g.input(name, (300,), "int32") for name in ("frames", "counts")]
    graph = g.build(y=g.ctc_loss(scores, labels, *lengths))
    plan = CpuEngine().build(graph.body, workspace_limit=None)
    assert isinstance(plan, FastPlan)
    assert plan.lane_bytes < 20 << 20
