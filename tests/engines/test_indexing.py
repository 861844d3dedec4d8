"""Gathers against NumPy and ONNX's reference implementation, on every engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cudnn_actor.protocol import (
    DType,
    Gather,
    GatherElements,
    GatherND,
    GraphBuilder,
    InvalidRequest,
    Operation,
    TensorSpec,
)
from cudnn_actor.protocol.lowering import lower

from .differences import computed
from .onnx_reference import reference
from .workbench import Workbench, spread

I32, I64 = DType.INT32, DType.INT64


def drawn(dims: tuple[int, ...], sizes: Any, dtype: DType = I64) -> np.ndarray:
    """Indices below these sizes, and as many that count from the end."""
    return np.random.default_rng(7).integers(-np.asarray(sizes), sizes, dims).astype(dtype.numpy)


def numbers(dims: tuple[int, ...], dtype: DType = DType.FLOAT32) -> np.ndarray:
    """All different, as far as the dtype has that many."""
    return np.arange(1, 1 + np.prod(dims, dtype=int)).reshape(dims).astype(dtype.numpy)


def gathered(
    bench: Workbench, operation: Any, x: np.ndarray, indices: np.ndarray, *, gaps: bool = False
) -> np.ndarray:
    """What an engine gathers."""
    specs = {"x": TensorSpec.like(x), "indices": TensorSpec.like(indices)}
    y = operation.infer(specs)["y"]
    if gaps:
        specs = {name: spread(spec.dims, spec.dtype) for name, spec in specs.items()}
        y = spread(y.dims, y.dtype)
    operands = {
        "x": bench.place(x, specs["x"]),
        "indices": bench.place(indices, specs["indices"]),
        "y": bench.empty(y),
    }
    return bench.run(operation.with_operands(operands.__getitem__))


def ask(kind: type[Operation[Any]], **attributes: Any) -> Any:
    return kind(x="x", indices="indices", y="y", **attributes)  # type: ignore[call-arg]


DIMS: list[tuple[tuple[int, ...], int, tuple[int, ...]]] = [
    ((5, 4, 6), 0, (3,)),
    ((5, 4, 6), 1, (2, 3)),
    ((5, 4, 6), -1, ()),
    ((7,), 0, (2, 1, 3)),
    ((3, 8, 16), 1, (9,)),
]
each_dims = pytest.mark.parametrize(("x", "axis", "indices"), DIMS)


@each_dims
@pytest.mark.parametrize("gaps", [False, True])
def test_gather_is_numpys_take(
    bench: Workbench, x: tuple[int, ...], axis: int, indices: tuple[int, ...], gaps: bool
) -> None:
    for dtype, of_indices in ((DType.FLOAT32, I64), (DType.BFLOAT16, I32), (DType.UINT64, I32)):
        array, at = numbers(x, dtype), drawn(indices, x[axis], of_indices)
        got = gathered(bench, ask(Gather, axis=axis), array, at, gaps=gaps)
        np.testing.assert_array_equal(got, np.take(array, at, axis))
    np.testing.assert_array_equal(got, reference("Gather", [array, at], axis=axis))


@pytest.mark.parametrize("dtype", DType)
def test_every_dtype_is_moved_as_it_is(bench: Workbench, dtype: DType) -> None:
    bits = np.random.default_rng(1).integers(0, 256, (6, 4 * dtype.itemsize), np.uint8)
    x = (bits % 2).astype(bool)[:, :4] if dtype is DType.BOOL else bits.view(dtype.numpy)
    at = drawn((5,), 6)
    assert gathered(bench, ask(Gather), x, at).tobytes() == x[at].tobytes()


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("axis", [2, 3])
def test_samples_may_have_indices_of_their_own(bench: Workbench, batch: int, axis: int) -> None:
    x, at = numbers((2, 3, 4, 5)), drawn((2, 3, 6)[: batch + 1], (4, 5)[axis - 2])
    got = gathered(bench, ask(Gather, axis=axis, batch_dims=batch), x, at)
    for place in np.ndindex(x.shape[:batch]):
        np.testing.assert_array_equal(got[place], np.take(x[place], at[place], axis - batch))


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize(
    ("x", "axis", "indices"),
    [((5, 4, 6), 0, (3, 4, 6)), ((5, 4, 6), 1, (2, 9, 5)), ((5, 4, 6), -1, (5, 4, 1)), ((7,), 0, (12,))],
)
def test_elements_are_those_along_an_axis(
    bench: Workbench, x: tuple[int, ...], axis: int, indices: tuple[int, ...], gaps: bool
) -> None:
    """PyTorch's meaning of indices with smaller dims; NumPy and ONNX have the others alone."""
    array, at = numbers(x), drawn(indices, x[axis])
    got = gathered(bench, ask(GatherElements, axis=axis), array, at, gaps=gaps)
    part = tuple(slice(None) if n == axis % len(x) else slice(size) for n, size in enumerate(indices))
    np.testing.assert_array_equal(got, np.take_along_axis(array[part], at, axis))
    positive = axis % len(x)  # the reference refuses -1
    np.testing.assert_array_equal(got, reference("GatherElements", [array[part], at], axis=positive))


@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize(
    ("x", "indices", "batch"),
    [
        ((5, 4, 6), (3, 2), 0),
        ((5, 4, 6), (2, 7, 3), 0),
        ((5, 4, 6), (1,), 0),
        ((2, 5, 4, 6), (2, 3, 2), 1),
        ((2, 3, 4, 5), (2, 3, 1), 2),
        ((2, 3, 4), (2, 5, 2), 1),
    ],
)
def test_lists_of_indices_name_parts(
    bench: Workbench, x: tuple[int, ...], indices: tuple[int, ...], batch: int, gaps: bool
) -> None:
    array, at = numbers(x), drawn(indices, x[batch : batch + indices[-1]])
    got = gathered(bench, ask(GatherND, batch_dims=batch), array, at, gaps=gaps)
    np.testing.assert_array_equal(got, reference("GatherND", [array, at], batch_dims=batch))
    for place in np.ndindex(indices[:-1]):
        np.testing.assert_array_equal(got[place], array[place[:batch]][tuple(at[place])])


def test_indices_out_of_range_count_as_the_nearest(bench: Workbench) -> None:
    x = numbers((4, 3))
    at = np.array([-5, -(1 << 62), 4, (1 << 62), -(1 << 63)])
    np.testing.assert_array_equal(gathered(bench, ask(Gather), x, at), x[[0, 0, 3, 3, 0]])
    rows, pairs = np.array([[9, -9, 1]]), np.array([[7, -7], [-7, 7]])
    np.testing.assert_array_equal(gathered(bench, ask(GatherElements), x, rows), [[10, 2, 6]])
    np.testing.assert_array_equal(gathered(bench, ask(GatherND), x, pairs), [x[3, 0], x[0, 2]])


@pytest.mark.parametrize(
    ("x", "indices", "wanted"), [((3, 4), (0,), (0, 4)), ((3, 0), (5,), (5, 0)), ((0, 4), (2, 0), (2, 0, 4))]
)
def test_nothing_is_gathered_of_nothing(
    bench: Workbench, x: tuple[int, ...], indices: tuple[int, ...], wanted: tuple[int, ...]
) -> None:
    got = gathered(bench, ask(Gather), np.zeros(x, np.float32), np.zeros(indices, np.int64))
    assert got.shape == wanted


@pytest.mark.parametrize(
    ("kind", "attributes", "dims", "field"),
    [
        (Gather, {"axis": 2}, ((3, 4), (2,)), "axis"),
        (Gather, {"axis": 1, "batch_dims": 2}, ((3, 4), (3, 4)), "batch_dims"),
        (Gather, {"axis": 1, "batch_dims": 1}, ((3, 4), (2, 5)), "indices"),
        (Gather, {"batch_dims": -1}, ((3, 4), (3, 4)), "batch_dims"),
        (Gather, {}, ((0, 4), (2,)), "x"),
        (GatherElements, {}, ((3, 4), (2,)), "indices"),
        (GatherElements, {}, ((3, 4), (2, 5)), "indices"),
        (GatherElements, {"axis": -3}, ((3, 4), (2, 4)), "axis"),
        (GatherND, {}, ((3, 4), (2, 3)), "indices"),
        (GatherND, {}, ((3, 4), (2, 0)), "indices"),
        (GatherND, {}, ((3, 4), ()), "indices"),
        (GatherND, {"batch_dims": 2}, ((3, 4), (3, 4, 1)), "batch_dims"),
    ],
)
def test_a_mistake_names_its_field(
    bench: Workbench, kind: Any, attributes: dict[str, Any], dims: tuple[tuple[int, ...], ...], field: str
) -> None:
    x, indices = dims
    made = {"x": TensorSpec.packed(x), "indices": TensorSpec.packed(indices, I64), "y": TensorSpec.packed(x)}
    refs = {name: bench.empty(spec) for name, spec in made.items()}
    with pytest.raises(InvalidRequest) as caught:
        lower(ask(kind, **attributes).with_operands(refs.__getitem__))
    assert caught.value.field == field


def test_indices_are_whole_numbers_of_32_or_64_bits() -> None:
    g = GraphBuilder()
    with pytest.raises(InvalidRequest, match="int32 or int64"):
        g.take(g.input("x", (3,)), g.input("i", (2,), "uint8"))


# In graphs.


def test_a_builder_gathers_as_numpy_does() -> None:
    g = GraphBuilder()
    x, i = g.input("x", (5, 4, 6)), g.input("i", (2, 3), I64)
    e, n = g.input("e", (5, 1, 6), I32), g.input("n", (3, 2), I64)
    graph = g.build(
        rows=g.take(x, i, 1),
        flat=g.take(x, i),
        along=g.take_along_axis(x, e, 1),
        broadcast=g.take_along_axis(x, e[:1], -2),
        of_few=g.take_along_axis(x[:, :, :1], e, 1),
        parts=g.gather_nd(x, n),
    )
    given = {"x": numbers((5, 4, 6)), "i": drawn((2, 3), 4), "e": drawn((5, 1, 6), 4, I32)}
    given["n"] = drawn((3, 2), (5, 4))
    found = computed(graph, given)
    a, i_, e_ = given["x"], given["i"], given["e"].astype(np.int64)
    np.testing.assert_array_equal(found["rows"], np.take(a, i_, 1))
    np.testing.assert_array_equal(found["flat"], np.take(a, i_))
    np.testing.assert_array_equal(found["along"], np.take_along_axis(a, e_, 1))
    np.testing.assert_array_equal(found["broadcast"], np.take_along_axis(a, e_[:1], -2))
    np.testing.assert_array_equal(found["of_few"], np.take_along_axis(a[:, :, :1], e_, 1))
    np.testing.assert_array_equal(found["parts"], a[tuple(given["n"].T)])
