"""How lines of norms are read, when they are cut, and what cuDNN and the workspace are given for them."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from cudnn_actor.engines.cuda.cudnn.errata import erratum
from cudnn_actor.engines.cuda.cudnn.frontend_graph import FrontendGraph, Refused
from cudnn_actor.engines.cuda.kernels import norm_kernels
from cudnn_actor.engines.cuda.kernels.lines import Form
from cudnn_actor.engines.cuda.kernels.norm_kernels import Norm
from cudnn_actor.engines.cuda.operations.channel_norms import lower_channel_norm
from cudnn_actor.engines.cuda.operations.fused_norms import alone, norm_of, norm_workspace
from cudnn_actor.engines.cuda.planning.candidates import check_whole
from cudnn_actor.protocol import (
    BatchNorm,
    BatchNormBackward,
    BatchNormTraining,
    DType,
    GraphBuilder,
    GraphTensor,
    GroupNorm,
    GroupNormBackward,
    InstanceNorm,
    Layout,
    OperationGraph,
    TensorRole,
    TensorSpec,
)

F32, F64, BF16 = DType.FLOAT32, DType.FLOAT64, DType.BFLOAT16


def made(
    operation: Any, dims: tuple[int, ...], dtype: DType, layout: Layout, **others: DType
) -> tuple[Any, list[GraphTensor]]:
    """The operation with all of its operands, and their tensors."""
    x = TensorSpec.packed(dims, dtype, layout)
    wide = F64 if dtype is F64 else F32
    names = (*operation.inputs, *operation.outputs)
    statistics = dims[1:2] if operation.over_samples else (dims[0], operation.groups_of(dims[1]))
    tensors = []
    for uid, name in enumerate(names):
        spec = x if name in ("x", "y", "dy", "dx") else TensorSpec.packed(dims[1:2], others.get(name, wide))
        if name in ("mean", "inverse_deviation"):
            spec = TensorSpec.packed(statistics, wide)
        tensors.append(GraphTensor(uid=uid, dims=spec.dims, strides=spec.strides, dtype=spec.dtype))
    uids = {name: uid for uid, name in enumerate(names)}
    return msgspec.structs.replace(operation, **uids), tensors


def kernels(
    operation: Any, dims: tuple[int, ...], dtype: DType = F32, layout: Layout = Layout.NHWC
) -> list[tuple[str, Form, int, int]]:
    """(name, form, lines that a thread takes, elements that it reads of each) of each kernel."""
    norm = described(operation, dims, dtype, layout)
    found = []
    for one in norm.passes:
        of = norm_kernels.NormKernels(norm, one)
        found += [(kernel.name, of.lines.form, of.width, of.lines.vector) for kernel in of.launches(0)]
    return found


def sources(operation: Any, tensors: Any) -> tuple[str, ...]:
    return tuple(launch.source for launch in alone(operation, tensors).launches())


def described(*of: Any) -> Norm:
    return norm_of(alone(*made(*of)))


TRAINING: Any = BatchNormTraining(x=0)
INSTANCE: Any = InstanceNorm(x=0)
GROUPS: Any = GroupNorm(x=0, groups=4)
BACKWARD: Any = BatchNormBackward(dy=0, x=0, mean=0, inverse_deviation=0)
GROUPS_BACKWARD: Any = GroupNormBackward(dy=0, x=0, mean=0, inverse_deviation=0, groups=4)
LARGE = (32, 64, 56, 56)
CUT = ("reduce", "combine", "change")


@pytest.mark.parametrize(
    ("given", "names", "wanted"),
    [
        ((TRAINING, LARGE, BF16, Layout.NHWC), CUT, (Form.COLUMN, 8, 1)),
        ((TRAINING, LARGE, F32, Layout.NHWC), CUT, (Form.COLUMN, 4, 1)),
        ((TRAINING, LARGE, BF16, Layout.NCHW), CUT, (Form.BLOCK, 1, 8)),
        ((BACKWARD, LARGE, BF16, Layout.NHWC), CUT, (Form.COLUMN, 8, 1)),
        ((TRAINING, (2, 63, 8, 8), BF16, Layout.NHWC), ("whole",), (Form.COLUMN, 1, 1)),
        ((TRAINING, (2, 8, 5, 4), F32, Layout.NCHW), ("whole",), (Form.WARP, 1, 4)),
        ((INSTANCE, LARGE, BF16, Layout.NCHW), ("whole",), (Form.BLOCK, 1, 8)),
        ((INSTANCE, LARGE, BF16, Layout.NHWC), CUT, (Form.COLUMN, 8, 1)),
        ((GROUPS, LARGE, BF16, Layout.NHWC), CUT, (Form.BLOCK, 1, 8)),
        ((INSTANCE, (600, 8), F64, Layout.NCHW), ("whole",), (Form.COLUMN, 2, 1)),
    ],
)
def test_neighbours_in_memory_are_read_sixteen_bytes_at_a_time(
    given: tuple[Any, ...], names: tuple[str, ...], wanted: tuple[Any, ...]
) -> None:
    assert kernels(*given) == [(name, *wanted) for name in names]


def test_gradients_of_weights_of_groups_are_sums_over_samples_of_their_own() -> None:
    of_weights, of_x = kernels(GROUPS_BACKWARD, (2, 32, 5, 4))
    assert (of_x[1], of_weights[1]) == (Form.WARP, Form.COLUMN)
    operation, tensors = made(GROUPS_BACKWARD, (2, 32, 5, 4), F32, Layout.NHWC)
    bare = msgspec.structs.replace(operation, dscale=None, dbias=None)
    assert len(norm_of(alone(bare, tensors)).passes) == 1


def test_lines_that_are_cut_have_a_workspace_of_their_parts() -> None:
    operation, tensors = made(TRAINING, LARGE, BF16, Layout.NHWC)
    norm = norm_of(alone(operation, tensors))
    (one,) = norm.passes
    parts = norm_kernels.NormKernels(norm, one).parts
    assert 132 <= parts <= 528
    assert norm_workspace(operation, tensors) == 4 * 64 * (3 * parts + 2)  # count, mean and squares
    assert norm_workspace(*made(TRAINING, (2, 8, 5, 4), F32, Layout.NHWC)) == 0


def test_one_kernel_serves_many_shapes() -> None:
    shapes = [(32, 64, 56, 56), (8, 128, 28, 28), (64, 256, 14, 14)]
    found = {sources(*made(TRAINING, dims, BF16, Layout.NHWC)) for dims in shapes}
    assert len(found) == 1


@pytest.mark.parametrize(
    ("dims", "others", "changes", "why"),
    [
        ((2, 8, 4, 4), {"scale": BF16}, {}, "float32"),
        ((1, 8, 1, 1), {}, {}, "one element less"),
        ((2, 8, 4, 4), {}, {"unbiased": False}, "one element less"),
        ((2, 8, 4, 4), {}, {"mean": None}, "all of their operands"),
        ((2, 8, 4, 4), {}, {"running_mean": None, "new_running_mean": None}, "all of their operands"),
    ],
)
def test_what_cudnn_has_no_batch_norm_of_is_not_given_to_it(
    dims: tuple[int, ...], others: dict[str, DType], changes: dict[str, Any], why: str
) -> None:
    operation, tensors = made(TRAINING, dims, BF16, Layout.NHWC, **others)
    operation = msgspec.structs.replace(operation, **changes)
    graph = OperationGraph(tensors=tuple(tensors), operations=(operation,))
    with pytest.raises(Refused, match=why):
        lower_channel_norm(FrontendGraph(graph, None), operation)


def test_the_erratum_of_convolutions_does_not_reach_norms() -> None:
    g = GraphBuilder()
    x = g.input("x", (2, 8, 4, 4))
    norm = g.build(y=g.relu(g.batch_norm_training(x))).body
    convolution = g.build(y=g.relu(g.conv(x, g.input("w", (8, 8, 1, 1))))).body
    assert erratum(norm, "eng0", 91900) is None
    assert "illegal address" in (erratum(convolution, "eng0", 91900) or "")


def test_inference_has_no_reduction() -> None:
    names = [name for name, *_ in kernels(BatchNorm(x=0, mean=0, variance=0), LARGE, BF16)]
    assert names == ["whole"]


@pytest.mark.parametrize(("layout", "together"), [(Layout.NHWC, True), (Layout.NCHW, False)])
def test_weights_of_neighbouring_channels_are_read_together(layout: Layout, together: bool) -> None:
    (text,) = sources(*made(GROUPS, (2, 32, 5, 8), BF16, layout))
    assert ("Pack<float, V> of_scale" in text) is together


def test_cudnn_overwrites_nothing_that_it_reads_but_a_norms_running_statistics() -> None:
    norm, tensors = made(BatchNormTraining(x=0, y=1), (2, 8, 5, 4), F32, Layout.NHWC)
    given = [
        msgspec.structs.replace(
            tensor,
            role=TensorRole.BOUND,
            overwrites=norm.running_mean if uid == norm.new_running_mean else None,
        )
        for uid, tensor in enumerate(tensors)
    ]
    check_whole(OperationGraph(tensors=tuple(given), operations=(norm,)))
    g = GraphBuilder()
    a = g.input("a", (1, 4, 4))
    with pytest.raises(Refused, match="may still read"):
        check_whole(g.build(updates={"a": a @ g.input("b", (1, 4, 4))}).body)


def test_the_compiler_is_told_that_new_statistics_may_lie_where_the_old_ones_do() -> None:
    (text,) = sources(*made(BatchNormTraining(x=0, y=1), (2, 8, 5, 4), F32, Layout.NHWC))
    assert "* __restrict__ in0" in text
    assert "float* running_mean" in text
    assert "float* new_running_mean" in text
