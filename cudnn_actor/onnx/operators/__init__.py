"""How each operator is added to a graph: one file for each family, all in one table.

A file's handlers are in the table once the file is imported, so each file with handlers is imported below.
The other files of this folder have functions that several handlers use.
"""

from __future__ import annotations

from cudnn_actor.onnx.operator_table import HANDLERS, NO_WAY, RANDOM, UNSEEDED, Handler, handler_of, unknown
from cudnn_actor.onnx.operators import (  # noqa: F401 - importing them fills the table
    attention,
    casts,
    convolution,
    determinants,
    einsum,
    extents,
    generators,
    indexing,
    matmul,
    movement,
    norms,
    pointwise,
    pooling,
    quantised,
    random,
    recurrent,
    reduction,
    regions,
    resize,
    runtime,
    runtime_quantised,
    spectra,
    training,
)

__all__ = ["HANDLERS", "NO_WAY", "RANDOM", "UNSEEDED", "Handler", "handler_of", "unknown"]
