"""CTC loss in the fast CPU engine."""

from __future__ import annotations

from typing import Any

import pytest

from cudnn_actor.engines.cpu.fast import ctc_loss
from cudnn_actor.protocol.operations import CTCLoss

from .kernel_cases import Make, check

MAKES: dict[Any, Make] = {CTCLoss: ctc_loss.ctc_loss}


def test_random_problems_are_right_within_their_bounds_on_any_number_of_lanes() -> None:
    check("ctc_loss", MAKES, 60)


def test_rows_may_be_kept_for_a_few_frames_and_blocks_have_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctc_loss, "_CELLS", 1)
    monkeypatch.setattr(ctc_loss, "MOST_SCRATCH", 1)
    check("ctc_loss", MAKES, 40)
