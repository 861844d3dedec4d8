"""Products by cuBLASLt on a GPU: what follows them, every algorithm, and what rounding and NaN become."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from cudnn_actor.cli.graph_bench import graph_bench, made_up_values, open_engine
from cudnn_actor.engines.cuda import CudaEngine
from cudnn_actor.engines.cuda.checking.self_check import SelfCheck
from cudnn_actor.engines.cuda.cudnn.frontend_graph import Refused
from cudnn_actor.engines.cuda.planning.aligned_products import aligned_product
from cudnn_actor.engines.cuda.planning.compiler import compile_aligned
from cudnn_actor.engines.cuda.planning.cuda_builder import CudaBuilder
from cudnn_actor.engines.cuda.planning.product_halves import compile_halves, halves_of
from cudnn_actor.engines.cuda.planning.products import compile_product, product_of
from cudnn_actor.engines.cuda.running.barriers import waits
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.engines.cuda.running.program import Program
from cudnn_actor.engines.cuda.running.recipe import KernelStep, ProductStep
from cudnn_actor.protocol import DType, Graph, GraphBuilder, OperationGraph, Tensor

from ..engines.cuda.planning.test_aligned_products import ODD
from ..engines.cuda.planning.test_products import GRAPHS as SPLIT
from ..engines.cuda.planning.test_products import PRODUCTS, added, biased, product, swiglu
from ..engines.cuda.planning.test_reshaped_products import block
from ..engines.differences import computed
from ..engines.references import relative_error
from .bounds import UNIT
from .test_epilogues import run
from .test_operation_checks import builder

__all__ = ["builder"]

BFLOAT16, FLOAT16, FLOAT32 = DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32
Note = Callable[[str, object], None]
LARGE = {
    "qkv": product(biased, (4, 512, 768), (768, 2304)),
    "wide": product(lambda g, y: g.pointwise("gelu_tanh", biased(g, y)), (4, 512, 768), (768, 3072)),
    "narrow": product(lambda g, y: added(g, biased(g, y)), (4, 512, 3072), (3072, 768)),
    "turned": product(lambda g, y: g.relu(biased(g, y)), (2048, 768), (768, 3072), turned="b"),
    "long sums": product(a=(31, 1418), b=(1418, 24)),
    "a long sum": product(a=(64, 30_000), b=(30_000, 128), dtype=FLOAT16),
    "uneven": product(lambda g, y: added(g, biased(g, y)), (3, 65, 73), (73, 41)),
    "one row": product(biased, (1, 4096), (4096, 4096)),
    "a batch": product(added, (24, 197, 64), (24, 64, 197)),
    "float32": product(a=(512, 768), b=(768, 512), dtype=FLOAT32),
}
GRAPHS = {f"small: {name}": graph for name, graph in PRODUCTS.items()} | LARGE


def algorithms(graph: OperationGraph, most: int = 8) -> list[CudaPlan]:
    """The plans by cuBLASLt, at most so many."""
    found = product_of(graph)
    assert found is not None
    plans = []
    for choice in range(most):
        try:
            plans.append(compile_product(graph, found, None, None, choice))
        except Refused:
            break
    return plans


@pytest.mark.parametrize("name", GRAPHS)
def test_each_algorithm_passes_its_self_check_and_can_be_captured(
    builder: CudaBuilder, name: str, record_property: Note
) -> None:
    graph, context = GRAPHS[name], builder.context
    plans, check = algorithms(graph), SelfCheck(graph, context)
    record_property("algorithms", len(plans))
    assert plans
    for plan in plans:
        assert check.fault(plan) is None, plan.tag
        program, workspace = Program(plan, context.handle, context.stream), check.room_for(plan)
        for _ in range(5):
            program.run((1.0,), check.pointers, check.scalars, workspace.pointer)
        assert program.replays, f"{plan.tag} cannot be captured"
    check.close()


@pytest.mark.parametrize("name", LARGE)
def test_the_kernel_of_a_product_is_loaded_without_a_run(builder: CudaBuilder, name: str) -> None:
    graph, context = LARGE[name], builder.context
    check, plan = SelfCheck(graph, context), algorithms(graph)[0]
    program, workspace = Program(plan, context.handle, context.stream), check.room_for(plan)
    program.load(workspace.pointer)
    program.expect((1.0,))
    program.run((1.0,), check.pointers, check.scalars, workspace.pointer)
    assert program.replays, f"{plan.tag} cannot be loaded by a capture"
    check.close()


@pytest.mark.parametrize("name", LARGE)
def test_it_is_the_plan_and_comes_back_from_bytes(builder: CudaBuilder, name: str) -> None:
    graph = LARGE[name]
    plan = builder.build(graph, workspace_limit=None)
    assert [type(step) for step in plan.recipe.steps] == [ProductStep], plan.tag
    assert plan.checked
    again = builder.restore(graph, builder.export(plan) or b"")
    assert again.recipe == plan.recipe
    check = SelfCheck(graph, builder.context)
    assert check.fault(again) is None
    check.close()


HALVES = {name: graph for name, graph in SPLIT.items() if halves_of(graph) is not None} | {
    "a large swiglu": product(swiglu, (1, 512, 2048), (2048, 5632)),
    "a large gelu": product(lambda g, y: g.gelu(biased(g, y)), (1, 512, 768), (768, 3072)),
}


@pytest.mark.parametrize("name", HALVES)
def test_a_product_and_a_kernel_pass_their_self_check(builder: CudaBuilder, name: str) -> None:
    graph, context = HALVES[name], builder.context
    halves = halves_of(graph)
    assert halves is not None
    plan = compile_halves(graph, halves, context.handle, None)
    assert [type(step) for step in plan.recipe.steps] == [ProductStep, KernelStep]
    check = SelfCheck(graph, context)
    assert check.fault(plan) is None, plan.tag
    check.close()


def test_a_large_gelu_of_a_rounded_product_is_split(builder: CudaBuilder) -> None:
    rounded = product(lambda g, y: g.gelu(biased(g, y).astype(BFLOAT16)), (8, 197, 384), (384, 3072))
    plan = builder.build(rounded, workspace_limit=None)
    assert [type(step) for step in plan.recipe.steps] == [ProductStep, KernelStep], plan.tag
    assert plan.checked


def test_a_product_with_a_gate_is_split(builder: CudaBuilder) -> None:
    plan = builder.build(HALVES["a large swiglu"], workspace_limit=None)
    assert [type(step) for step in plan.recipe.steps] == [ProductStep, KernelStep], plan.tag


UNALIGNED = {f"small: {name}": graph for name, (graph, _) in ODD.items()} | {
    "logits": product(a=(4, 512, 768), b=(768, 50_257), turned="b"),
    "logits, words in order": product(a=(4, 512, 768), b=(768, 50_257)),
    "an odd inner dim": product(biased, a=(2048, 1535), b=(1535, 2048)),
    "both, and gelu": product(lambda g, y: g.gelu(biased(g, y)), a=(1024, 1025), b=(1025, 4097), turned="b"),
}


@pytest.mark.parametrize("name", UNALIGNED)
def test_products_of_whole_vectors_pass_their_self_check_and_can_be_captured(
    builder: CudaBuilder, name: str
) -> None:
    graph, context = UNALIGNED[name], builder.context
    found, check = aligned_product(graph, every=True), SelfCheck(graph, context)
    assert found is not None
    plan = compile_aligned(graph, found, context.handle, None, 0)
    assert check.fault(plan) is None, plan.tag
    program, workspace = Program(plan, context.handle, context.stream), check.room_for(plan)
    for _ in range(5):
        program.run((1.0,), check.pointers, check.scalars, workspace.pointer)
    assert program.replays, f"{plan.tag} cannot be captured"
    check.close()


@pytest.mark.parametrize(("name", "steps"), [("logits", 3), ("logits, words in order", 3)])
def test_logits_are_products_of_whole_vectors_by_default(builder: CudaBuilder, name: str, steps: int) -> None:
    plan = builder.build(UNALIGNED[name], workspace_limit=None)
    assert len(plan.recipe.steps) == steps, plan.tag
    assert isinstance(plan.recipe.steps[-1], KernelStep)
    assert plan.checked
    again = builder.restore(UNALIGNED[name], builder.export(plan) or b"")
    assert again.recipe == plan.recipe


def behind(dims: tuple[int, int, int], after: Callable[[GraphBuilder, Tensor], Tensor]) -> Graph:
    m, n, k = dims
    g = GraphBuilder()
    y = after(g, g.input("a", (m, k), "bfloat16") @ g.input("b", (k, n), "bfloat16"))
    return g.build(y=y.astype("bfloat16"))


EPILOGUES: dict[str, Callable[[GraphBuilder, Tensor], Tensor]] = {
    "alone": lambda g, y: y,
    "bias and gelu": lambda g, y: g.pointwise("gelu_tanh", biased(g, y)),
    "bias and relu": lambda g, y: g.relu(biased(g, y)),
    "bias and residual": lambda g, y: added(g, biased(g, y)),
}


@pytest.mark.parametrize("dims", [(512, 768, 3072), (31, 24, 1418), (8, 8, 30_000), (1, 4096, 4096)])
@pytest.mark.parametrize("name", EPILOGUES)
async def test_a_result_is_rounded_once(name: str, dims: tuple[int, int, int]) -> None:
    graph, rng = behind(dims, EPILOGUES[name]), np.random.default_rng(7)
    values = {p.name: rng.uniform(-1, 1, p.spec.dims).astype(p.spec.dtype.numpy) for p in graph.inputs}
    found, steps = await run(graph, values)
    if dims[0] > 1 or name != "bias and residual":  # cuDNN adds what is as large as a row of bias
        assert steps == ["cuBLASLt"]
    wanted = computed(graph, values)["y"].astype(np.float64)
    assert relative_error(found["y"], wanted) < 2 * UNIT[BFLOAT16]


@pytest.mark.parametrize("dims", [(1024, 4097, 512), (1024, 2048, 1025)])
async def test_a_product_of_whole_vectors_is_rounded_once(dims: tuple[int, int, int]) -> None:
    graph, rng = behind(dims, EPILOGUES["bias and relu"]), np.random.default_rng(7)
    values = {p.name: rng.uniform(-1, 1, p.spec.dims).astype(p.spec.dtype.numpy) for p in graph.inputs}
    found, steps = await run(graph, values)
    assert "cuBLASLt" in steps
    assert len(steps) > 1
    wanted = computed(graph, values)["y"].astype(np.float64)
    assert relative_error(found["y"], wanted) < 2 * UNIT[BFLOAT16]


async def test_a_reshape_of_rows_does_not_part_a_product_from_what_follows() -> None:
    graph, rng = block(), np.random.default_rng(9)
    values = {p.name: rng.uniform(-1, 1, p.spec.dims).astype(p.spec.dtype.numpy) for p in graph.inputs}
    found, steps = await run(graph, values)
    assert steps[:-1] == ["cuBLASLt", "cuBLASLt"]
    for name, wanted in computed(graph, values).items():
        assert relative_error(found[name], wanted.astype(np.float64)) < 1e-4, name


async def test_relu_keeps_what_is_no_number() -> None:
    graph = behind((8, 16, 16), EPILOGUES["bias and relu"])
    special = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -2.0, 3.0]
    values = {p.name: np.zeros(p.spec.dims, p.spec.dtype.numpy) for p in graph.inputs}
    values["a"][:, 0] = special
    values["b"][0, :] = 1
    found, steps = await run(graph, values)
    wanted = computed(graph, values)["y"]
    np.testing.assert_array_equal(found["y"].astype(np.float32), wanted.astype(np.float32))
    assert steps == ["cuBLASLt"]


def stacked() -> OperationGraph:
    """Products of which each adds what the one before it has just written, small enough to overlap."""
    g = GraphBuilder()
    a = g.input("a", (197, 768), "bfloat16")
    weights = [g.input(f"w{layer}", (768, 768), "bfloat16") for layer in range(16)]
    y = (a @ weights[0]).astype("bfloat16")
    for w in weights[1:]:
        y = (a @ w + y).astype("bfloat16")
    return g.build(y=y).body


def test_a_residual_is_there_before_cublaslt_reads_it() -> None:
    """There is no barrier before its kernels, which may begin before the kernel in front has ended."""
    graph = stacked()
    with open_engine("cuda:0") as engine, graph_bench(engine, graph) as bench:
        assert isinstance(engine, CudaEngine)
        bench.fill(made_up_values(graph, 1))
        plan = engine.build(graph, workspace_limit=None)
        assert sum(isinstance(step, ProductStep) for step in plan.recipe.steps) == 16, plan.tag
        assert not any(waits(plan.recipe.steps))
        (first,) = bench.run(plan).values()
        for number in range(1000):
            if number < 100:
                engine.forget_replays()
            engine.poison_workspace()
            (again,) = bench.run(plan).values()
            np.testing.assert_array_equal(again.view(np.uint16), first.view(np.uint16))
