"""Gathers and scatters against NumPy and ONNX's reference implementation, on every engine."""

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
    Scatter,
    ScatterElements,
    ScatterND,
    ScatterReduction,
    Tensor,
    TensorSpec,
)
from cudnn_actor.protocol.messages.lowering import lower

from ...in_one_test import cases_in_one_test
from ..differences import check_gradients, computed
from ..onnx_reference import reference
from ..workbench import Workbench, spread

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


def scattered(
    bench: Workbench, operation: Any, arrays: dict[str, np.ndarray], *, gaps: bool = False
) -> np.ndarray:
    """What an engine scatters."""
    specs = {name: TensorSpec.like(array) for name, array in arrays.items()}
    specs |= operation.infer(specs)
    if gaps:
        specs = {name: spread(spec.dims, spec.dtype) for name, spec in specs.items()}
    operands = {name: bench.place(array, specs[name]) for name, array in arrays.items()}
    operands["y"] = bench.empty(specs["y"])
    given = {"updates": "updates"}
    return bench.run(operation.with_operands({**given, **operands}.__getitem__))


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


@cases_in_one_test
@pytest.mark.pairwise(of_exact=True)
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


@cases_in_one_test
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


@cases_in_one_test
@pytest.mark.pairwise(of_exact=True)
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


@cases_in_one_test
@pytest.mark.pairwise(of_exact=True)
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


@pytest.mark.parametrize(
    ("operation", "of_indices", "size"),
    [
        (Gather(x=0, indices=1, y=2, axis=1), (6, 5), 4),
        (Gather(x=0, indices=1, y=2, axis=2, batch_dims=1), (7, 5), 6),
        (GatherElements(x=0, indices=1, y=2, axis=1), (5, 9, 4), 4),
        (GatherND(x=0, indices=1, y=2), (9, 5, 2), (7, 4)),
        (GatherND(x=0, indices=1, y=2, batch_dims=1), (7, 5, 1), 4),
    ],
)
def test_a_part_follows_from_a_part_of_the_indices(operation: Any, of_indices: Any, size: Any) -> None:
    """What a self-check of a large gather relies on."""
    values = {"x": numbers((7, 4, 6)), "indices": drawn(of_indices, size)}
    specs = {name: TensorSpec.like(array) for name, array in values.items()}
    y = operation.infer(specs)["y"]
    region = tuple(slice(size % 2, None, 2 + axis) for axis, size in enumerate(y.dims))
    needed = operation.needs(specs | {"y": y}, {"y": region})
    part = {name: values[name][region] for name, region in needed.items()}
    wanted = operation.evaluate(np, values, {"y": y})["y"][region]
    found = operation.evaluate(np, part, {"y": TensorSpec.packed(wanted.shape, y.dtype)})["y"]
    np.testing.assert_array_equal(found, wanted)


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


@cases_in_one_test
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


# Scatters.

each_reduction = pytest.mark.parametrize("reduction", ScatterReduction)
_ONE_BY_ONE: dict[ScatterReduction, Any] = {
    ScatterReduction.NONE: lambda old, new: new,
    ScatterReduction.ADD: np.add,
    ScatterReduction.MUL: np.multiply,
    ScatterReduction.MIN: np.minimum,
    ScatterReduction.MAX: np.maximum,
}


def put(kind: type[Operation[Any]], **attributes: Any) -> Any:
    return kind(x="x", indices="indices", updates="updates", y="y", **attributes)  # type: ignore[call-arg]


def one_by_one(x: np.ndarray, places: Any, reduction: ScatterReduction) -> np.ndarray:
    """x after each (place, update) in order."""
    y = x.copy()
    for place, update in places:
        y[place] = _ONE_BY_ONE[reduction](y[place], update)
    return y


def whole(dims: tuple[int, ...], seed: int, dtype: DType = DType.FLOAT32) -> np.ndarray:
    """Small numbers, whose sums and products are exact."""
    return np.random.default_rng(seed).integers(-3, 4, dims).astype(dtype.numpy)


@cases_in_one_test
@pytest.mark.pairwise(of_exact=True)
@each_reduction
@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("dims", DIMS)
def test_slices_are_written_one_after_the_other(
    bench: Workbench, dims: Any, reduction: ScatterReduction, gaps: bool
) -> None:
    """With indices that occur more than once."""
    x, axis, indices = dims
    dtype = DType.FLOAT64 if gaps else DType.INT32
    given = {"x": whole(x, 1, dtype), "indices": drawn(indices, min(3, x[axis]))}
    moved = (*x[: axis % len(x)], *indices, *x[axis % len(x) + 1 :])
    given["updates"] = whole(moved, 2, dtype)
    before = (slice(None),) * (axis % len(x))
    places = (((*before, given["indices"][n]), given["updates"][(*before, *n)]) for n in np.ndindex(indices))
    got = scattered(bench, put(Scatter, axis=axis, reduction=reduction), given, gaps=gaps)
    np.testing.assert_array_equal(got, one_by_one(given["x"], places, reduction))


@cases_in_one_test
@pytest.mark.pairwise(of_exact=True)
@each_reduction
@pytest.mark.parametrize("gaps", [False, True])
@pytest.mark.parametrize("dims", [((5, 4, 6), 1, (2, 9, 5)), ((5, 3), -1, (5, 6)), ((7,), 0, (20,))])
def test_elements_are_written_one_after_the_other(
    bench: Workbench, dims: Any, reduction: ScatterReduction, gaps: bool
) -> None:
    x, axis, indices = dims
    dtype = DType.FLOAT32 if gaps else DType.UINT64
    array = whole(x, 1, DType.INT64) % 4
    given = {"x": array.astype(dtype.numpy), "indices": drawn(indices, x[axis], I32)}
    given["updates"] = (whole(indices, 2, DType.INT64) % 4).astype(dtype.numpy)
    at, along = given["indices"], axis % len(x)
    places = (((*n[:along], at[n], *n[along + 1 :]), given["updates"][n]) for n in np.ndindex(indices))
    got = scattered(bench, put(ScatterElements, axis=axis, reduction=reduction), given, gaps=gaps)
    np.testing.assert_array_equal(got, one_by_one(given["x"], places, reduction))


@each_reduction
def test_scatters_are_onnxs(bench: Workbench, reduction: ScatterReduction) -> None:
    """Whose meaning for indices that occur twice is the same, but for none."""
    x, again = whole((5, 4, 6), 1), reduction is not ScatterReduction.NONE
    at = np.argsort(np.random.default_rng(3).random((5, 4, 6)), axis=1)
    at = at // 2 if again else at - 4 * (at > 1)
    updates = whole(at.shape, 2)
    got = scattered(
        bench,
        put(ScatterElements, axis=1, reduction=reduction),
        {"x": x, "indices": at, "updates": updates},
    )
    wanted = reference("ScatterElements", [x, at, updates], axis=1, reduction=reduction.value)
    np.testing.assert_array_equal(got, wanted)
    pairs = np.array([[0, 1], [4, -1], [2, 2], [0, 1] if again else [1, 1]])
    parts = whole((4, 6), 3)
    got = scattered(bench, put(ScatterND, reduction=reduction), {"x": x, "indices": pairs, "updates": parts})
    wanted = reference("ScatterND", [x, pairs, parts], reduction=reduction.value)
    np.testing.assert_array_equal(got, wanted)


@cases_in_one_test
@pytest.mark.pairwise(of_exact=True)
@each_reduction
@pytest.mark.parametrize(
    ("x", "indices", "batch"),
    [((5, 4, 6), (8, 3), 0), ((5, 4, 6), (9, 1), 0), ((2, 3, 4), (2, 7, 2), 1), ((2, 3, 4), (2, 3, 1), 2)],
)
def test_parts_are_written_one_after_the_other(
    bench: Workbench, x: tuple[int, ...], indices: tuple[int, ...], batch: int, reduction: Any
) -> None:
    given = {"x": whole(x, 1), "indices": drawn(indices, x[batch : batch + indices[-1]])}
    given["updates"] = whole((*indices[:-1], *x[batch + indices[-1] :]), 2)
    places = (((*n[:batch], *given["indices"][n]), given["updates"][n]) for n in np.ndindex(indices[:-1]))
    got = scattered(bench, put(ScatterND, batch_dims=batch, reduction=reduction), given)
    np.testing.assert_array_equal(got, one_by_one(given["x"], places, reduction))


def test_writes_out_of_range_go_to_the_nearest_place(bench: Workbench) -> None:
    given = {"x": np.zeros(3, np.float32), "indices": np.array([9, -9, 1]), "updates": whole((3,), 5) + 10}
    got = scattered(bench, put(Scatter), given)
    np.testing.assert_array_equal(got, given["updates"][[1, 2, 0]])


@cases_in_one_test
@pytest.mark.pairwise(of_exact=True)
@each_reduction
@pytest.mark.parametrize(
    ("dtype", "values"),
    [(DType.BFLOAT16, [256, 1, 1, np.nan]), (DType.BOOL, [0, 1, 1, 1]), (DType.INT8, [100, 20, 20, 9])],
)
def test_results_are_rounded_once(
    bench: Workbench, dtype: DType, values: list[float], reduction: ScatterReduction
) -> None:
    """Sums of bfloat16 are not rounded in between; those of integers saturate; NaN is not lost."""
    of = np.array(values)
    given = {"x": of[[0, 0]], "updates": of[1:]}
    given = {name: array.astype(dtype.numpy) for name, array in given.items()}
    given["indices"] = np.array([0, 0, 1])
    wanted = one_by_one(of[[0, 0]], zip([0, 0, 1], of[1:], strict=True), reduction)
    wanted = {DType.BOOL: wanted != 0, DType.INT8: np.minimum(wanted, 127)}.get(dtype, wanted)
    got = scattered(bench, put(Scatter, reduction=reduction), given)
    np.testing.assert_array_equal(got.astype(np.float64), wanted.astype(np.float64))


def test_a_scatter_needs_updates_of_the_dims_that_are_selected() -> None:
    g = GraphBuilder()
    x, i = g.input("x", (5, 4)), g.input("i", (3,), I64)
    with pytest.raises(InvalidRequest) as caught:
        g.put(x, i, g.input("u", (3, 5)))
    assert caught.value.field == "updates"
    with pytest.raises(InvalidRequest) as caught:
        g.put(x, i, g.input("v", (3, 4), "float64"))
    assert caught.value.field == "updates"


def test_the_last_update_wins_in_whatever_order_they_lie_in_memory() -> None:
    """As the definition is given them: NumPy goes through transposed indices in another order."""
    x, at = np.zeros(4), np.random.default_rng(1).integers(0, 4, (6, 5))
    updates = np.arange(30.0).reshape(6, 5)
    operation: Scatter[int] = Scatter(x=0, indices=1, updates=2)
    given = {"x": x, "indices": np.asfortranarray(at), "updates": np.asfortranarray(updates)}
    found = operation.evaluate(np, given, {})["y"]
    places = zip(at.ravel(), updates.ravel(), strict=True)
    np.testing.assert_array_equal(found, one_by_one(x, places, ScatterReduction.NONE))


# Gradients.

SELECTED: dict[str, Any] = {
    "rows": (
        lambda g, x, i: g.take(x, i, 1),
        lambda g, x, i, u, of: g.put(x, i, u, 1, reduction=of),
        (3, 4, 2),
    ),
    "elements": (
        lambda g, x, i: g.take_along_axis(x, i[None, :, None], 1),
        lambda g, x, i, u, of: g.put_along_axis(
            x, g.broadcast_to(i[None, :, None], u.dims), u, 1, reduction=of
        ),
        (3, 4, 2),
    ),
    "parts": (
        lambda g, x, i: g.gather_nd(x, i[:, None]),
        lambda g, x, i, u, of: g.scatter_nd(x, i[:, None], u, reduction=of),
        (4, 4, 2),
    ),
}


@pytest.mark.parametrize("name", SELECTED)
def test_gradients_of_gathers(name: str) -> None:
    gather, _, _ = SELECTED[name]
    given = {"x": np.random.default_rng(1).normal(size=(3, 4, 2)), "i": np.array([1, -2, 1, 0])}

    def twice(g: GraphBuilder, x: Tensor, i: Tensor) -> Tensor:
        return g.grad(g.square(gather(g, x, i)), x)

    check_gradients(gather, given)
    check_gradients(twice, given, tolerance=1e-6)


@cases_in_one_test
@each_reduction
@pytest.mark.parametrize("name", SELECTED)
def test_gradients_of_scatters(name: str, reduction: ScatterReduction) -> None:
    """Of two updates of one element the first has none, if they replace it."""
    _, scatter, dims = SELECTED[name]
    rng = np.random.default_rng(1)
    given = {"x": rng.normal(size=(3, 4, 2)), "i": np.array([1, -2, 1, 0]), "u": rng.normal(size=dims)}
    check_gradients(lambda g, x, i, u: scatter(g, x, i, u, reduction), given)


def test_gradients_of_products_are_right_at_zeros_and_those_of_equal_elements_are_shares() -> None:
    given = {
        "x": np.array([2.0, 0, 3, 0]),
        "i": np.array([0, 0, 1, 2, 3, 3]),
        "u": np.array([3.0, 0, 2, 5, 0, 7]),
    }
    product = ScatterReduction.MUL
    check_gradients(lambda g, x, i, u: g.put(x, i, u, reduction=product), given)
    g = GraphBuilder()
    x, i, u = g.input("x", (1,)), g.input("i", (3,), I64), g.input("u", (3,))
    dx, du = g.grad(g.put(x, i, u, reduction=ScatterReduction.MAX), [x, u])
    ones: dict[str, np.ndarray] = {
        "x": np.ones(1, np.float32),
        "i": np.zeros(3, np.int64),
        "u": np.array([1, 0, 1], np.float32),
    }
    found = computed(g.build(dx=dx, du=du), ones)
    np.testing.assert_allclose([*found["dx"], *found["du"]], [1 / 3, 1 / 3, 0, 1 / 3])


@pytest.mark.each_value
@pytest.mark.parametrize("name", SELECTED)
@pytest.mark.parametrize("zeros", [0.3, 0.7])
def test_gradients_of_the_gradients_of_products_are_right_at_zeros(name: str, zeros: float) -> None:
    _, scatter, dims = SELECTED[name]
    rng = np.random.default_rng(2)
    given = {"x": rng.normal(size=(3, 4, 2)), "i": np.array([1, -2, 1, 0]), "u": rng.normal(size=dims)}
    for factors in ("x", "u"):
        given[factors] *= rng.random(given[factors].shape) > zeros

    for wrt in ("x", "u"):

        def gradient(g: GraphBuilder, wrt: str = wrt, **inputs: Tensor) -> Tensor:
            y = scatter(g, *inputs.values(), ScatterReduction.MUL)
            return g.grad(g.square(y) + y, inputs[wrt])

        check_gradients(gradient, given, tolerance=1e-6)


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
