"""Layer norm and RMS norm and their gradients in the fast CPU engine."""

from __future__ import annotations

from cudnn_actor.engines.cpu.fast.row_norm_gradients import row_norm_backward
from cudnn_actor.engines.cpu.fast.row_norms import layer_norm, rms_norm
from cudnn_actor.protocol.operations import LayerNorm, LayerNormBackward, RMSNorm, RMSNormBackward

from .kernel_cases import check

MAKES = {LayerNorm: layer_norm, RMSNorm: rms_norm} | dict.fromkeys(
    (LayerNormBackward, RMSNormBackward), row_norm_backward
)


def test_random_problems_are_right_within_their_bounds_on_any_number_of_lanes() -> None:
    check("normalization", MAKES, 150)
