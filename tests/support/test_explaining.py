"""What plans of graphs say about themselves, with cuDNN's own words."""

from __future__ import annotations

from typing import Any

from benchmarks.blocks import bottleneck
from cudnn_actor.protocol import BatchNormTraining, GraphBuilder, OperationGraph

from .building import explanation, first_plans
from .child import Child


def convolution() -> OperationGraph:
    """A convolution with bias and activation, then its pixels in another order, times a number."""
    g = GraphBuilder()
    x = g.input("x", (8, 64, 28, 28), "bfloat16", layout="NHWC")
    w = g.input("w", (64, 64, 3, 3), "bfloat16", layout="NHWC")
    y = g.relu(g.conv(x, w, pad=1, bias=g.input("b", (64,), "bfloat16")))
    return g.build(y=y.transpose(0, 2, 3, 1)[:, ::2] * 3.0).body


def gradient_of_a_relu() -> OperationGraph:
    g = GraphBuilder()
    y, dy, w = (
        g.input(name, dims, "bfloat16", layout="NHWC")
        for name, dims in (("y", (8, 64, 28, 28)), ("dy", (8, 32, 28, 28)), ("w", (32, 64, 3, 3)))
    )
    return g.build(dx=g.grad(g.conv(g.relu(y), w, pad=1), y, dy)).body


def test_a_convolution_of_a_graph_is_fused_with_its_bias_and_its_activation(child: Child) -> None:
    found = child.call(explanation, convolution())
    fused, scaled = found.pieces
    assert [label.split()[0] for label in fused.labels] == ["conv_fwd", "add", "relu"]
    assert len(fused.steps) == 1
    assert fused.steps[0].startswith("cuDNN eng")
    assert scaled.steps == ("generated kernel",)
    assert [view.split()[0] for view in found.views] == ["reshape", "transpose", "slice"]


def first_layer() -> OperationGraph:
    """Of images, with an activation between 0 and 6."""
    g = GraphBuilder()
    x = g.input("x", (8, 3, 32, 32), "bfloat16", layout="NHWC")
    w = g.input("w", (32, 3, 3, 3), "bfloat16", layout="NHWC")
    y = g.conv(x, w, pad=1, bias=g.input("b", (32,), "bfloat16"))
    return g.build(y=g.minimum(g.maximum(y, 0.0), 6.0)).body


def test_a_first_layer_is_fused_with_its_activation_on_copies_with_channels_of_zeros(child: Child) -> None:
    (piece,) = child.call(explanation, first_layer()).pieces
    assert piece.steps[:2] == ("kernel of pad", "kernel of pad")
    assert piece.steps[2].startswith("cuDNN eng")
    assert len(piece.steps) == 3


def test_bounds_are_part_of_a_convolution(child: Child) -> None:
    g = GraphBuilder()
    x = g.input("x", (8, 64, 28, 28), "bfloat16", layout="NHWC")
    w = g.input("w", (64, 64, 3, 3), "bfloat16", layout="NHWC")
    y = g.conv(x, w, pad=1, bias=g.input("b", (64,), "bfloat16"))
    graph = g.build(y=g.clip(y, -1.5, 2.5)).body
    (piece,) = child.call(explanation, graph).pieces
    assert len(piece.steps) == 1
    assert piece.steps[0].startswith("cuDNN eng")


def test_bounds_of_given_integers_are_not_compared_in_float32(child: Child) -> None:
    g = GraphBuilder()
    x, w = (g.input(name, (8, 64, size, size), "int8", layout="NHWC") for name, size in (("x", 8), ("w", 1)))
    z = g.input("z", (8, 8, 8, 8), "int32", layout="NHWC")
    for plan in child.call(first_plans, g.build(y=g.conv(x, w) + g.maximum(z, 5)).body):
        assert plan.endswith("+elementwise")


def test_a_convolution_of_a_tensor_with_itself_has_a_plan(child: Child) -> None:
    g = GraphBuilder()
    x = g.input("x", (8, 8, 12, 12), "bfloat16", layout="NHWC")
    for plan in child.call(first_plans, g.build(y=g.relu(g.conv(x, x))).body):
        assert plan.endswith("+elementwise")


def test_a_norm_of_a_bottleneck_is_fused_with_the_sum_and_the_relu_behind_it(child: Child) -> None:
    found = child.call(explanation, bottleneck().forward.body)
    assert [[label.split()[0] for label in piece.labels] for piece in found.pieces] == [
        ["conv_fwd"],
        ["batch_norm_training", "relu"],
        ["conv_fwd"],
        ["batch_norm_training", "relu"],
        ["conv_fwd"],
        ["batch_norm_training", "add", "relu"],
    ]
    for convolution, norm in zip(found.pieces[::2], found.pieces[1::2], strict=True):
        assert convolution.steps[0].startswith("cuDNN eng")
        assert norm.steps == ("generated kernels of batch_norm_training: 3",)
        assert (len(convolution.steps), norm.why) == (1, ())


def test_cudnns_norms_with_a_sum_and_a_relu_stay_candidates_behind_ours(child: Child) -> None:
    g = GraphBuilder()
    x, z = (g.input(name, (8, 64, 32, 32), "bfloat16", layout="NHWC") for name in "xz")
    weights: Any = {name: g.input(name, (64,)) for name in BatchNormTraining.inputs[1:]}
    found = g.apply(BatchNormTraining(x=x, **weights), also=BatchNormTraining.outputs[1:])
    updates = {name: getattr(found, f"new_{name}") for name in ("running_mean", "running_variance")}
    kept = {"mean": found.mean, "inverse": found.inverse_deviation}
    graph = g.build({"y": g.relu(found.y + z), **kept}, updates=updates)
    ours, cudnns = child.call(first_plans, graph.body)
    assert ours == "batch_norm_training-fused"
    assert cudnns.startswith("eng")
    assert "+" not in cudnns


def test_the_gradient_of_a_relu_is_fused_with_that_of_the_convolution_behind_it(child: Child) -> None:
    first, _ = child.call(first_plans, gradient_of_a_relu())
    assert first.startswith("eng")
    assert "+" not in first


def test_what_cudnn_refuses_is_told_with_the_reason(child: Child) -> None:
    g = GraphBuilder()
    x, w = g.input("x", (8, 6, 9, 9), "uint8"), g.input("w", (8, 6, 3, 3), "uint8")
    found = child.call(explanation, g.build(y=g.conv(x, w), e=g.exp(g.input("z", (6, 4)))).body)
    told = {piece.labels[0].split()[0]: piece.why for piece in found.pieces}
    assert told["exp"] == ()
    assert told["conv_fwd"][0].startswith("cuDNN supports only one 8-bit type")
    assert str(found).count("because ") == len(told["conv_fwd"])


def test_a_kernel_of_our_own_is_not_told_what_others_are_for(child: Child) -> None:
    g = GraphBuilder()
    x, w = g.input("x", (8, 64, 28, 28), "bfloat16", layout="NHWC"), g.input("w", (64, 1, 3, 3), "bfloat16")
    y = g.conv(x, w, pad=1, groups=64, bias=g.input("b", (64,), "bfloat16"))
    found = child.call(explanation, g.build(y=y, z=g.relu(y)).body)
    (piece,) = found.pieces
    assert (piece.steps, piece.why) == (("generated depthwise kernel",), ())
