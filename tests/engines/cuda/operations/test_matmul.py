"""How CUDA computes products of matrices, as far as that shows without a GPU."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import msgspec
import numpy as np
import pytest

from cudnn_actor.engines.cpu.exact.evaluation import NumPy
from cudnn_actor.engines.cuda.checking.evaluated_reference import (
    OnHostInPart,
    evaluator_of,
    first_byte,
    sample_graph,
)
from cudnn_actor.engines.cuda.cudnn.errata import erratum
from cudnn_actor.engines.cuda.cudnn.frontend_graph import Refused
from cudnn_actor.engines.cuda.operations.matmul import CublasCall, cublas_call
from cudnn_actor.protocol import (
    DType,
    GraphBuilder,
    GraphTensor,
    MatMul,
    Numerics,
    OperationGraph,
    Pointwise,
    PointwiseMode,
    TensorRole,
    TensorSpec,
)
from cudnn_actor.protocol.operations import Pad

from ....gpu.choices import Choices
from ....in_one_test import cases_in_one_test
from ...operations.test_matmul import RESULTS, SHAPES, lying

PRODUCT = MatMul(a=0, b=1, y=2)
TYPES = {0: np.float32, 1: np.float64, 2: np.float16, 3: np.int8, 10: np.int32, 14: DType.BFLOAT16.numpy}


def tensor(uid: int, spec: TensorSpec, role: TensorRole = TensorRole.BOUND) -> GraphTensor:
    return GraphTensor(uid=uid, dims=spec.dims, strides=spec.strides, dtype=spec.dtype, role=role)


def memory(spec: TensorSpec) -> tuple[np.ndarray, np.ndarray]:
    """Whole numbers in a tensor's memory, and the tensor: a view of it."""
    flat = np.random.default_rng([*spec.dims, *spec.strides]).integers(-3, 5, spec.nbytes)
    data = flat[: spec.nbytes // spec.dtype.itemsize].astype(spec.dtype.numpy)
    steps = [step * data.itemsize for step in spec.strides]
    return data, np.lib.stride_tricks.as_strided(data, spec.dims, steps)


def run(call: CublasCall, memories: list[np.ndarray]) -> None:
    """What cuBLAS says that it does with these numbers: matrices are stored by columns."""
    *transposed, m, n, k = call.head
    size, _, algorithm = call.tail if call.batched else (1, *call.tail)
    assert algorithm == -1
    for offsets, number in itertools.product(call.offsets, range(size)):
        matrices: list[np.ndarray] = []
        for which, (kind, ld, *stride), shape in zip(
            call.order, call.matrices, ((m, k), (k, n), (m, n)), strict=True
        ):
            data, first = memories[which], offsets[which] + sum(stride) * number
            assert data.dtype == TYPES[kind]
            turned = which != 2 and transposed[len(matrices)]
            rows, columns = reversed(shape) if turned else shape
            assert ld >= rows
            assert first + (columns - 1) * ld + rows <= data.size
            steps = (data.itemsize, ld * data.itemsize)
            matrix = np.lib.stride_tricks.as_strided(data[first:], (rows, columns), steps)
            matrices.append(matrix.T if turned else matrix)
        first_operand, second_operand, y = matrices
        y[...] = first_operand.astype(np.float64) @ second_operand.astype(np.float64)


def is_right(specs: list[TensorSpec]) -> bool:
    """Whether cuBLAS is asked for the product. Raises `Refused`."""
    call = cublas_call(PRODUCT, [tensor(uid, spec) for uid, spec in enumerate(specs)])
    memories, (a, b, y) = zip(*map(memory, specs), strict=True)
    before = memories[2].copy()
    run(call, list(memories))
    untouched = np.ones(before.size, bool)
    np.lib.stride_tricks.as_strided(untouched, y.shape, [s // y.itemsize for s in y.strides])[...] = False
    np.testing.assert_array_equal(memories[2][untouched], before[untouched])
    return np.array_equal(y, np.matmul(a.astype(np.float64), b.astype(np.float64)).astype(y.dtype))


def specs_of(of_a: Any, of_b: Any, dtype: DType, result: DType, how: tuple[str, ...]) -> list[TensorSpec]:
    y = PRODUCT.infer({"a": TensorSpec.packed(of_a, dtype), "b": TensorSpec.packed(of_b, dtype)})["y"].dims
    dims, dtypes = (of_a, of_b, y), (dtype, dtype, result)
    return [lying(*of) for of in zip(dims, dtypes, how, strict=True)]


@cases_in_one_test
@pytest.mark.pairwise
@pytest.mark.parametrize(("of_a", "of_b"), SHAPES, ids=str)
@pytest.mark.parametrize(("dtype", "result"), [r for r in RESULTS if r[0].is_floating])
def test_cublas_is_asked_for_the_product_without_copies(
    of_a: Any, of_b: Any, dtype: DType, result: DType
) -> None:
    for how in itertools.product(("packed", "swapped"), repeat=3):
        assert is_right(specs_of(of_a, of_b, dtype, result, how)), how


def test_cublas_is_asked_for_the_product_of_what_lies_in_any_way() -> None:
    choose = Choices(np.random.default_rng(3))
    taken = 0
    for _ in range(400):
        batch = choose.each(choose.one(range(4)), 1, 4)
        m, n, k = choose.each(3, 1, 5)
        dims = [
            (*(1 if choose.chance(0.3) else size for size in batch[-rank:] if rank), *matrix)
            for rank, matrix in ((len(batch), (m, k)), (choose.one(range(len(batch) + 1)), (k, n)))
        ]
        packed = {name: TensorSpec.packed(each) for name, each in zip("ab", dims, strict=True)}
        y = PRODUCT.infer(packed)["y"].dims
        specs = [choose.spec(each, DType.FLOAT32, None) for each in (*dims, y)]
        with contextlib.suppress(Refused):
            assert is_right(specs), str(specs)
            taken += 1
    assert taken > 150


@pytest.mark.parametrize(
    ("of_a", "of_b", "calls", "rows"),
    [
        ((8, 16, 32), (32, 4), 1, 128),
        ((8, 3, 16, 32), (8, 1, 32, 4), 1, 48),
        ((8, 3, 16, 32), (8, 3, 32, 4), 1, 16),
        ((8, 3, 16, 32), (3, 32, 4), 3, 16),
    ],
)
def test_a_batch_becomes_rows_or_one_dim_where_it_can(of_a: Any, of_b: Any, calls: int, rows: int) -> None:
    specs = specs_of(of_a, of_b, DType.FLOAT32, DType.FLOAT32, ("packed",) * 3)
    call = cublas_call(PRODUCT, [tensor(uid, spec) for uid, spec in enumerate(specs)])
    assert (len(call.offsets), call.head[3]) == (calls, rows)


def int8(of_a: Any, of_b: Any, how: tuple[str, ...] = ("packed",) * 3) -> list[TensorSpec]:
    return specs_of(of_a, of_b, DType.INT8, DType.INT32, how)


@pytest.mark.parametrize(
    "specs",
    [
        int8((4, 8), (8, 6)),
        int8((4, 6), (6, 8)),
        int8((4, 131_072), (131_072, 4)),
        specs_of((4, 8), (8, 4), DType.UINT8, DType.INT32, ("packed",) * 3),
        specs_of((4, 8), (8, 4), DType.FLOAT32, DType.FLOAT32, ("gaps", "packed", "packed")),
        specs_of((65, 66, 2, 3), (66, 3, 2), DType.FLOAT32, DType.FLOAT32, ("packed",) * 3),
    ],
    ids=["b's rows", "a's rows", "a sum of int8 may overflow", "uint8", "gaps", "65 calls"],
)
def test_what_cublas_is_not_asked_for(specs: list[TensorSpec]) -> None:
    with pytest.raises(Refused):
        cublas_call(PRODUCT, [tensor(uid, spec) for uid, spec in enumerate(specs)])


def test_cublas_takes_int8_in_groups_of_four() -> None:
    assert is_right(int8((3, 4, 8), (3, 8, 12)))
    assert is_right(int8((4, 8), (8, 6), ("packed", "swapped", "swapped")))


@pytest.mark.parametrize(
    ("dtype", "tf32", "compute"),
    [
        (DType.FLOAT32, False, 68),
        (DType.FLOAT32, True, 77),
        (DType.FLOAT16, True, 68),
        (DType.FLOAT64, True, 70),
    ],
)
def test_float32_is_rounded_to_tf32_only_where_that_is_allowed(
    dtype: DType, tf32: bool, compute: int
) -> None:
    specs = specs_of((4, 8), (8, 4), dtype, dtype, ("packed",) * 3)
    asked = msgspec.structs.replace(PRODUCT, numerics=Numerics(tf32=tf32))
    assert cublas_call(asked, [tensor(n, spec) for n, spec in enumerate(specs)]).tail[0] == compute


@pytest.mark.parametrize(("how", "refused"), [("packed", False), ("swapped", False), ("gaps", True)])
def test_a_matrix_with_gaps_is_not_read_by_what_follows_its_product(how: str, refused: bool) -> None:
    spec = lying((16, 16), DType.BFLOAT16, how)
    tensors = [tensor(uid, spec) for uid in range(2)]
    inner = TensorSpec.packed((16, 16), DType.FLOAT32)
    tensors += [tensor(2, inner, TensorRole.VIRTUAL), tensor(3, TensorSpec.packed((16, 16), DType.BFLOAT16))]
    product, relu = PRODUCT, Pointwise(mode=PointwiseMode.RELU, operands=(2,), result=3)
    graph = OperationGraph(tensors=tuple(tensors), operations=(product, relu))
    assert ("gaps" in (erratum(graph, "eng7_k24=21", 91900) or "")) is refused
    assert ("gaps" in (erratum(graph, "eng11", 91900) or "")) is refused


# The part of a large product that a self-check evaluates.


def after(dims: tuple[int, ...], of_b: tuple[int, ...], bias: tuple[int, ...]) -> OperationGraph:
    """relu(a) @ b + bias."""
    y = PRODUCT.infer({"a": TensorSpec.packed(dims), "b": TensorSpec.packed(of_b)})["y"].dims
    of = (dims, dims, of_b, y, bias, y)
    virtual = (TensorRole.BOUND, TensorRole.VIRTUAL, *(TensorRole.BOUND,) * 4)
    return OperationGraph(
        tensors=tuple(
            tensor(uid, TensorSpec.packed(each), role)
            for uid, (each, role) in enumerate(zip(of, virtual, strict=True))
        ),
        operations=(
            Pointwise(mode=PointwiseMode.RELU, operands=(0,), result=1),
            MatMul(a=1, b=2, y=3),
            Pointwise(mode=PointwiseMode.ADD, operands=(3, 4), result=5),
        ),
    )


@pytest.mark.parametrize(
    ("dims", "of_b", "bias"),
    [
        ((3, 90, 40), (40, 70), (1, 1, 70)),
        ((2, 3, 90, 40), (3, 40, 70), (1, 1, 90, 1)),
        ((2, 1, 90, 40), (1, 300, 40, 70), (2, 300, 90, 70)),
    ],
)
def test_a_part_of_the_operands_gives_that_part_of_the_results(dims: Any, of_b: Any, bias: Any) -> None:
    graph = after(dims, of_b, bias)
    part, found = sample_graph(graph, 400_000, 1 << 30)
    rng = np.random.default_rng(0)
    given = {uid: rng.standard_normal(graph.tensor(uid).dims) for uid in (0, 2, 4)}
    whole, cut = dict(given), {uid: array[found[uid]] for uid, array in given.items()}
    for operation in graph.operations:
        whole |= graph.evaluate(NumPy(), operation, whole)
        cut |= part.evaluate(NumPy(), operation, cut)
    for uid in (3, 5):
        assert part.tensor(uid).dims == cut[uid].shape
        np.testing.assert_allclose(cut[uid], whole[uid][found[uid]])
        assert cut[uid].flat[-1] == pytest.approx(whole[uid].flat[-1])
    products = cut[3].size * dims[-1]
    assert 50_000 < products <= 400_000 < whole[3].size * dims[-1]


def test_a_part_lies_where_its_strides_say() -> None:
    graph = after((90, 40), (40, 70), (1, 70))
    part, found = sample_graph(graph, 40_000, 1 << 30)
    data, whole = memory(graph.tensor(5).spec)
    start, spec = first_byte(graph.tensor(5), found[5]), part.tensor(5).spec
    assert start > 0
    assert start + spec.nbytes == data.nbytes
    steps = [step * data.itemsize for step in spec.strides]
    there = np.lib.stride_tricks.as_strided(data[start // data.itemsize :], spec.dims, steps)
    np.testing.assert_array_equal(there, whole[found[5]])


def test_every_place_in_a_tile_is_evaluated_somewhere() -> None:
    graph = after((4096, 64), (64, 4096), (1, 4096))
    rows, columns = sample_graph(graph, 1 << 20, 1 << 30)[1][3]
    for part in (rows, columns):
        places = np.arange(4096)[part]
        assert {*(places % 64)} == {*range(64)}
        assert places[-1] == 4095


def test_of_long_sums_as_few_places_are_evaluated_as_there_may_be() -> None:
    graph = after((8, 197, 3072), (3072, 768), (1, 1, 768))
    part, found = sample_graph(graph, 1 << 21, 1 << 18)  # less than 16 places of each dim take
    assert found
    assert part.tensor(5).dims[0] == 8
    assert all(16 >= size > 8 for size in part.tensor(5).dims[1:])


def test_a_graph_that_can_be_cut_along_the_first_dim_alone_is() -> None:
    pad = Pad(x=0, y=1, before=(0, 1, 0), after=(0, 0, 0), steps=(1, 1, 1))
    specs = [TensorSpec.packed(dims) for dims in ((8, 196, 768), (8, 197, 768))]
    graph = OperationGraph(tensors=tuple(map(tensor, range(2), specs)), operations=(pad,))
    assert sample_graph(graph, 1 << 21, 1 << 18)[0].tensor(1).dims == (1, 197, 768)
    assert evaluator_of(graph, ready=False) is OnHostInPart


def test_of_large_images_every_place_in_a_tile_of_channels_is_evaluated_of_one() -> None:
    g = GraphBuilder()
    x = g.input("x", (8, 64, 112, 112), "bfloat16", layout="NHWC")
    graph = g.build(y=g.max_pool(x, 3, stride=2, pad=1)).body
    part, found = sample_graph(graph, 1 << 21, 1 << 18)
    dims = part.tensor(graph.results[0]).dims
    assert (dims[0], *dims[2:]) == (1, 56, 56)
    assert 8 <= dims[1] <= 16
    channels = np.arange(64)[found[graph.results[0]][1]]
    assert {*(channels % 8)} == {*range(8)}
    assert sample_graph(graph, 1 << 40, 1 << 30)[1] == {}


def test_a_graph_is_evaluated_as_a_whole_where_it_is_small_or_must_be() -> None:
    graph = after((90, 40), (40, 70), (1, 70))
    assert sample_graph(graph, 1 << 30, 1 << 30) == (graph, {})
    assert sample_graph(graph, 1 << 30, 4000) != (graph, {})
    square = OperationGraph(
        tensors=tuple(tensor(uid, TensorSpec.packed((90, 90))) for uid in range(2)),
        operations=(MatMul(a=0, b=0, y=1),),
    )
    assert sample_graph(square, 1000, 1000) == (square, {})
