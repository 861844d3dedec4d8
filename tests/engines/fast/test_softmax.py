"""Softmax, its logarithm and their gradients, in the fast CPU engine."""

from __future__ import annotations

from cudnn_actor.engines.cpu.fast.softmax import softmax, softmax_backward
from cudnn_actor.protocol.operations import Softmax, SoftmaxBackward

from .kernel_cases import check

MAKES = {Softmax: softmax, SoftmaxBackward: softmax_backward}


def test_random_problems_are_right_within_their_bounds_on_any_number_of_lanes() -> None:
    check("softmax", MAKES, 120)
