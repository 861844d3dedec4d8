from __future__ import annotations

import numpy as np
import pytest

from cudnn_actor.engines.base import EngineFailure
from cudnn_actor.engines.cpu import CpuEngine
from cudnn_actor.protocol import (
    ConvBwdData,
    ConvBwdFilter,
    ConvFwd,
    ConvSpec,
    DType,
    TensorSpec,
    UnsupportedGraph,
)
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.messages.lowering import lower
from cudnn_actor.protocol.operations import (
    ConvolutionForward,
    GraphTensor,
    Node,
    Pointwise,
    PointwiseMode,
    TensorRole,
)

from ...in_one_test import cases_in_one_test
from ..problems import PROBLEMS, integers, normal
from ..references import assert_close, scipy_forward
from ..workbench import Workbench

F64 = DType.FLOAT64
SAME = ConvSpec.symmetric(2, pad=1)


def tensor(
    uid: int, dims: tuple[int, ...], role: TensorRole = TensorRole.BOUND, dtype: DType = F64
) -> GraphTensor:
    spec = TensorSpec.packed(dims, dtype)
    return GraphTensor(uid=uid, dims=dims, strides=spec.strides, dtype=dtype, role=role)


def virtual(uid: int, dims: tuple[int, ...], dtype: DType = F64) -> GraphTensor:
    return tensor(uid, dims, TensorRole.VIRTUAL, dtype)


def conv(x: int, w: int, y: int, spec: ConvSpec = SAME) -> ConvolutionForward[int]:
    return ConvolutionForward(x=x, w=w, y=y, conv=spec)


def pointwise(mode: PointwiseMode, operands: tuple[int, ...], result: int) -> Pointwise[int]:
    return Pointwise(mode=mode, operands=operands, result=result)


def graph(tensors: list[GraphTensor], operations: list[Node]) -> OperationGraph:
    return OperationGraph(tensors=tuple(tensors), operations=tuple(operations))


def unsupported(bench: Workbench, asked: OperationGraph) -> str:
    with pytest.raises(UnsupportedGraph) as refusal:
        bench.engine.build(asked, workspace_limit=None)
    assert refusal.value.engine == "cpu"
    assert refusal.value.digest == asked.digest()
    return refusal.value.detail


def test_a_convolution_reads_what_a_pointwise_operation_made(bench: Workbench) -> None:
    dims, taps = (2, 3, 5, 5), (3, 3, 3, 3)
    asked = graph(
        [tensor(0, dims), tensor(1, taps), virtual(2, dims), tensor(3, dims)],
        [pointwise(PointwiseMode.RELU, (0,), 2), conv(2, 1, 3)],
    )
    x, w = normal(dims, F64, 0), normal(taps, F64, 1)
    assert_close(bench.run_graph(asked, {0: x, 1: w})[3], scipy_forward(np.maximum(x, 0), w, SAME))


def test_a_residual_block_is_one_graph(bench: Workbench) -> None:
    dims, taps = (2, 4, 6, 6), (4, 4, 3, 3)
    asked = graph(
        [
            tensor(0, dims),
            tensor(1, taps),
            tensor(2, taps),
            *(virtual(uid, dims) for uid in (3, 4, 5, 6)),
            tensor(7, dims),
        ],
        [
            conv(0, 1, 3),
            pointwise(PointwiseMode.TANH, (3,), 4),
            conv(4, 2, 5),
            pointwise(PointwiseMode.ADD, (5, 0), 6),
            pointwise(PointwiseMode.RELU, (6,), 7),
        ],
    )
    x, a, b = normal(dims, F64, 0), normal(taps, F64, 1), normal(taps, F64, 2)
    wanted = np.maximum(scipy_forward(np.tanh(scipy_forward(x, a, SAME)), b, SAME) + x, 0)
    assert_close(bench.run_graph(asked, {0: x, 1: a, 2: b})[7], wanted)


def test_an_intermediate_result_may_be_read_twice_and_stored(bench: Workbench) -> None:
    dims = (2, 3)
    asked = graph(
        [tensor(0, dims), virtual(1, dims), tensor(2, dims), tensor(3, dims), tensor(4, dims)],
        [
            pointwise(PointwiseMode.MUL, (0, 0), 1),
            pointwise(PointwiseMode.ADD, (1, 1), 2),
            pointwise(PointwiseMode.MUL, (1, 1), 3),
            pointwise(PointwiseMode.ADD, (2, 0), 4),
        ],
    )
    x = normal(dims, F64, 0)
    got = bench.run_graph(asked, {0: x})
    np.testing.assert_allclose(got[2], 2 * x * x)
    np.testing.assert_allclose(got[3], x**4)
    np.testing.assert_allclose(got[4], 2 * x * x + x)


def test_plans_of_each_kind_have_tags_of_their_own() -> None:
    asked = graph([tensor(0, (3,)), tensor(1, (3,))], [pointwise(PointwiseMode.RELU, (0,), 1)])
    tags = [CpuEngine(exact=exact).build(asked, workspace_limit=None).tag for exact in (False, True)]
    named = f"cpu/pointwise/{asked.digest()[:8]}"
    assert tags == [named, f"{named}/exact"]


@cases_in_one_test
@pytest.mark.parametrize("role", [TensorRole.VIRTUAL, TensorRole.BOUND])
@pytest.mark.parametrize("dtype", DType)
def test_what_passes_between_operations_is_rounded_to_its_dtype(
    bench: Workbench, dtype: DType, role: TensorRole
) -> None:
    asked = graph(
        [tensor(0, (1,)), tensor(1, (1,), role, dtype), tensor(2, (1,))],
        [pointwise(PointwiseMode.ADD, (0, 0), 1), pointwise(PointwiseMode.RELU, (1,), 2)],
    )
    rounded = np.array([4 / 3]).astype(dtype.numpy).astype(np.float64)
    assert bench.run_graph(asked, {0: np.array([2 / 3])})[2] == rounded


def test_a_convolutions_result_is_rounded_before_it_is_read(bench: Workbench) -> None:
    one = (1, 1, 1, 1)
    asked = graph(
        [tensor(0, one), tensor(1, one), virtual(2, one, DType.FLOAT16), tensor(3, one)],
        [conv(0, 1, 2, ConvSpec.symmetric(2)), pointwise(PointwiseMode.RELU, (2,), 3)],
    )
    given = {0: np.full(one, 1 / 3), 1: np.ones(one)}
    assert bench.run_graph(asked, given)[3] == np.float64(np.float16(1 / 3))


def test_backward_convolutions_of_integers_are_unsupported(bench: Workbench) -> None:
    problem = PROBLEMS["padded"]
    for dtype in (DType.INT8, DType.UINT8):
        x, w, y = (bench.place(integers(dims, dtype, 0)) for dims in (problem.x, problem.w, problem.y))
        dx, dw = (bench.empty(TensorSpec.packed(dims, DType.INT32)) for dims in (problem.x, problem.w))
        data = lower(ConvBwdData(dy=y, w=w, dx=dx, conv=problem.conv)).graph
        filters = lower(ConvBwdFilter(x=x, dy=y, dw=dw, conv=problem.conv)).graph
        assert f"dy={dtype}: is not a dtype that conv_bwd_data takes" in unsupported(bench, data)
        assert f"x={dtype}: is not a dtype that conv_bwd_filter takes" in unsupported(bench, filters)


def test_convolutions_of_int32_are_unsupported(bench: Workbench) -> None:
    one = (1, 1, 1, 1)
    tensors = [tensor(uid, one, TensorRole.BOUND, DType.INT32) for uid in range(3)]
    asked = graph(tensors, [conv(0, 1, 2, ConvSpec.symmetric(2))])
    assert "x=int32: is not a dtype that conv_fwd takes" in unsupported(bench, asked)


@pytest.mark.parametrize(("dtype", "longest"), [(DType.INT8, 131_071), (DType.UINT8, 33_025)])
def test_sums_that_could_overflow_int32_are_unsupported(bench: Workbench, dtype: DType, longest: int) -> None:
    extreme = -128 if dtype is DType.INT8 else 255
    for length in (longest, longest + 1):
        x = bench.place(np.full((1, length, 1), extreme, dtype.numpy))
        y = bench.empty(TensorSpec.packed((1, 1, 1), DType.INT32))
        message = ConvFwd(x=x, w=x, y=y, conv=ConvSpec.symmetric(1))
        if length == longest:
            assert bench.run(message) == longest * extreme * extreme
        else:
            assert "can overflow int32" in unsupported(bench, lower(message).graph)


def test_a_convolution_whose_dims_do_not_fit_is_unsupported(bench: Workbench) -> None:
    asked = graph(
        [tensor(0, (1, 1, 4, 4)), tensor(1, (1, 1, 3, 3)), tensor(2, (1, 1, 3, 3))], [conv(0, 1, 2)]
    )
    assert "y=(1, 1, 3, 3): is not the shape of conv(x, w); give it dims (1, 1, 4, 4)" in unsupported(
        bench, asked
    )
    asked = graph(
        [tensor(0, (1, 2, 4, 4)), tensor(1, (1, 1, 3, 3)), tensor(2, (1, 1, 4, 4))], [conv(0, 1, 2)]
    )
    assert "has 1 channels, but x has 2" in unsupported(bench, asked)


def test_operands_that_do_not_broadcast_are_unsupported(bench: Workbench) -> None:
    asked = graph(
        [tensor(0, (2, 3)), tensor(1, (3,)), tensor(2, (2, 3))], [pointwise(PointwiseMode.ADD, (0, 1), 2)]
    )
    assert "does not broadcast" in unsupported(bench, asked)


def test_a_mode_with_the_wrong_number_of_operands_is_unsupported(bench: Workbench) -> None:
    asked = graph([tensor(0, (2,)), tensor(1, (2,))], [pointwise(PointwiseMode.ADD, (0,), 1)])
    assert "operands=1: is not the number of operands of add" in unsupported(bench, asked)


def test_a_convolution_of_a_scalar_is_unsupported(bench: Workbench) -> None:
    one = (1, 1, 1, 1)
    asked = graph(
        [tensor(0, one, TensorRole.SCALAR), tensor(1, one), tensor(2, one)],
        [conv(0, 1, 2, ConvSpec.symmetric(2))],
    )
    assert "of a number" in unsupported(bench, asked)


def test_buffers_that_are_not_the_graphs_are_an_engine_failure(bench: Workbench) -> None:
    asked = graph([tensor(0, (2, 3)), tensor(1, (2, 3))], [pointwise(PointwiseMode.RELU, (0,), 1)])
    plan = bench.engine.build(asked, workspace_limit=None)
    good, bad = bench.empty(TensorSpec.packed((2, 3), F64)), bench.empty(TensorSpec.packed((3, 2), F64))
    with pytest.raises(EngineFailure, match="1 and 0 given, not 2 buffers"):
        bench.engine.execute(plan, [bench.binding(good)], ())
    with pytest.raises(EngineFailure, match="BAD_BINDINGS"):
        bench.engine.execute(plan, [bench.binding(bad), bench.binding(good)], ())


def test_a_plan_gives_the_same_bits_without_being_asked_to(bench: Workbench) -> None:
    problem = PROBLEMS["three_dimensional"]
    x, w = (bench.place(normal(dims, DType.FLOAT32, 0)) for dims in (problem.x, problem.w))
    y = bench.empty(TensorSpec.packed(problem.y, DType.FLOAT32))
    message = ConvFwd(x=x, w=w, y=y, conv=problem.conv)
    np.testing.assert_array_equal(bench.run(message), bench.run(message))


@pytest.fixture(scope="module")
def engine() -> CpuEngine:
    """Graphs of any form are the CPU engine's own promise."""
    return CpuEngine(exact=True)
