"""Which products run by cuBLASLt with what follows them, and what cuBLASLt is asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from cudnn_actor.engines.cpu.exact.evaluation import EvaluatedPlan
from cudnn_actor.engines.cuda.library.libcublaslt import ALGORITHM_BYTES, Epilogue, Preference
from cudnn_actor.engines.cuda.operations import cublaslt
from cudnn_actor.engines.cuda.operations.cublaslt import LtProduct
from cudnn_actor.engines.cuda.planning.partition import cut
from cudnn_actor.engines.cuda.planning.product_halves import halves_of, is_split_by_default
from cudnn_actor.engines.cuda.planning.products import GraphProduct, product_of
from cudnn_actor.engines.cuda.planning.splitting import is_elementwise
from cudnn_actor.engines.cuda.running.barriers import waits
from cudnn_actor.engines.cuda.running.recipe import Buffer, GraphStep, ProductStep, Recipe, Scratch
from cudnn_actor.protocol import DType, GraphBuilder, GraphTensor, OperationGraph, Tensor

from ....in_one_test import cases_in_one_test

BFLOAT16, FLOAT16, FLOAT32, FLOAT64 = DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32, DType.FLOAT64
After = Callable[[GraphBuilder, Tensor], Tensor]


def biased(g: GraphBuilder, y: Tensor) -> Tensor:
    return y + g.input("bias", (*(1,) * (len(y.dims) - 1), y.dims[-1]), BFLOAT16)


def added(g: GraphBuilder, y: Tensor) -> Tensor:
    return y + g.input("c", y.dims, BFLOAT16)


def product(
    after: After = lambda g, y: y,
    a: tuple[int, ...] = (2, 5, 8),
    b: tuple[int, ...] = (8, 6),
    *,
    dtype: DType = BFLOAT16,
    result: DType | None = None,
    turned: str = "",
) -> OperationGraph:
    """A product and what follows it, of operands of which those in `turned` have their columns in order."""
    g = GraphBuilder()

    def given(name: str, dims: tuple[int, ...]) -> Tensor:
        if name not in turned:
            return g.input(name, dims, dtype)
        axes = (*range(len(dims) - 2), len(dims) - 1, len(dims) - 2)
        return g.transpose(g.input(name, tuple(dims[axis] for axis in axes), dtype), axes)

    y = after(g, given("a", a) @ given("b", b))
    graph = g.build(y=y.astype(result or dtype)).body
    parts = cut(graph)
    (piece,) = [graph] if parts is None else [each.graph for each in parts.pieces]
    return piece


PRODUCTS = {
    "alone": product(),
    "two matrices": product(a=(5, 8)),
    "float32": product(dtype=FLOAT32),
    "float64": product(dtype=FLOAT64),
    "float32 of half types": product(result=FLOAT32),
    "one row": product(a=(1, 8)),
    "one column": product(b=(8, 1)),
    "one row and a residual": product(added, a=(1, 8)),
    "bias": product(biased),
    "bias before": product(lambda g, y: g.input("bias", (1, 1, 6), BFLOAT16) + y),
    "a narrower bias": product(biased, result=FLOAT32),
    "residual": product(added),
    "bias and residual": product(lambda g, y: added(g, biased(g, y))),
    "residual and bias": product(lambda g, y: biased(g, added(g, y))),
    "relu": product(lambda g, y: g.relu(y)),
    "bias and relu": product(lambda g, y: g.relu(biased(g, y))),
    "bias and gelu": product(lambda g, y: g.pointwise("gelu_tanh", biased(g, y))),
    "all": product(lambda g, y: g.relu(added(g, biased(g, y)))),
    "float16": product(lambda g, y: y + g.input("bias", (1, 1, 6), FLOAT16), dtype=FLOAT16),
    "a turned": product(biased, turned="a"),
    "b turned": product(lambda g, y: added(g, biased(g, y)), turned="b"),
    "both turned": product(added, turned="ab"),
    "a batch": product(added, (3, 5, 8), (3, 8, 6), turned="b"),
    "two dims as a batch": product(biased, (2, 3, 5, 8), (2, 3, 8, 6)),
    "one matrix of a batch": product(biased, (1, 5, 8), (3, 8, 6)),
}


def memory(tensor: GraphTensor, seed: int) -> np.ndarray:
    values = np.random.default_rng(seed).integers(-3, 4, tensor.spec.nbytes // tensor.dtype.itemsize)
    return values.astype(tensor.dtype.numpy)


def seen(memory: np.ndarray, first: int, dims: tuple[int, ...], strides: tuple[int, ...]) -> np.ndarray:
    """Elements in memory. They lie in it."""
    assert first + sum((size - 1) * step for size, step in zip(dims, strides, strict=True)) < memory.size
    return np.lib.stride_tricks.as_strided(memory[first:], dims, [step * memory.itemsize for step in strides])


def evaluated(graph: OperationGraph, memories: Mapping[int, np.ndarray]) -> None:
    arrays = [
        seen(memories[uid], 0, graph.tensor(uid).dims, graph.tensor(uid).strides) for uid in graph.bound
    ]
    EvaluatedPlan("", graph).bind(np.empty(0, np.uint8)).run(arrays, ())


def run(product: LtProduct, memories: list[np.ndarray]) -> None:
    """What cuBLASLt says that it does with this: matrices are stored by columns."""
    rest = iter(memories)
    matrices = [(matrix, next(rest)) for matrix in product.matrices]
    epilogue = Epilogue(product.epilogue)
    bias = next(rest).astype(float) if Epilogue.BIAS in epilogue else None
    for number in range(product.batch):
        a, b, d, *c = (
            seen(data, number * each.step, (each.rows, each.columns), (1, each.leading))
            for each, data in matrices
        )
        turned = zip((a, b), product.transposed, strict=True)
        left, right = (each.T if turn else each for each, turn in turned)
        sums = left.astype(float) @ right.astype(float)
        for residual in c:
            sums = sums + residual.astype(float)
        if bias is not None:
            assert bias.shape == (d.shape[0],)
            sums = sums + bias[:, None]
        if Epilogue.RELU in epilogue:
            sums = np.maximum(sums, 0)
        if Epilogue.GELU in epilogue:
            sums = sums / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (sums + 0.044715 * sums**3)))
        d[...] = sums


def run_of(found: GraphProduct, memories: Mapping[int, np.ndarray]) -> None:
    """The same, of a graph's tensors."""
    given = dict(memories)
    if found.bias is not None:
        given[found.bias.uid] = given[found.bias.uid].astype(found.bias.dtype.numpy)
    run(found.product, [given[uid] for uid in found.uids])


@cases_in_one_test
@pytest.mark.parametrize("name", PRODUCTS)
def test_cublaslt_is_asked_for_what_the_graph_means(name: str) -> None:
    graph = PRODUCTS[name]
    found = product_of(graph)
    assert found is not None
    assert {*found.uids} == {*graph.bound}
    memories = {uid: memory(graph.tensor(uid), uid) for uid in graph.bound}
    others = {uid: values.copy() for uid, values in memories.items()}
    evaluated(graph, memories)
    run_of(found, others)
    for uid, wanted in memories.items():
        np.testing.assert_allclose(others[uid].astype(float), wanted.astype(float), rtol=2**-7, atol=1e-6)


OTHERS = {
    "rounded before a residual": product(lambda g, y: added(g, biased(g, y).astype(BFLOAT16))),
    "gelu by erf": product(lambda g, y: g.gelu(biased(g, y))),
    "a bound": product(lambda g, y: g.relu(y, upper=6.0)),
    "a slope": product(lambda g, y: g.leaky_relu(y, 0.1)),
    "a function before a residual": product(lambda g, y: added(g, g.relu(y))),
    "two functions": product(lambda g, y: g.relu(g.relu(y))),
    "two residuals": product(lambda g, y: added(g, y) + g.input("d", y.dims, BFLOAT16)),
    "twice the product": product(lambda g, y: y + y),
    "a number": product(lambda g, y: y + 1.0),
    "a residual of rows": product(lambda g, y: y + g.input("c", (2, 5, 1), BFLOAT16)),
    "a residual for each matrix": product(lambda g, y: y + g.input("c", (1, 5, 6), BFLOAT16)),
    "a residual of another type": product(lambda g, y: y + g.input("c", y.dims, FLOAT32)),
    "difference": product(lambda g, y: y - g.input("c", y.dims, BFLOAT16)),
    "a result in uint16": product(result=DType.UINT16),
    "a result in int8": product(result=DType.INT8),
    "truth values": product(result=DType.BOOL),
    "float64 of float32": product(dtype=FLOAT32, result=FLOAT64),
    "bfloat16 of float32": product(dtype=FLOAT32, result=BFLOAT16),
    "bfloat16 of float16": product(dtype=FLOAT16, result=BFLOAT16),
}


@cases_in_one_test
@pytest.mark.parametrize("name", OTHERS)
def test_what_cublaslt_has_no_epilogue_for_is_not_asked_of_it(name: str) -> None:
    assert product_of(OTHERS[name]) is None


def swiglu(g: GraphBuilder, y: Tensor) -> Tensor:
    gate = g.input("gate", y.dims, FLOAT32)
    return gate * g.sigmoid(gate) * y


def gated() -> OperationGraph:
    """As models have it: the gate's function comes before the product."""
    g = GraphBuilder()
    gate = g.input("gate", (2, 5, 6), FLOAT32)
    silu = gate * g.sigmoid(gate)
    y = silu * (g.input("a", (2, 5, 8), BFLOAT16) @ g.input("b", (8, 6), BFLOAT16))
    graph = g.build(y=y.astype(BFLOAT16)).body
    assert graph.operations[0].title == "sigmoid"
    return graph


GRAPHS = OTHERS | {
    "swiglu": product(swiglu),
    "a gate that is computed before": gated(),
    "a bias that is computed": product(
        lambda g, y: g.relu(y + g.exp(g.input("bias", (1, 1, 6), BFLOAT16)).astype(BFLOAT16))
    ),
    "a bias in float32": product(lambda g, y: g.gelu(y + g.input("bias", (1, 1, 6), FLOAT32))),
}
SPLIT = {
    "rounded before a residual": ["matmul", "add", "identity"],
    "gelu by erf": ["matmul"],
    "two residuals": ["matmul"],
    "a residual of rows": ["matmul"],
    "a result in uint16": ["matmul"],
    "truth values": ["matmul"],
    "bfloat16 of float32": ["matmul"],
    "swiglu": ["matmul"],
    "a gate that is computed before": ["matmul"],
    "a bias that is computed": ["matmul"],
    "a bias in float32": ["matmul", "add"],
}
"""What cuBLASLt computes of them."""


@cases_in_one_test
@pytest.mark.parametrize("name", SPLIT)
def test_cublaslt_computes_what_it_can_before_a_kernel_computes_the_rest(name: str) -> None:
    graph = GRAPHS[name]
    halves = halves_of(graph)
    assert halves is not None
    assert [each.title for each in halves.first.operations] == SPLIT[name]
    assert is_elementwise(halves.rest)
    found = product_of(halves.first)
    assert found is not None
    memories = {uid: memory(graph.tensor(uid), uid) for uid in graph.bound}
    others = {uid: values.copy() for uid, values in memories.items()}
    others[halves.between.uid] = memory(halves.between, 0)
    evaluated(graph, memories)
    run_of(found, others)
    evaluated(halves.rest, others)
    for uid, wanted in memories.items():
        np.testing.assert_allclose(others[uid].astype(float), wanted.astype(float), rtol=2**-7, atol=1e-6)


def test_what_is_slow_in_cudnns_graph_is_split_by_default() -> None:
    found = {name: halves_of(graph) for name, graph in GRAPHS.items()}
    split = {name for name, halves in found.items() if halves is not None and is_split_by_default(halves)}
    assert split == {"swiglu", "a gate that is computed before"}


def test_costly_functions_of_products_are_split_where_the_graph_rounds_to_a_half_type() -> None:
    def is_split(rows: int, function: After, *, rounded: bool = True, inner: int = 384) -> bool:
        def after(g: GraphBuilder, y: Tensor) -> Tensor:
            y = biased(g, y)
            return function(g, y.astype(BFLOAT16) if rounded else y)

        halves = halves_of(product(after, (32, rows, inner), (inner, 3072)))
        assert halves is not None
        assert halves.between.dtype is (BFLOAT16 if rounded else FLOAT32)
        return is_split_by_default(halves)

    assert is_split(197, lambda g, y: g.gelu(y))
    assert is_split(197, lambda g, y: g.erf(y))
    assert is_split(4, lambda g, y: g.gelu(y))
    assert is_split(49, lambda g, y: g.gelu(y), inner=768)
    assert not is_split(1, lambda g, y: g.gelu(y))
    assert not is_split(4, lambda g, y: g.gelu(y), inner=96)
    assert not is_split(4, lambda g, y: g.gelu(y), rounded=False)
    assert not is_split(197, lambda g, y: g.gelu(y), inner=768)
    assert not is_split(197, lambda g, y: g.gelu(y), rounded=False)
    assert not is_split(197, lambda g, y: g.exp(y))


def test_an_overwritten_operand_must_not_be_read_later() -> None:
    def overwriting(name: str) -> OperationGraph:
        graph = product(lambda g, y: added(g, biased(g, y)), (5, 6), (6, 6))
        uids = {tensor.name: tensor.uid for tensor in graph.tensors}
        y = msgspec.structs.replace(graph.tensor(graph.results[0]), overwrites=uids[name])
        others = [tensor for tensor in graph.tensors if tensor.uid != y.uid]
        return OperationGraph(tensors=(*others, y), operations=graph.operations)

    assert product_of(overwriting("c")) is not None
    assert product_of(overwriting("a")) is None


class Description:
    """In the place of a descriptor of cuBLASLt's: it keeps what it is told, and is its own pointer."""

    def __init__(self, kind: str, *_: int) -> None:
        self.kind, self.said = kind, dict[int, int]()
        self.pointer = self

    def set(self, attribute: int, value: Any) -> None:
        self.said[attribute] = value.value


NOT_SPLIT, IN_PLACE, COMPUTE_TYPE, OUTPUT_TYPE = 0, 1, 2, 4
"""cublasLtReductionScheme_t: how the parts of a split sum are added up."""


class Heuristics:
    """In the place of cuBLASLt's library: it has an algorithm for each reduction that it may use.

    It follows the header: without a mask, all reductions may be used.
    """

    def cublasLtMatmulAlgoGetHeuristic(self, *given: Any) -> None:  # noqa: N802 - the library's name
        limits, most, found, count = given[-4:]
        assert limits.kind == "MatmulPreference"
        mask = limits.said.get(Preference.REDUCTION_SCHEME_MASK, IN_PLACE | COMPUTE_TYPE | OUTPUT_TYPE)
        schemes = [each for each in (IN_PLACE, OUTPUT_TYPE, COMPUTE_TYPE, NOT_SPLIT) if each & mask == each]
        for number, scheme in enumerate(schemes[:most]):
            found._obj[number].algorithm[0] = scheme
        count._obj.value = len(schemes[:most])


def test_sums_are_split_only_into_parts_of_the_type_that_is_computed_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Parts of the result's type would be rounded before they are added up."""
    handle = SimpleNamespace(library=Heuristics(), pointer=None)
    monkeypatch.setattr(cublaslt, "thread_lt_handle", lambda: handle)
    monkeypatch.setattr(cublaslt, "Described", Description)
    found = product_of(PRODUCTS["all"])
    assert found is not None
    algorithms = [each.algorithm for each in found.product.with_algorithms(1 << 20, 8)]
    assert [each[0] for each in algorithms] == [COMPUTE_TYPE, NOT_SPLIT]
    assert {len(each) for each in algorithms} == {ALGORITHM_BYTES}


def step() -> ProductStep:
    graph = PRODUCTS["bias"]
    found = product_of(graph)
    assert found is not None
    chosen = msgspec.structs.replace(found.product, algorithm=bytes(range(64)), workspace=9)
    return ProductStep(chosen, (Buffer(0), Buffer(1), Buffer(2), Buffer(3), Scratch(0, 9)))


def test_a_plan_keeps_the_algorithm_and_its_tag_names_it() -> None:
    recipe = Recipe("", (step(),), 256, 4, 0)
    data = msgspec.msgpack.encode(recipe)
    assert msgspec.msgpack.decode(data, type=Recipe) == recipe
    other = msgspec.structs.replace(step().product, algorithm=bytes(64))
    assert step().product.name != other.name
    damaged = msgspec.msgpack.decode(data)
    damaged["steps"][0]["product"]["algorithm"] = b"short"
    with pytest.raises(msgspec.ValidationError, match="64 bytes"):
        msgspec.msgpack.decode(msgspec.msgpack.encode(damaged), type=Recipe)


def test_cudnns_kernel_waits_for_a_product_that_writes_what_it_adds() -> None:
    reads = GraphStep("eng0", 0, (1, 2, 3), (Buffer(4), Buffer(2), Buffer(5)), beside=(1,))
    assert waits([step(), reads]) == [False, True]
