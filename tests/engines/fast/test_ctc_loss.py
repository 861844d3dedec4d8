"""CTC loss in the fast CPU engine."""

from __future__ import annotations

from typing import Any

import pytest

from cudnn_actor.engines.cpu import CpuEngine
from cudnn_actor.engines.cpu.fast import ctc_loss
from cudnn_actor.engines.cpu.fast.plan import FastPlan
from cudnn_actor.protocol import GraphBuilder
from cudnn_actor.protocol.operations import CTCLoss

from .kernel_cases import Make, check

MAKES: dict[Any, Make] = {CTCLoss: ctc_loss.ctc_loss}


def test_random_problems_are_right_within_their_bounds_on_any_number_of_lanes() -> None:
    check("ctc_loss", MAKES, 60)


def test_rows_may_be_kept_for_a_few_frames_and_blocks_have_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctc_loss, "_CELLS", 1)
    monkeypatch.setattr(ctc_loss, "MOST_SCRATCH", 1)
    check("ctc_loss", MAKES, 40)


def test_memory_for_many_samples_of_very_many_classes_is_bounded() -> None:
    g = GraphBuilder()
    scores, labels = g.input("scores", (2, 300, 1_000_000)), g.input("labels", (300, 2), "int32")
    lengths = [g.input(name, (300,), "int32") for name in ("frames", "counts")]
    graph = g.build(y=g.ctc_loss(scores, labels, *lengths))
    plan = CpuEngine().build(graph.body, workspace_limit=None)
    assert isinstance(plan, FastPlan)
    assert plan.lane_bytes < 20 << 20
