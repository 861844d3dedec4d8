"""Chains of pointwise operations in float32, block by block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cudnn_actor.engines.cpu.exact.evaluation import NumPy, exact, round_into
from cudnn_actor.engines.cpu.fast.pointwise import chain, make
from cudnn_actor.engines.cpu.scratch import Scratch, aligned_bytes
from cudnn_actor.protocol import DType, GraphBuilder, Layout, OperationGraph, TensorRole
from cudnn_actor.protocol.operations import FUNCTIONS, Pointwise, PointwiseMode
from cudnn_actor.protocol.types.tensor import TensorSpec

from ....in_one_test import cases_in_one_test
from .kernel_cases import check_any
from .kernel_runs import array_of, carrier_dtype, run

RNG = np.random.default_rng(38)
SPECIAL = (np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-40, -1e-40, 3e38)


def evaluated(graph: OperationGraph, arrays: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
    """All values of a graph by its definition, each rounded to its dtype."""
    values = {uid: exact(array) for uid, array in arrays.items()} | graph.given_values(NumPy(), ())
    with np.errstate(all="ignore"):
        for operation in graph.operations:
            for uid, result in graph.evaluate(NumPy(), operation, values).items():
                place = np.empty(graph.tensor(uid).dims, graph.tensor(uid).dtype.numpy)
                round_into(result, graph.tensor(uid).dtype, place)
                values[uid] = exact(place)
    return values


def computed(graph: OperationGraph, arrays: dict[int, np.ndarray], lanes: int) -> dict[int, np.ndarray]:
    """The results of a graph that is one chain, as they are carried."""
    written = {uid for operation in graph.operations for uid in operation.writes}
    stored = {uid for uid in written if graph.tensor(uid).role is TensorRole.BOUND}
    kernel = chain(graph.operations, {t.uid: t for t in graph.tensors}, stored, graph.constants)
    assert kernel is not None
    given = {
        uid: array_of(graph.tensor(uid).spec, array.astype(carrier_dtype(graph.tensor(uid).dtype)))
        for uid, array in arrays.items()
    }
    results = {uid: array_of(graph.tensor(uid).spec) for uid in sorted(stored)}
    run(kernel, given, results, lanes)
    return results


def random_inputs(graph: OperationGraph) -> dict[int, np.ndarray]:
    written = {uid for operation in graph.operations for uid in operation.writes}
    found = {}
    for uid in graph.bound:
        tensor = graph.tensor(uid)
        if uid not in written:
            values = RNG.normal(size=tensor.dims) * 3
            values.reshape(-1)[:: max(values.size // 8, 1)][:8] = SPECIAL[: len(values.reshape(-1)[:8])]
            with np.errstate(all="ignore"):
                found[uid] = values.astype(tensor.dtype.numpy)
    return found


DIMS = (2, 24, 17, 31)
"""More than one block of elements."""


def epilogue(g: GraphBuilder, layout: Layout, dtype: DType) -> Any:
    x = g.input("x", DIMS, dtype, layout=layout)
    bias, other = g.input("bias", (1, DIMS[1], 1, 1), dtype), g.input("other", DIMS, dtype)
    return g.build(y=g.relu(x + bias) + other)


def gates(g: GraphBuilder, layout: Layout, dtype: DType) -> Any:
    x, mask = g.input("x", DIMS, dtype, layout=layout), g.input("mask", (2, 1, 17, 31), "bool")
    kept = g.where(mask, g.swish(x), -1.5)
    return g.build(y=kept, z=g.sigmoid(kept) * 2.0, positive=(x > 0.5) & mask)


def bounds(g: GraphBuilder, layout: Layout, dtype: DType) -> Any:
    x, row = g.input("x", DIMS, dtype, layout=layout), g.input("row", (1, 1, 1, DIMS[3]), dtype)
    return g.build(y=g.tanh(g.minimum(g.maximum(x, row), 1.5)) - 0.25 * x)


@cases_in_one_test
@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype.is_floating])
@pytest.mark.parametrize("layout", [Layout.NCHW, Layout.NHWC])
@pytest.mark.parametrize("build", [epilogue, gates, bounds])
def test_a_chain_gives_what_its_operations_give_one_after_the_other(
    build: Callable[..., Any], layout: Layout, dtype: DType
) -> None:
    graph = build(GraphBuilder(), layout, dtype).body
    inputs = random_inputs(graph)
    wanted = evaluated(graph, inputs)
    unit = {2: 2.0**-7 if dtype is DType.BFLOAT16 else 2.0**-10, 4: 2.0**-24, 8: 2.0**-53}[dtype.itemsize]
    first = computed(graph, inputs, 1)
    for uid, got in first.items():
        np.testing.assert_allclose(got, wanted[uid], rtol=24 * unit, atol=24 * unit)
    for lanes in (2, 3):
        for uid, got in computed(graph, inputs, lanes).items():
            np.testing.assert_array_equal(got, first[uid])


def around_halves(dtype: DType) -> tuple[np.ndarray, np.ndarray]:
    """Values of float32, and what they are as a half type."""
    halves = np.arange(1 << 16, dtype=np.uint16).view(dtype.numpy).astype(np.float32)
    ties = ((halves[:-1].astype(np.float64) + halves[1:]) / 2).astype(np.float32)
    beside = [np.nextafter(ties, np.float32(towards)) for towards in (-np.inf, np.inf)]
    bits = RNG.integers(0, 1 << 32, 1 << 18, dtype=np.uint64).astype(np.uint32).view(np.float32)
    x = np.concatenate([halves, ties, *beside, bits])
    return x, x.astype(dtype.numpy).astype(np.float32)


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
def test_half_values_between_operations_are_correctly_rounded(dtype: DType) -> None:
    """Random bits of float32, and all values of the half type, the ties between them, and what is beside."""
    with np.errstate(all="ignore"):
        x, wanted = around_halves(dtype)
    spec = TensorSpec.packed(x.shape, DType.FLOAT32)
    half = TensorSpec.packed(x.shape, dtype)
    nodes = [
        Pointwise(mode=PointwiseMode.IDENTITY, operands=("x",), result="half"),
        Pointwise(mode=PointwiseMode.IDENTITY, operands=("half",), result="y"),
    ]
    kernel = chain(nodes, {"x": spec, "half": half, "y": spec}, {"y"})
    assert kernel is not None
    results = {"y": np.empty_like(x)}
    run(kernel, {"x": x}, results)
    number = ~np.isnan(x)
    np.testing.assert_array_equal(results["y"][number].view(np.uint32), wanted[number].view(np.uint32))
    assert np.isnan(results["y"][~number]).all()


def test_a_product_with_a_sigmoid_is_what_swish_is() -> None:
    x = array_of(TensorSpec.packed((3, 7000), DType.FLOAT32), RNG.normal(size=(3, 7000)).astype(np.float32))
    x[0, : len(SPECIAL)] = SPECIAL
    spec = TensorSpec.packed(x.shape, DType.FLOAT32)
    sigmoid = Pointwise(mode=PointwiseMode.SIGMOID, operands=("x",), result="s")
    product = Pointwise(mode=PointwiseMode.MUL, operands=("s", "x"), result="y")
    swish = Pointwise(mode=PointwiseMode.SWISH, operands=("x",), result="y")
    found = []
    for nodes, stored in (([sigmoid, product], {"y"}), ([swish], {"y"}), ([sigmoid, product], {"s", "y"})):
        kernel = chain(nodes, {"x": spec, "s": spec, "y": spec}, stored)
        assert kernel is not None
        results = {name: np.empty_like(x) for name in sorted(stored)}
        run(kernel, {"x": x}, results)
        found.append(results["y"])
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_allclose(found[2], found[1], rtol=3e-7)


@pytest.mark.parametrize("exponent", [-1.0, 0.5, 1.0, 2.0, 3.0, 4.0])
def test_powers_with_a_constant_are_those_of_numpy(exponent: float) -> None:
    x = RNG.normal(size=(3, 7000)).astype(np.float32)
    x[0, : len(SPECIAL)] = SPECIAL
    specs = {name: TensorSpec.packed(x.shape, DType.FLOAT32) for name in "xy"}
    specs["p"] = TensorSpec.packed((1, 1), DType.FLOAT32)
    node = Pointwise(mode=PointwiseMode.POW, operands=("x", "p"), result="y")
    kernel = chain([node], specs, {"y"}, {"p": exponent})
    assert kernel is not None
    y = np.empty_like(x)
    run(kernel, {"x": x}, {"y": y})
    with np.errstate(all="ignore"):
        wanted = np.power(x.astype(np.float64), np.full((1, 1), exponent)).astype(np.float32)
    np.testing.assert_allclose(y, wanted, rtol=3e-7)


@cases_in_one_test
@pytest.mark.parametrize("dims", [(1, 1, 24), (12, 1, 24), (1, 701, 1), (1, 701, 24), (1, 1, 1)])
@pytest.mark.parametrize("lanes", [1, 2, 3])
def test_what_is_repeated_in_all_blocks_is_read_in_each_run(dims: tuple[int, ...], lanes: int) -> None:
    shapes = {"x": (12, 701, 24), "row": dims, "gate": (12, 1, 24)}
    specs = {name: TensorSpec.packed(each, DType.FLOAT32) for name, each in shapes.items()}
    specs["above"] = specs["y"] = specs["x"]
    nodes = [
        Pointwise(mode=PointwiseMode.SUB, operands=("x", "row"), result="above"),
        Pointwise(mode=PointwiseMode.MUL, operands=("above", "gate"), result="y"),
    ]
    kernel = chain(nodes, specs, {"y"})
    assert kernel is not None
    given = {name: RNG.normal(size=each).astype(np.float32) for name, each in shapes.items()}
    y = np.empty_like(given["x"])
    memory = [Scratch(aligned_bytes(kernel.footprint(lanes))) for _ in range(lanes)]
    (step,) = kernel.bind(given, {"y": y}, memory)
    for _ in range(2):
        given["row"] += 1
        for call in step:
            call()
        np.testing.assert_array_equal(y, (given["x"] - given["row"]) * given["gate"])


@cases_in_one_test
@pytest.mark.parametrize("mode", [mode for mode in PointwiseMode if FUNCTIONS[mode].truth])
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT64, DType.FLOAT16, DType.INT32, DType.BOOL])
def test_truth_values_lie_where_their_strides_say(mode: PointwiseMode, dtype: DType) -> None:
    """With gaps between them, which stay as they are."""
    rng, length = np.random.default_rng(3), 40
    x = TensorSpec.packed((length,), dtype)
    given = {f"x{n}": array_of(x, rng.integers(0, 3, length)) for n in range(FUNCTIONS[mode].arity)}
    if dtype.is_floating:
        given["x0"][:9] = np.resize([np.nan, np.inf, -np.inf, 0.0], 9)
    node = Pointwise(mode=mode, operands=tuple(given), result="y")
    kernel = chain([node], {**dict.fromkeys(given, x), "y": TensorSpec.packed((length,), DType.BOOL)}, {"y"})
    assert kernel is not None
    memory = np.full(3 * length, 2, np.uint8)
    y = memory.view(np.bool_)[::3]
    run(kernel, given, {"y": y}, 1)
    wanted = node.evaluate(NumPy(), {name: exact(x) for name, x in given.items()}, {"result": x})["result"]
    np.testing.assert_array_equal(y, wanted != 0)
    assert (memory.reshape(length, 3)[:, 1:] == 2).all()


def test_scalars_are_read_in_each_run() -> None:
    spec, scalar = TensorSpec.packed((3, 5000), DType.FLOAT32), TensorSpec.packed((1, 1), DType.FLOAT32)
    node = Pointwise(mode=PointwiseMode.MUL, operands=("x", "factor"), result="y")
    kernel = chain([node], {"x": spec, "factor": scalar, "y": spec}, {"y"})
    assert kernel is not None
    x, y, factor = np.ones((3, 5000), np.float32), np.empty((3, 5000), np.float32), np.array(1, np.float32)
    assert kernel.footprint(1) == 0
    (step,) = kernel.bind({"x": x, "factor": factor}, {"y": y}, [Scratch(aligned_bytes(0))])
    for value in (2.0, -3.0):
        factor[...] = value
        for call in step:
            call()
        np.testing.assert_array_equal(y, value)


def test_random_problems_are_within_the_bounds_of_their_operations() -> None:
    check_any("pointwise", make, 150, least=101)
