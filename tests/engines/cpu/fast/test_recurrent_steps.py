"""Steps of recurrent layers with cells of any kind, in the fast CPU engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cudnn_actor.engines.cpu.fast.cell_functions import apply_function
from cudnn_actor.engines.cpu.fast.recurrent_steps import recurrent_steps
from cudnn_actor.operations import CellActivation, CellFunction
from cudnn_actor.protocol.operations import RecurrentSteps

from ....in_one_test import cases_in_one_test
from .kernel_cases import Make, check

MAKES: dict[Any, Make] = {RecurrentSteps: recurrent_steps}


def test_random_problems_are_right_within_their_bounds_on_any_number_of_lanes() -> None:
    check("recurrent_steps", MAKES, 24)


def test_a_step_and_a_sequence_at_a_time_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each step is a turn, and each sequence a task of its own."""
    for name in ("_MOST_BYTES", "_LEAST_WORK", "_LEAST_ROWS"):
        monkeypatch.setattr(f"cudnn_actor.engines.cpu.fast.recurrent_walks.{name}", 1)
    check("recurrent_steps", MAKES, 16)


@cases_in_one_test
@pytest.mark.parametrize("function", CellFunction)
def test_a_function_is_that_of_the_definition(function: CellFunction) -> None:
    """Also of values at which its formula changes, of infinity and of NaN."""
    activation = CellActivation(function=function, alpha=0.5, beta=0.25)
    x = np.array([-np.inf, -800, -2.5, -0.5, -0.0, 0.0, 0.5, 0.75, 3, 800, np.inf, np.nan])
    found, spare, mask = x.copy(), np.full(x.shape, np.nan), np.ones(x.shape, bool)
    with np.errstate(all="ignore"):
        apply_function(activation, found, spare, mask)
        np.testing.assert_allclose(found, activation(np, x), rtol=1e-14, atol=1e-16)
