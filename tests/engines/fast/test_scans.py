"""Places of the largest and smallest elements, and running sums, in the fast CPU engine."""

from __future__ import annotations

from typing import Any

from cudnn_actor.engines.cpu.fast.scans import arg_reduction, cumulative
from cudnn_actor.protocol.operations import ArgReduction, Cumulative

from .kernel_cases import Make, check

MAKES: dict[Any, Make] = {ArgReduction: arg_reduction, Cumulative: cumulative}


def test_random_problems_are_right_within_their_bounds_on_any_number_of_lanes() -> None:
    check("reduction", MAKES, 200)
