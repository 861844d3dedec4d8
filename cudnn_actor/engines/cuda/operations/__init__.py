"""How CUDA runs each operation: one file for each family, which says so with `implement`."""

from __future__ import annotations

from cudnn_actor.engines.cuda.operations import (  # noqa: F401 - each says how its operations run
    attention,
    bit_cast,
    convolution,
    ctc_loss,
    fused_norms,
    grid_sampling,
    grouped_matmul,
    indexing,
    matmul,
    padding,
    pointwise,
    pooling,
    random,
    recurrent,
    recurrent_passes,
    recurrent_steps,
    reduction,
    resampling,
    response_norm,
    softmax,
    sorting,
)
from cudnn_actor.engines.cuda.operations.implementation import (
    IMPLEMENTATIONS,
    Implementation,
    Launcher,
    implement,
)
from cudnn_actor.protocol.operations import Concat, Reshape, Slice, Transpose

__all__ = ["IMPLEMENTATIONS", "PARTLY", "REFUSED", "Implementation", "Launcher"]

implement(Concat, Reshape, Slice, Transpose, exact=True)  # as copies, which planning adds

REFUSED = {kind: row.refused for kind, row in IMPLEMENTATIONS.items() if row.refused}
"""Operations that CUDA does not run, and why."""
PARTLY = {kind: row.partly for kind, row in IMPLEMENTATIONS.items() if row.partly}
"""Operations that CUDA runs by themselves only in part, and the part that it does not run."""
