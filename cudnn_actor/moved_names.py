"""The names that the top of `cudnn_actor` imports only when they are used.

Most were there once and are imported from elsewhere since 0.1.0. The old import works, and raises a
`DeprecationWarning` that names the new one. docs/stability.md says for how long.

Others are names of the top that few processes need. Without their packages, an import of `cudnn_actor` takes
a seventh less.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import Any

__all__ = ["HOMES", "LATER", "find_name"]

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


LATER = {"connect": "cudnn_actor.attached"}
"""Each name of the top that is imported at its first use, with the package that has it. That package is
imported at its own first use, too: `cudnn_actor.attached` needs no import."""


def find_name(name: str) -> Any:
    """`__getattr__` of `cudnn_actor`: a name of `LATER`, its package, or, with a warning, what has moved.

    The first use of a name blocks for the import of its package. Any other name raises `AttributeError`.
    """
    if f"cudnn_actor.{name}" in LATER.values():
        return importlib.import_module(f"cudnn_actor.{name}")
    if name in LATER:
        found = getattr(importlib.import_module(LATER[name]), name)
        setattr(sys.modules["cudnn_actor"], name, found)  # so Python finds it without this function
        return found
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
