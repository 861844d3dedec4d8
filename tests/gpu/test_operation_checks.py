"""The self-check of an operation with a kernel of ours finds plans that compute something else."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

from cudnn_actor.engines.cuda import CudaEngine
from cudnn_actor.engines.cuda.checking.self_check import BuildContext, SelfCheck
from cudnn_actor.engines.cuda.cudnn.frontend_graph import Refused
from cudnn_actor.engines.cuda.planning.compiler import possible_plans
from cudnn_actor.engines.cuda.planning.cuda_builder import CudaBuilder
from cudnn_actor.engines.cuda.planning.splitting import compile_split, ways
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.engines.cuda.running.program import Program
from cudnn_actor.engines.cuda.running.recipe import OperationStep
from cudnn_actor.protocol import (
    Attention,
    DType,
    MaxPool,
    OperationGraph,
    Pointwise,
    PointwiseMode,
    RMSNorm,
    TensorRole,
)
from cudnn_actor.protocol.operations import FUNCTIONS, Randomness

from .checked_graphs import (
    ATTENTION,
    CAST,
    CTC_LOSSES,
    DRAWN,
    GATHERS,
    GRAPHS,
    GROUPED,
    IMAGES,
    LOCAL,
    NORMS,
    PADDED,
    PLACES,
    PRODUCTS,
    RECURRENT_STEPS,
    REDUCTIONS,
    RESAMPLED,
    RESPONSES,
    RUNNING,
    SAMPLED,
    SCATTERS,
    SOFTMAX,
    SORTS,
    WINDOW,
    X,
    Y,
    tensor,
    tensors,
)
from .sabotages import (
    another_b,
    another_blank,
    another_distribution,
    another_mode,
    backwards,
    causal,
    dropped_less,
    exclusive,
    fewer,
    fewer_selected,
    half_read,
    left_only,
    longer_rows,
    missing,
    moved,
    narrower,
    next_column,
    next_row,
    one_column_less,
    one_deviation,
    one_end,
    one_image_less,
    one_index,
    one_less,
    one_matrix,
    one_sample_less,
    one_sample_more,
    one_update,
    one_weight,
    other_border,
    other_corners,
    other_end,
    other_epsilon,
    other_images,
    other_interpolation,
    other_padding,
    other_places,
    other_power,
    other_size,
    other_state,
    other_widths,
    reverse,
    rotated,
    scaled,
    shorter_result,
    shorter_rows,
    shorter_sums,
    smallest,
    smallest_update,
    steeper,
    swapped,
    transposed,
    unbounded,
    unordered,
    wider,
)

OURS = ("-kernel", "lines")
"""How the names of ways end that are kernels of our own."""
ONLY_OURS = {
    "instance norm backward",
    "attention with dropout backward",
    "attention of wide heads",
    "attention of wide heads backward",
    "max with index",
    "max backward",
    *(name for name in GRAPHS if name.startswith(("norm", "adaptive"))),
    *GROUPED,
    *(REDUCTIONS.keys() - {"sum", "sum in parts"}),
    *PLACES,
    *RUNNING,
    *PADDED,
    *CAST,
    *DRAWN,
    *GATHERS,
    *SCATTERS,
    *SORTS,
    *CTC_LOSSES,
    *RECURRENT_STEPS,
    *RESAMPLED,
    *SAMPLED,
    *RESPONSES,
    "batch norm",
    "group norm in parts",
    "group norm backward",
    "sums of channels",
}
Sabotage = Callable[[OperationStep], tuple[OperationStep, ...]]


def by_kernel(graph: OperationGraph, handle: Any) -> CudaPlan:
    """The plan that runs an operation by a kernel of our own."""
    for way in range(ways(graph)):
        with contextlib.suppress(Refused):
            plan = compile_split(graph, handle, None, choice=way)
            if plan.tag.endswith("-kernel"):
                return plan
    pytest.fail("there is no kernel")


@pytest.fixture
def engine() -> Iterator[CudaEngine]:
    engine = CudaEngine()
    engine.open()
    yield engine
    engine.close()


GIVEN = GRAPHS | NORMS | IMAGES | RESPONSES | ATTENTION | LOCAL | DRAWN | PRODUCTS | GROUPED


GIVEN |= REDUCTIONS | PLACES | RUNNING | SOFTMAX | GATHERS | SCATTERS | SORTS | RESAMPLED | PADDED


GIVEN |= SAMPLED | CAST | CTC_LOSSES | RECURRENT_STEPS


CASES = [
    *itertools.product(GRAPHS, [missing, moved, transposed, one_sample_less, one_sample_more, swapped]),
    *itertools.product(NORMS, [missing, shorter_rows, one_weight, rotated, one_sample_less, one_sample_more]),
    *itertools.product(["layer norm", "rms norm"], [other_epsilon]),
    *itertools.product(["layer norm backward", "rms norm backward"], [one_deviation]),
    *itertools.product(IMAGES, [missing, other_epsilon, other_images, one_column_less, one_image_less]),
    *itertools.product(RESPONSES, [missing, other_size, other_power, other_images, one_column_less]),
    *itertools.product(ATTENTION, [missing, causal, scaled, rotated, one_sample_less]),
    # Of wide heads, that would be far outside of the tensors.
    *itertools.product([*ATTENTION][:2], [one_sample_more]),
    *itertools.product([*LOCAL][:2], [missing, wider, left_only, steeper, scaled, rotated]),
    *itertools.product([*LOCAL][2:], [missing, causal, dropped_less, other_state, scaled, rotated]),
    *itertools.product(DRAWN, [missing, other_state, fewer, next_column, another_distribution]),
    *itertools.product(GATHERS, [missing, shorter_result, next_row, one_index, fewer_selected]),
    *itertools.product(SCATTERS, [missing, shorter_result, one_index, one_update, smallest_update]),
    *itertools.product(SORTS, [missing, other_end, one_less, unordered, next_row, half_read]),
    *itertools.product(CTC_LOSSES, [missing, another_blank, next_row]),
    *itertools.product(RECURRENT_STEPS, [missing, unbounded, backwards, next_row]),
    *itertools.product(RESAMPLED, [missing, shorter_result, next_row, other_places, other_interpolation]),
    *itertools.product(SAMPLED, [missing, shorter_result, next_row, other_corners, other_padding]),
    *itertools.product(PRODUCTS, [missing, transposed, shorter_sums, another_b, one_sample_less]),
    *itertools.product(GROUPED, [missing, transposed, next_row, one_matrix, one_end, narrower]),
    ("product", rotated),
    ("product", one_sample_more),
    *itertools.product(REDUCTIONS, [missing, another_mode, half_read, next_row, one_sample_less]),
    *itertools.product(PLACES, [missing, smallest, half_read, next_row, one_sample_less, one_sample_more]),
    *itertools.product(PADDED, [missing, other_border, other_widths, next_row, transposed]),
    *itertools.product(CAST, [missing, shorter_result, next_row, transposed, swapped]),
    *itertools.product(RUNNING, [missing, reverse, exclusive, longer_rows, one_sample_less, one_sample_more]),
]


@pytest.mark.parametrize(("name", "sabotage"), CASES)
def test_a_sabotaged_plan_is_found(engine: CudaEngine, name: str, sabotage: Sabotage) -> None:
    given, operation = GIVEN[name]
    graph = OperationGraph(tensors=tuple(given), operations=(operation,))
    plan = by_kernel(graph, engine.handle)
    check = SelfCheck(graph, BuildContext(engine.handle, engine.stream))
    assert check.fault(plan) is None
    (step,) = plan.recipe.steps
    assert isinstance(step, OperationStep)
    recipe = msgspec.structs.replace(plan.recipe, steps=sabotage(step))
    assert check.fault(CudaPlan(recipe, ())) is not None
    assert check.fault(plan) is None, "the next plan was blamed"
    check.close()


@pytest.fixture
def builder() -> Iterator[CudaBuilder]:
    builder = CudaBuilder(0)
    builder.open()
    yield builder
    builder.close()


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (dtype, name)
        for dtype, name in itertools.product([DType.FLOAT32, DType.BFLOAT16], GIVEN)
        if dtype is DType.FLOAT32 or name not in CAST
    ],
)
def test_each_way_to_run_an_operation(
    builder: CudaBuilder, name: str, dtype: DType, record_property: Callable[[str, object], None]
) -> None:
    """Each is checked, stored, restored and captured; our own kernel, and one of cuDNN's ways, are right."""
    given, operation = GIVEN[name]
    tensors = tuple(
        msgspec.structs.replace(tensor, dtype=dtype)
        if tensor.dtype is DType.FLOAT32
        and tensor.dims[-1] > 1
        and (name not in IMAGES | CTC_LOSSES or len(tensor.dims) == len(given[0].dims))
        else tensor
        for tensor in given
    )
    if isinstance(operation, Randomness) and operation.dtype is DType.FLOAT32:
        operation = msgspec.structs.replace(operation, dtype=dtype)
    graph = OperationGraph(tensors=tensors, operations=(operation,))
    context = builder.context
    check = SelfCheck(graph, context)
    found: dict[str, str | None] = {}
    for plan in possible_plans(graph, context.handle, None):
        way = plan.tag.rsplit("/", 1)[-1]
        found[way] = check.fault(plan)
        data = builder.export(plan)
        assert data is not None
        # What a wrong plan writes may differ from run to run, and so does what is wrong with it.
        again = check.fault(builder.restore(graph, data))
        assert (again is None) == (found[way] is None), f"{way}: {found[way]}, and restored: {again}"
        program, workspace = Program(plan, context.handle, context.stream), check.room_for(plan)
        for _ in range(5):
            program.run((1.0,), check.pointers, check.scalars, workspace.pointer)
        assert program.replays, f"{way} cannot be captured"
    check.close()
    record_property("ways", found)
    right = [way for way, fault in found.items() if fault is None]
    assert any(way.endswith(OURS) for way in right)
    only_ours = name in ONLY_OURS or (dtype is DType.FLOAT32 and name in ATTENTION | LOCAL | REDUCTIONS)
    assert only_ours or any(not way.endswith(OURS) for way in right)


@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.BFLOAT16])
def test_an_operation_may_read_one_tensor_more_than_once(builder: CudaBuilder, dtype: DType) -> None:
    x, y = (tensor(uid, (2, 4, 128, 64), dtype) for uid in range(2))
    graph = OperationGraph(tensors=(x, y), operations=(Attention(q=0, k=0, v=0, y=1),))
    context = builder.context
    check = SelfCheck(graph, context)
    for choice in range(ways(graph)):
        with contextlib.suppress(Refused):
            assert check.fault(compile_split(graph, context.handle, None, choice=choice)) is None
    check.close()


def test_operations_with_different_numbers_of_ways_run_one_after_the_other(builder: CudaBuilder) -> None:
    x, y, z = tensors(X, Y, Y)
    inner = msgspec.structs.replace(y, role=TensorRole.VIRTUAL)
    operations = MaxPool(x=0, y=1, window=WINDOW), RMSNorm(x=1, y=2)  # cuDNN has no norm without a scale
    graph = OperationGraph(tensors=(x, inner, z), operations=operations)
    plan = builder.build(graph, workspace_limit=None)
    assert plan.tag.endswith("rms_norm-kernel")


@pytest.mark.parametrize("mode", PointwiseMode)
def test_every_tensor_of_a_check_has_values_of_its_own(engine: CudaEngine, mode: PointwiseMode) -> None:
    """Of equal ones each difference would be 0, and a plan that reads one operand twice would look right.

    Every function, also one that has no result for some numbers, must be right in its own check.
    """
    arity, dtype = FUNCTIONS[mode].arity, DType.INT32 if FUNCTIONS[mode].bits else DType.FLOAT32
    operation = Pointwise(mode=mode, operands=tuple(range(arity)), result=arity)
    operands = tuple(tensor(uid, X, dtype) for uid in range(arity + 1))
    graph = OperationGraph(tensors=operands, operations=(operation,))
    plan = engine.build(graph, workspace_limit=None)
    check = SelfCheck(graph, BuildContext(engine.handle, engine.stream))
    assert check.fault(plan) is None
    if arity > 1:
        check.pointers[1] = check.pointers[0]
        assert "are wrong" in (check.fault(plan) or "")
    check.close()
