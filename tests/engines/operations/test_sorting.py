"""Top-k and sorting against NumPy, Python's own sort and ONNX's reference implementation."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from cudnn_actor.protocol import DType, GraphBuilder, GraphTensor, InvalidRequest, Tensor, TensorSpec, TopK
from cudnn_actor.protocol.messages.lowering import lower

from ...in_one_test import cases_in_one_test
from .. import host_cuda
from ..differences import check_gradients, computed
from ..onnx_reference import reference
from ..problems import normal
from ..workbench import Workbench, spread

NAN, INF = float("nan"), float("inf")


def best(x: np.ndarray, operation: TopK[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Values and places, line by line, by Python's sort, which keeps the order of equal ones."""
    lines = np.moveaxis(x, operation.axis, -1)
    found = np.empty((*lines.shape[:-1], operation.k), np.int64)
    for at in np.ndindex(lines.shape[:-1]):
        numbers = lines[at].tolist()

        def key(place: int, numbers: list[Any] = numbers) -> Any:
            number = numbers[place]
            nan = math.isnan(number)
            order = (nan, 0 if nan else number)
            return (-order[0], -order[1]) if operation.largest else order

        first = sorted(range(len(numbers)), key=key)[: operation.k]
        found[at] = first if operation.in_order else sorted(first)
    places = np.moveaxis(found, -1, operation.axis)
    return np.take_along_axis(x, places, operation.axis), places


def drawn(dims: tuple[int, ...], dtype: DType) -> np.ndarray:
    """Numbers of which many are equal; of floats some are NaN, infinite or -0."""
    rng = np.random.default_rng(5)
    x = rng.integers(0 if dtype.numpy.kind in "ub" else -9, 9, dims).astype(np.float64)
    if dtype.is_floating:
        special = rng.random(dims) < 0.2
        x[special] = rng.choice([NAN, INF, -INF, -0.0, 0.0], int(special.sum()))
    return x.astype(dtype.numpy)


def asked(k: int, **attributes: Any) -> TopK[Any]:
    return TopK(x="x", values="values", indices="indices", k=k, **attributes)


def check(x: np.ndarray, operation: TopK[Any], values: np.ndarray, indices: np.ndarray) -> None:
    wanted, places = best(x, operation)
    np.testing.assert_array_equal(indices, places)
    assert values.tobytes() == wanted.tobytes()


@cases_in_one_test
@pytest.mark.each_value
@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("largest", [False, True])
def test_the_best_are_found_in_order(bench: Workbench, dtype: DType, largest: bool) -> None:
    x = drawn((3, 40, 2), dtype)
    for gaps, in_order, k in ((False, True, 40), (True, True, 7), (False, False, 12), (True, False, 1)):
        operation = asked(k, axis=1, largest=largest, in_order=in_order)
        spec = TensorSpec.like(x)
        specs = {"x": spec, **operation.infer({"x": spec})}
        if gaps:
            specs = {name: spread(each.dims, each.dtype) for name, each in specs.items()}
        refs = {name: bench.empty(each) for name, each in specs.items()} | {"x": bench.place(x, specs["x"])}
        values = bench.run(operation.with_operands(refs.__getitem__))
        check(x, operation, values, bench.read(refs["indices"]))


@pytest.mark.parametrize("largest", [0, 1])
def test_top_k_is_onnxs(bench: Workbench, largest: int) -> None:
    """Which leaves equal elements open."""
    x = normal((5, 9, 4), DType.FLOAT32, 3)
    operation = asked(4, axis=1, largest=bool(largest))
    refs = {"x": bench.place(x)}
    refs |= {name: bench.empty(spec) for name, spec in operation.infer({"x": refs["x"].spec}).items()}
    values = bench.run(operation.with_operands(refs.__getitem__))
    wanted = reference("TopK", [x, np.array([4])], 2, axis=1, largest=largest)
    np.testing.assert_array_equal(values, wanted[0])
    np.testing.assert_array_equal(bench.read(refs["indices"]), wanted[1])


@pytest.mark.parametrize(("dims", "k"), [((3, 0), 0), ((0, 5), 2), ((4, 5), 0)])
def test_nothing_is_found_of_nothing(bench: Workbench, dims: tuple[int, ...], k: int) -> None:
    x = bench.place(np.zeros(dims, np.float32))
    values = bench.empty(TensorSpec.packed((dims[0], k)))
    assert bench.run(TopK(x=x, values=values, k=k)).size == 0


@pytest.mark.parametrize(("k", "axis", "field"), [(5, 0, "k"), (-1, 0, "k"), (2, 2, "axis"), (True, 0, "k")])
def test_a_mistake_names_its_field(bench: Workbench, k: int, axis: int, field: str) -> None:
    x = bench.empty(TensorSpec.packed((4, 6)))
    with pytest.raises(InvalidRequest) as caught:
        lower(TopK(x=x, values=x, k=k, axis=axis))
    assert caught.value.field == field


def test_a_builder_sorts_as_numpy_does() -> None:
    g = GraphBuilder()
    x = g.input("x", (5, 6), "float64")
    top = g.top_k(x, 2, 0, largest=False)
    graph = g.build(
        ascending=g.sort(x, 0),
        descending=g.sort(x, descending=True),
        places=g.argsort(x, 0),
        least=top.values,
        at=top.indices,
    )
    given = {"x": drawn((5, 6), DType.FLOAT64)}
    found = computed(graph, given)
    np.testing.assert_array_equal(found["ascending"], np.sort(given["x"], 0))
    np.testing.assert_array_equal(found["descending"], np.sort(given["x"])[:, ::-1])
    np.testing.assert_array_equal(found["places"], np.argsort(given["x"], 0, kind="stable"))
    np.testing.assert_array_equal(found["least"], np.sort(given["x"], 0)[:2])
    np.testing.assert_array_equal(found["at"], found["places"][:2])


def test_gradients_go_to_the_elements_that_were_found() -> None:
    def function(g: GraphBuilder, x: Tensor) -> list[Tensor]:
        return [g.top_k(x, 2, 1).values, g.square(g.sort(x, 0))]

    def twice(g: GraphBuilder, x: Tensor) -> Tensor:
        return g.grad(g.square(g.sort(x, 0)), x)

    given = {"x": normal((4, 5), DType.FLOAT64, 2)}
    check_gradients(function, given)
    check_gradients(twice, given, tolerance=1e-6)


# The kernel, on the host.

LINES: list[tuple[tuple[int, ...], int, int]] = [
    ((3, 20), 5, 1),
    ((2, 32, 3), 32, 1),
    ((700,), 10, 0),
    ((2, 700), 700, 1),
    ((2, 700), 300, 1),
    ((9000,), 1100, 0),
]
"""Dims, k and an axis: lines that fit into a warp, or a block; lists that do, and longer ones."""


@pytest.fixture
def _on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    host_cuda.use(monkeypatch)


def kernels() -> list[tuple[TopK[Any], dict[str, TensorSpec]]]:
    dtypes = itertools.cycle(DType)
    found = []
    for (dims, k, axis), largest, in_order in itertools.product(LINES, (False, True), (False, True)):
        operation = asked(k, axis=axis, largest=largest, in_order=in_order)
        spec = TensorSpec.packed(dims, next(dtypes))
        specs = {"x": spec, **operation.infer({"x": spec})}
        if dims[0] == 2:
            specs = {name: spread(each.dims, each.dtype) for name, each in specs.items()}
        found.append((operation, specs))
    return found


KERNELS = kernels()


@pytest.mark.usefixtures("_on_the_host")
def test_the_kernel_finds_the_best() -> None:
    tensors = [
        [GraphTensor(uid=0, dims=s.dims, strides=s.strides, dtype=s.dtype) for s in specs.values()]
        for _, specs in KERNELS
    ]
    operations = (operation for operation, _ in KERNELS)
    host_cuda.compile_together(itertools.chain.from_iterable(map(host_cuda.sources_of, operations, tensors)))
    for operation, specs in KERNELS:
        x = drawn(specs["x"].dims, specs["x"].dtype)
        if x.size > 500 and specs["x"].dtype.is_floating:
            x += normal(x.shape, DType.FLOAT64, 9).astype(x.dtype) * 100
        got = host_cuda.launched(operation, specs, {"x": x})
        check(x, operation, got["values"], got["indices"])
