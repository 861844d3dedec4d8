"""Products of matrices on a GPU: what numerics promise, every way to run them, and products of any size."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest

from cudnn_actor.engines.base import Engine
from cudnn_actor.engines.cuda.checking.self_check import SelfCheck
from cudnn_actor.engines.cuda.cudnn.frontend_graph import Refused
from cudnn_actor.engines.cuda.library.libcublas import WORKSPACE_BYTES
from cudnn_actor.engines.cuda.planning.cuda_builder import CudaBuilder
from cudnn_actor.engines.cuda.planning.splitting import compile_split, ways
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.engines.cuda.running.program import Program
from cudnn_actor.engines.cuda.running.recipe import OperationStep
from cudnn_actor.protocol import (
    DType,
    GraphTensor,
    MatMul,
    Numerics,
    OperationGraph,
    TensorRole,
    TensorSpec,
)

from ..engines.operations.test_matmul import RESULTS, lying
from ..engines.workbench import workbench
from ..support.claims import biased, product
from .sabotages import shorter_sums
from .test_operation_checks import builder

__all__ = ["builder"]

F32 = DType.FLOAT32
Dims = tuple[int, ...]
Note = Callable[[str, object], None]


def computed(
    engine: Engine, numerics: Numerics, dims: tuple[int, int, int], dtype: DType = F32
) -> list[np.ndarray]:
    """a, b and their product, twice."""
    m, n, k = dims
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal(of).astype(dtype.numpy) for of in ((m, k), (k, n)))
    with workbench(engine) as bench:
        refs = [bench.place(a), bench.place(b)]
        results = []
        for _ in range(2):
            y = bench.empty(TensorSpec.packed((m, n), dtype))
            results.append(bench.run(MatMul(a=refs[0], b=refs[1], y=y, numerics=numerics)))
    return [a, b, *results]


@pytest.mark.parametrize("dims", [(256, 384, 512), (77, 61, 1031), (1, 512, 2048), (512, 1, 2048)])
def test_float32_is_full_unless_tf32_is_allowed(engine: Engine, dims: tuple[int, int, int]) -> None:
    errors = []
    for tf32 in (False, True):
        a, b, y, _ = computed(engine, Numerics(tf32=tf32), dims)
        exact = a.astype(np.float64) @ b.astype(np.float64)
        magnitude = np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64)
        errors.append(float((np.abs(y - exact) / magnitude).max()))
    assert errors[0] < 4 * np.sqrt(dims[2]) * 2.0**-24
    assert errors[1] < 2.0**-9


@pytest.mark.parametrize("dtype", [F32, DType.BFLOAT16, DType.FLOAT64])
def test_deterministic_products_have_the_same_bits(engine: Engine, dtype: DType) -> None:
    for dims in ((64, 64, 4096), (1, 250, 4096), (8, 8, 30_000)):
        *_, first, second = computed(engine, Numerics(deterministic=True), dims, dtype)
        assert first.tobytes() == second.tobytes()


def each_way(graph: OperationGraph, handle: Any) -> Iterator[tuple[str, CudaPlan]]:
    """The plans that run a product as a step, and what runs it: the last part of our launchers' names."""
    for choice in range(ways(graph)):
        with contextlib.suppress(Refused):
            plan = compile_split(graph, handle, None, choice=choice)
            ours = [step.launcher for step in plan.recipe.steps if isinstance(step, OperationStep)]
            yield ours[0] if ours else "cudnn", plan


@pytest.mark.parametrize(("dtype", "result"), RESULTS)
def test_each_way_to_compute_a_product(
    builder: CudaBuilder, dtype: DType, result: DType, record_property: Note
) -> None:
    """Of each, with matrices in any order: checked and captured. cuBLAS takes floats without copies."""
    found: dict[str, list[str | None]] = {}
    context = builder.context
    for dims, how in itertools.product(
        (((16, 24), (24, 32)), ((3, 16, 24), (24, 32)), ((2, 3, 16, 24), (2, 1, 24, 32))),
        itertools.product(("packed", "swapped"), ("packed", "swapped"), ("packed", "swapped", "gaps")),
    ):
        of = (*dims, (*dims[0][:-1], dims[1][-1]))
        specs = [lying(*each) for each in zip(of, (dtype, dtype, result), how, strict=True)]
        tensors = (
            GraphTensor(uid=uid, dims=s.dims, strides=s.strides, dtype=s.dtype) for uid, s in enumerate(specs)
        )
        graph = OperationGraph(tensors=tuple(tensors), operations=(MatMul(a=0, b=1, y=2),))
        check = SelfCheck(graph, context)
        for way, plan in each_way(graph, context.handle):
            fault = check.fault(plan)
            found.setdefault(way, []).append(fault)
            if fault is None:
                program, workspace = Program(plan, context.handle, context.stream), check.room_for(plan)
                for _ in range(5):
                    program.run((1.0,), check.pointers, check.scalars, workspace.pointer)
                assert program.replays, f"{way} cannot be captured"
        check.close()
    record_property("ways", found)
    assert found["kernel"] == [None] * 36
    if dtype.is_floating:
        assert len(found["cublas"]) >= 24
        assert not any(found["cublas"]), found


@pytest.mark.parametrize(
    ("dtype", "of_a", "of_b"),
    [
        (DType.BFLOAT16, (8192, 8192), (8192, 8192)),
        (DType.FLOAT64, (3, 5000, 3000), (3000, 5000)),
        (DType.FLOAT16, (30_000, 3), (3, 40_000)),
    ],
)
def test_a_large_product_is_checked_by_a_part_of_it(
    builder: CudaBuilder, dtype: DType, of_a: tuple[int, ...], of_b: tuple[int, ...]
) -> None:
    graph, context = product(dtype, of_a, of_b), builder.context
    check = SelfCheck(graph, context)
    plans = dict(each_way(graph, context.handle))
    assert check.fault(plans["cublas"]) is None
    assert check.fault(plans["kernel"]) is None
    (step,) = plans["kernel"].recipe.steps
    assert isinstance(step, OperationStep)
    sabotaged = msgspec.structs.replace(plans["kernel"].recipe, steps=shorter_sums(step))
    assert "are wrong" in (check.fault(CudaPlan(sabotaged, ())) or "")
    check.close()


def test_products_of_a_graph_share_a_workspace(builder: CudaBuilder) -> None:
    spec = TensorSpec.packed((64, 64), DType.FLOAT32)
    tensors = tuple(
        GraphTensor(
            uid=uid,
            dims=spec.dims,
            strides=spec.strides,
            dtype=spec.dtype,
            role=TensorRole.VIRTUAL if 0 < uid < 4 else TensorRole.BOUND,
        )
        for uid in range(5)
    )
    products = tuple(MatMul(a=uid, b=0, y=uid + 1) for uid in range(4))
    plan = builder.build(OperationGraph(tensors=tensors, operations=products), workspace_limit=None)
    assert plan.tag.count("cublaslt-") == 4
    assert plan.workspace < 2 * WORKSPACE_BYTES


@pytest.mark.parametrize("swapped", ["", "b"])
@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
@pytest.mark.parametrize(
    "dims",
    [
        ((8, 128, 768), (768, 3072), (1, 1, 3072)),
        ((4, 12, 77, 64), (4, 12, 64, 77), (1, 1, 1, 77)),
        ((77, 130), (130, 61), (1, 61)),
    ],
)
def test_a_product_with_a_bias_and_an_activation_is_one_plan(
    builder: CudaBuilder, dtype: DType, dims: tuple[Dims, Dims, Dims], swapped: str, record_property: Note
) -> None:
    of_a, of_b, bias = dims
    plan = builder.build(biased(product(dtype, of_a, of_b, swapped=swapped), bias), workspace_limit=None)
    record_property("plan", plan.tag)
    assert "+" not in plan.tag
    assert plan.checked
