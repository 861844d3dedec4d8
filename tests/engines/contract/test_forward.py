from __future__ import annotations

import pytest

from cudnn_actor.protocol import ConvFwd, ConvSpec, DType, Layout, TensorSpec

from ...in_one_test import cases_in_one_test
from ..problems import FLOATS, PROBLEMS, Problem, normal
from ..references import assert_close, scipy_forward
from ..workbench import Workbench


def check_forward(
    bench: Workbench, problem: Problem, specs: tuple[TensorSpec, TensorSpec, TensorSpec]
) -> None:
    """Against SciPy in float64, from inputs that were rounded to their dtype first."""
    x, w = (normal(spec.dims, spec.dtype, seed) for seed, spec in enumerate(specs[:2]))
    y = bench.empty(specs[2])
    got = bench.run(ConvFwd(x=bench.place(x, specs[0]), w=bench.place(w, specs[1]), y=y, conv=problem.conv))
    assert_close(got, scipy_forward(x.astype("float64"), w.astype("float64"), problem.conv))


def packed(problem: Problem, dtype: DType, layout: Layout) -> tuple[TensorSpec, TensorSpec, TensorSpec]:
    x, w, y = (TensorSpec.packed(dims, dtype, layout) for dims in (problem.x, problem.w, problem.y))
    return x, w, y


@cases_in_one_test
@pytest.mark.pairwise(of_exact=True)
@pytest.mark.parametrize("name", PROBLEMS)
@pytest.mark.parametrize("layout", [Layout.NCHW, Layout.NHWC])
def test_every_kind_of_convolution_matches_scipy(bench: Workbench, name: str, layout: Layout) -> None:
    check_forward(bench, PROBLEMS[name], packed(PROBLEMS[name], DType.FLOAT32, layout))


@cases_in_one_test
@pytest.mark.pairwise(of_exact=True)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", ["one_dimensional", "padded", "three_dimensional", "depthwise"])
def test_every_float_dtype_matches_scipy(bench: Workbench, name: str, dtype: DType) -> None:
    check_forward(bench, PROBLEMS[name], packed(PROBLEMS[name], dtype, Layout.NCHW))


@pytest.mark.parametrize("dtype", [DType.FLOAT16, DType.BFLOAT16])
def test_half_precision_operands_may_have_a_float32_result(bench: Workbench, dtype: DType) -> None:
    problem = PROBLEMS["padded"]
    x, w, _ = packed(problem, dtype, Layout.NHWC)
    check_forward(bench, problem, (x, w, TensorSpec.packed(problem.y, DType.FLOAT32)))


def test_a_layer_of_a_real_network_matches_scipy(bench: Workbench) -> None:
    problem = Problem((2, 16, 28, 28), (16, 16, 3, 3), ConvSpec.symmetric(2, pad=1))
    check_forward(bench, problem, packed(problem, DType.FLOAT32, Layout.NHWC))


def test_the_sum_is_rounded_once_not_term_by_term(bench: Workbench) -> None:
    # 2048 + 1 + 1 + ... is 2048 for ever when each sum is rounded to float16.
    x = bench.place(normal((1, 1025, 1, 1), DType.FLOAT16, 0) * 0 + 1)
    weights = normal((1, 1025, 1, 1), DType.FLOAT16, 0) * 0 + 1
    weights[0, 0] = 2048
    y = bench.empty(TensorSpec.packed((1, 1, 1, 1), DType.FLOAT16))
    assert bench.run(ConvFwd(x=x, w=bench.place(weights), y=y, conv=ConvSpec.symmetric(2))) == 3072


def test_a_plan_says_what_it_runs(bench: Workbench) -> None:
    from cudnn_actor.protocol.messages.lowering import lower

    one = TensorSpec.packed((1, 1, 1, 1), DType.FLOAT32)
    message = ConvFwd(x=bench.empty(one), w=bench.empty(one), y=bench.empty(one), conv=ConvSpec.symmetric(2))
    graph = lower(message).graph
    plan = bench.engine.build(graph, workspace_limit=None)
    # Behind that comes the library's own name for what runs, where it has one.
    assert plan.tag.split("/")[:3] == [bench.engine.name, "conv_fwd", graph.digest()[:8]]
