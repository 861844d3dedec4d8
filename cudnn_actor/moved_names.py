"""The names that were at the top of `cudnn_actor` and are imported from elsewhere since 0.1.0.

The old import works, and raises a `DeprecationWarning` that names the new one. docs/stability.md says for how
long.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import Any

__all__ = ["HOMES", "find_moved"]

_NAMES = {
    "cudnn_actor.attached": """
        ServedSocket serve_socket
    """,
    "cudnn_actor.errors": """
        ContextLost InvalidModel MalformedMessage ModelNotFound NoEventLoop NoValues NotDeployed
        OutOfDescriptors ReentrantAsk StaleReason UnsupportedModel
    """,
    "cudnn_actor.messages": """
        Allocate CacheStatistics ClearPlans Compute Copy DeployModel DeviceSpeed Download Drain Draws
        Explain Fill Free GetStatistics LendStaging Message ModelGraph ModelRef PieceOfPlan PieceTime Ping
        PlanCounts PlanStatistics RunModel UnloadModel Upload View Warm WarmModel WriteWeights
    """,
    "cudnn_actor.models": """
        BatchStatistics Feature
    """,
    "cudnn_actor.operations": """
        AdaptiveWindow ArgReduction Attention AttentionBackward AvgPool AvgPoolBackward BatchNorm
        BatchNormBackward BatchNormTraining BitCast BorderPad CTCLoss Concat Coordinates Cumulative Gather
        GatherElements GatherND GenStats GridPadding GridSample GroupNorm GroupNormBackward GroupedMatMul
        GroupedMatMulBackwardWeights InstanceNorm InstanceNormBackward LayerNorm LayerNormBackward
        LocalResponseNorm LocalResponseNormBackward LpPool LpPoolBackward MatMul MaxPool MaxPoolBackward
        NearestRounding Operation Pad PadMode Pointwise PointwiseMode RMSNorm RMSNormBackward
        RandomBernoulli RandomIntegers RandomNormal RandomUniform Recurrent RecurrentBackwardData
        RecurrentBackwardWeights RecurrentMode Reduction ReductionMode Resample ResampleBackward
        ResampleMode Reshape Scatter ScatterElements ScatterND ScatterReduction Slice Softmax
        SoftmaxBackward TopK Transpose Window alibi_slopes
    """,
    "cudnn_actor.service": """
        GraphLimits HealthState Histogram RequestCounts Spawning StandbyState
    """,
    "cudnn_actor.supervision": """
        Escalated ExitKind ExitReason FaultRule Fired LifecycleEvent Restarted Restarting Started Stopped
    """,
}

HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}
"""Each name that has moved, with the package that has it now."""


def find_moved(name: str) -> Any:
    """`__getattr__` of `cudnn_actor`: what has moved, with a warning; `AttributeError` for any other name."""
    if name not in HOMES:
        raise AttributeError(f"module 'cudnn_actor' has no attribute {name!r}", name=name)
    # `from cudnn_actor import NAME` asks twice: the first time, importlib asks whether NAME is a module.
    if sys._getframe(1).f_globals.get("__name__") != "importlib._bootstrap":
        warnings.warn(
            f"`from cudnn_actor import {name}` is deprecated: write `from {HOMES[name]} import {name}`",
            DeprecationWarning,
            stacklevel=2,
        )
    return getattr(importlib.import_module(HOMES[name]), name)
