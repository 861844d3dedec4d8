"""Batch, instance and group norm in the fast CPU engine."""

from __future__ import annotations

from cudnn_actor.engines.cpu.fast.channel_norms import batch_norm, channel_norm
from cudnn_actor.protocol.operations import BatchNorm, BatchNormTraining, GroupNorm, InstanceNorm

from .kernel_cases import check

MAKES = {BatchNorm: batch_norm} | dict.fromkeys((BatchNormTraining, GroupNorm, InstanceNorm), channel_norm)


def test_random_problems_are_right_within_their_bounds_on_any_number_of_lanes() -> None:
    check("channel_norms", MAKES, 120)
