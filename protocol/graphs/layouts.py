"""Chooses the layout of each value of a graph: packed in order (NCHW), or with channels last (NHWC).

An input has the layout that its caller names, and the result of `to_layout` the one that is asked for. All
other results have the layout that is chosen here, when they are added to the graph. Engines keep it. On CUDA,
`planning.layout_rules` may place a value in the memory of another one, and `planning.splitting` copies
operands to other layouts if cuDNN accepts no graph with these.
"""

from __future__ import annotations

from collections.abc import Mapping

from cudnn_actor.protocol.operations import Node, Transpose
from cudnn_actor.protocol.types.tensor import Layout, TensorSpec

__all__ = ["in_layout_of_operands"]


def in_layout_of_operands(node: Node, spec: TensorSpec, inputs: Mapping[str, TensorSpec]) -> TensorSpec:
    """The spec of an operation's result with its layout. `spec`: the inferred one. `inputs`: the operands'.

    Channels are last if they are in an operand of the result's rank, or if a transpose of images makes it so.
    A transpose of rank 3 does not: what follows is a product or a norm far more often than a convolution, and
    those are several times as slow if their last dim is not contiguous.
    """
    if not 3 <= spec.rank <= 5:
        return spec
    last = TensorSpec.packed(spec.dims, spec.dtype, Layout.NHWC)
    if isinstance(node, Transpose):
        if spec.rank == 3:
            return spec
        seen = node.view(inputs["x"].dims, inputs["x"].strides).strides
        along = zip(spec.dims, seen, last.strides, strict=True)
        return last if all(one == other or size == 1 for size, one, other in along) else spec
    return last if any(i.rank == spec.rank and i.layout is Layout.NHWC for i in inputs.values()) else spec
