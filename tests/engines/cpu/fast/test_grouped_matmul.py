"""Products of groups of rows in the fast CPU engine."""

from __future__ import annotations

from typing import Any

from cudnn_actor.engines.cpu.fast.grouped_matmul import grouped_matmul, grouped_matmul_backward_weights
from cudnn_actor.protocol.operations import GroupedMatMul, GroupedMatMulBackwardWeights

from .kernel_cases import Make, check

MAKES: dict[Any, Make] = {
    GroupedMatMul: grouped_matmul,
    GroupedMatMulBackwardWeights: grouped_matmul_backward_weights,
}


def test_random_problems_are_right_within_their_bounds_on_any_number_of_lanes() -> None:
    check("grouped_matmul", MAKES, 100)
