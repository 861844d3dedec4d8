"""Batch, instance and group norm, their gradients, and sums over channels, in the fast CPU engine."""

from __future__ import annotations

from typing import Any

from cudnn_actor.engines.cpu.fast.channel_norm_gradients import channel_norm_backward, channel_sums
from cudnn_actor.engines.cpu.fast.channel_norms import batch_norm, channel_norm
from cudnn_actor.protocol.operations import (
    BatchNorm,
    BatchNormBackward,
    BatchNormTraining,
    GenStats,
    GroupNorm,
    GroupNormBackward,
    InstanceNorm,
    InstanceNormBackward,
)

from .kernel_cases import Make, check

MAKES: dict[Any, Make] = {
    BatchNorm: batch_norm,
    GenStats: channel_sums,
    **dict.fromkeys((BatchNormTraining, GroupNorm, InstanceNorm), channel_norm),
    **dict.fromkeys((BatchNormBackward, GroupNormBackward, InstanceNormBackward), channel_norm_backward),
}


def test_random_problems_are_right_within_their_bounds_on_any_number_of_lanes() -> None:
    check("channel_norms", MAKES, 120)
