"""What cuDNN's kernels read too early is found in the plans of real graphs."""

from __future__ import annotations

from cudnn_actor.protocol import GraphBuilder, OperationGraph, Tensor

from .building import waited_for
from .child import Child


def bottleneck() -> OperationGraph:
    """The end of a block: what is added to the last convolution was written just before, or long before."""
    g = GraphBuilder()

    def convolved(x: Tensor, name: str) -> Tensor:
        w = g.input(f"w{name}", (256, x.dims[1], 1, 1), "bfloat16", layout="NHWC")
        return g.conv(x, w, bias=g.input(f"b{name}", (256,), "bfloat16"))

    x = g.input("x", (1, 64, 56, 56), "bfloat16", layout="NHWC")
    y = g.relu(convolved(x, "1") + convolved(x, "2")).astype("bfloat16")
    return g.build(y=g.relu(convolved(g.relu(convolved(y, "3")).astype("bfloat16"), "4") + y)).body


def test_there_is_a_barrier_before_each_residual_and_nowhere_else(child: Child) -> None:
    assert child.call(waited_for, bottleneck()) == [False, True, False, True]
