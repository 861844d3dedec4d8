"""Recurrent networks on CUDA: refused, until cuDNN's functions for them have been run here and checked."""

from __future__ import annotations

from cudnn_actor.engines.cuda.operations.implementation import implement
from cudnn_actor.protocol.operations import Recurrent, RecurrentBackwardData, RecurrentBackwardWeights

__all__: list[str] = []

implement(
    Recurrent,
    RecurrentBackwardData,
    RecurrentBackwardWeights,
    refused="recurrent layers run on the CPU engine alone as yet; write the steps as products and functions",
)
