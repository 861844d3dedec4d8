"""Functions of a graph builder that are compositions: NumPy's or PyTorch's results, and gradients."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cudnn_actor.protocol import DType, GenStats, GraphBuilder, InvalidRequest, Tensor
from cudnn_actor.protocol.types.dtypes import DTypeName

from ..engines.differences import check_gradients
from ..engines.problems import normal
from ..in_one_test import cases_in_one_test
from .test_graph_functions import computed

X = normal((2, 3, 4), DType.FLOAT64, 1)


def arrays(*dims: tuple[int, ...]) -> list[np.ndarray]:
    return [np.asarray(normal(each, DType.FLOAT64, n)) for n, each in enumerate(dims)]


# Einstein's summation.

EQUATIONS = [
    ("ij,jk->ik", (2, 3), (3, 4)),
    ("bij,bjk", (2, 3, 4), (2, 4, 5)),
    ("...ij,...jk->...ik", (2, 1, 3, 4), (5, 4, 2)),
    ("ii->i", (3, 3)),
    ("ii", (3, 3)),
    ("ij->", (2, 3)),
    ("i,j,k->kji", (2,), (3,), (4,)),
    ("bhqd,bhkd->bhqk", (2, 3, 4, 5), (2, 3, 6, 5)),
    ("ij,ij->j", (2, 3), (1, 3)),
    ("i,", (3,), ()),
    ("ba", (2, 3)),
    ("i , i -> i", (3,), (3,)),
    ("ij,jk->ik", (2, 0), (0, 4)),
]


@cases_in_one_test
@pytest.mark.parametrize(("equation", "dims"), [(one, dims) for one, *dims in EQUATIONS], ids=str)
def test_einsum_is_numpys_with_its_gradients(equation: str, dims: list[tuple[int, ...]]) -> None:
    given = arrays(*dims)
    wanted = np.einsum(equation, *given)
    got = computed(lambda g, *x: g.einsum(equation, *x), *given)
    assert got.shape == wanted.shape
    np.testing.assert_allclose(got, wanted, rtol=1e-12, atol=1e-12)
    named = {f"x{n}": array for n, array in enumerate(given)}
    check_gradients(lambda g, **x: g.einsum(equation, *x.values()), named)


# Statistics.


@cases_in_one_test
@pytest.mark.parametrize("axis", [None, 1, (0, 2), -1])
@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("name", ["var", "std"])
def test_variances_are_numpys_with_their_gradients(name: str, ddof: int, axis: Any) -> None:
    for keepdims in (False, True):
        wanted = getattr(np, name)(X, axis, ddof=ddof, keepdims=keepdims)
        got = computed(lambda _, x, k=keepdims: getattr(x, name)(axis, ddof=ddof, keepdims=k), X)
        assert got.shape == np.shape(wanted)
        np.testing.assert_allclose(got, wanted, rtol=1e-12)
    check_gradients(lambda g, x: getattr(g, name)(x, axis, ddof=ddof), {"x": X})


def test_variances_of_half_types_are_summed_up_in_float32() -> None:
    x = (np.arange(4096) % 7 + 1000.0).astype(np.float16)
    got = computed(lambda g, x: g.std(x), x, dtype="float16")
    assert got.dtype == np.float16
    np.testing.assert_allclose(got, x.astype(np.float64).std(), rtol=1e-3)


def test_a_variance_of_too_few_is_no_number() -> None:
    assert np.isnan(computed(lambda g, x: g.var(x, ddof=1), np.ones(1)))


# Layers and losses.


def test_linear_is_a_product_with_the_transpose_and_a_bias() -> None:
    x, w, bias = arrays((2, 3, 4), (5, 4), (5,))
    got = computed(lambda g, x, w, b: g.linear(x, w, b), x, w, bias)
    np.testing.assert_allclose(got, x @ w.T + bias, rtol=1e-12)
    np.testing.assert_allclose(
        computed(lambda g, x, w: g.linear(x, w), x[0, 0], w), x[0, 0] @ w.T, rtol=1e-12
    )
    check_gradients(lambda g, x, w, b: g.linear(x, w, b), {"x": x, "w": w, "b": bias})


def losses(logits: np.ndarray, targets: np.ndarray, axis: int) -> np.ndarray:
    logs = logits - np.log(np.exp(logits).sum(axis, keepdims=True))
    return -np.take_along_axis(logs, np.expand_dims(targets, axis), axis).squeeze(axis)


@pytest.mark.parametrize("axis", [-1, 1])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy_is_minus_the_log_of_the_softmax_at_the_targets(reduction: Any, axis: int) -> None:
    dims = tuple(np.delete(X.shape, axis))
    targets = np.arange(np.prod(dims)).reshape(dims) % 3

    def loss(g: GraphBuilder, x: Tensor, **options: Any) -> Tensor:
        return g.cross_entropy(x, g.input("t", dims, "int64"), axis, reduction=reduction, **options)

    each = losses(X, targets, axis)
    wanted = {"mean": each.mean(), "sum": each.sum(), "none": each}[reduction]
    np.testing.assert_allclose(of_two(loss, X, targets), wanted, rtol=1e-12)
    kept = targets != 1
    wanted = {"mean": each[kept].mean(), "sum": each[kept].sum(), "none": each * kept}[reduction]
    np.testing.assert_allclose(of_two(lambda g, x: loss(g, x, ignore=1), X, targets), wanted, rtol=1e-12)
    values = {"x": X, "t": targets}
    check_gradients(lambda g, x, t: g.cross_entropy(x, t, axis, reduction=reduction), values, ["x"])
    check_gradients(lambda g, x, t: g.cross_entropy(x, t, axis, ignore=1), values, ["x"])


def of_two(function: Callable[[GraphBuilder, Tensor], Tensor], x: np.ndarray, targets: np.ndarray) -> Any:
    from ..engines.differences import computed as run

    g = GraphBuilder()
    graph = g.build(y=function(g, g.input("x", x.shape, "float64")))
    return run(graph, {"x": x, "t": targets})["y"]


def test_cross_entropy_takes_weights_of_classes_too() -> None:
    x, weights = arrays((4, 3), (4, 3))
    logs = x - np.log(np.exp(x).sum(1, keepdims=True))
    got = computed(lambda g, x, t: g.cross_entropy(x, t), x, weights)
    np.testing.assert_allclose(got, -(weights * logs).sum(1).mean(), rtol=1e-12)
    check_gradients(lambda g, x, t: g.cross_entropy(x, t), {"x": x, "t": weights})


# Convolutions.


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stride": 2, "pad": 1, "output_pad": 1},
        {"stride": (2, 3), "dilation": 2, "pad": ((1, 0), (0, 2))},
        {"stride": 3, "output_pad": (2, 1)},
        {"groups": 2},
    ],
)
def test_conv_transpose_is_the_transpose_of_conv(options: dict[str, Any]) -> None:
    """<conv(y, w), x> is <y, conv_transpose(x, w)> for all x and y."""
    x, w = arrays((2, 4, 3, 4), (4, 3, 3, 2))
    made = computed(lambda g, x, w: g.conv_transpose(x, w, **options), x, w)
    conv = {name: value for name, value in options.items() if name != "output_pad"}
    (y,) = arrays(made.shape)
    forward = computed(lambda g, y, w: g.conv(y, w, **conv), y, w)
    assert forward.shape == x.shape
    assert np.vdot(forward, x) == pytest.approx(np.vdot(y, made))
    bias = np.arange(made.shape[1], dtype=np.float64)
    with_bias = computed(lambda g, x, w, b: g.conv_transpose(x, w, bias=b, **options), x, w, bias)
    np.testing.assert_allclose(with_bias, made + bias[:, None, None])
    check_gradients(lambda g, x, w: g.conv_transpose(x, w, **options), {"x": x, "w": w}, tolerance=1e-6)


def test_conv_takes_paddings_before_and_after() -> None:
    x, w = arrays((1, 2, 5, 4), (3, 2, 3, 3))
    got = computed(lambda g, x, w: g.conv(x, w, pad=((0, 2), 1)), x, w)
    padded = np.pad(x, ((0, 0), (0, 0), (0, 2), (1, 1)))
    np.testing.assert_allclose(got, computed(lambda g, x, w: g.conv(x, w), padded, w))


# Quotients without fractions, and places in all of a tensor.

FLOATS = np.array([[-7.5, -1.0, -0.0, 0.0, 1.0, 3.5, np.inf, np.nan]])
INTEGERS = np.array([[-7, -1, 0, 5, 12, 127, -128, 100]])


@pytest.mark.parametrize("by", [2, -3, 0.1, 0.0, np.inf, FLOATS.T])
def test_floor_division_of_floats_is_numpys(by: Any) -> None:
    with np.errstate(all="ignore"):
        wanted = FLOATS // by
    if isinstance(by, np.ndarray):
        got = computed(lambda _, a, b: a // b, FLOATS, by)
    else:
        got = computed(lambda _, a: a // by, FLOATS)
    np.testing.assert_array_equal(got, wanted)


@pytest.mark.parametrize("dtype", ["int8", "int32", "int64", "uint8"])
def test_floor_division_of_integers_is_numpys(dtype: DTypeName) -> None:
    a = INTEGERS.astype(dtype)
    others = np.array([[1], [2], [3], [-3], [7]]).astype(dtype)
    got = computed(lambda _, a, b: a // b, a, others, dtype=dtype)
    assert got.dtype == dtype
    np.testing.assert_array_equal(got, a // others)
    np.testing.assert_array_equal(computed(lambda _, a: a // 2, a, dtype=dtype), a // 2)
    np.testing.assert_array_equal(computed(lambda _, a: 100 // a, others, dtype=dtype), 100 // others)


def test_floor_division_of_large_integers_is_exact() -> None:
    a = np.array([2**62 + 1, -(2**62) - 1, 2**53 + 1, -(2**63)])
    got = computed(lambda _, a: a // 3, a, dtype="int64")
    np.testing.assert_array_equal(got, a // 3)


@pytest.mark.parametrize("name", ["argmax", "argmin", "cumsum", "cumprod"])
def test_without_an_axis_all_of_a_tensor_is_meant_as_in_numpy(name: str) -> None:
    np.testing.assert_allclose(computed(lambda g, x: getattr(g, name)(x), X), getattr(np, name)(X))
    if name.startswith("arg"):
        wanted = getattr(np, name)(X, keepdims=True)
        np.testing.assert_array_equal(computed(lambda g, x: getattr(g, name)(x, keepdims=True), X), wanted)


def test_a_tensor_has_its_shape_by_numpys_name() -> None:
    assert GraphBuilder().input("x", (2, 3)).shape == (2, 3)


# Mistakes.


@cases_in_one_test
@pytest.mark.parametrize(
    ("use", "text"),
    [
        (lambda g, x, i: g.einsum("ij,jk", x), "equation='ij,jk': is for 2 tensors, and there are 1"),
        (
            lambda g, x, i: g.einsum("i", x),
            "equation='i': does not have a label for each of 2 dims of tensor",
        ),
        (lambda g, x, i: g.einsum("ij->ik", x), "equation='ij->ik': has a result with a label that is there"),
        (
            lambda g, x, i: g.einsum("ij,ik", x, i[:, :1]),
            "tensors[1]=int64: is not the dtype of the first, which",
        ),
        (lambda g, x, i: g.einsum("ij,ji", x, x), "equation='ij,ji': gives one label to dims of"),
        (lambda g, x, i: g.einsum("ii", x), "equation='ii': takes a diagonal of dims of 2 and 3"),
        (lambda g, x, i: g.einsum("i1", x), "equation='i1': has other characters than letters"),
        (lambda g, x, i: g.einsum(3, x), "equation=3: is of type int, not a text"),
        (
            lambda g, x, i: g.linear(x, x.T),
            "w=(3, 2): does not fit x, of dims (2, 3); give it dims (features",
        ),
        (lambda g, x, i: g.var(x, ddof="1"), "ddof='1': must be a finite number"),
        (lambda g, x, i: g.cross_entropy(x, i), "targets=int64 (2, 3): does not fit logits, of dims (2, 3)"),
        (lambda g, x, i: g.cross_entropy(x, i[:, 0], ignore=0.5), "ignore=0.5: is no class"),
        (
            lambda g, x, i: g.cross_entropy(x, i[:, 0], reduction="avg"),
            "reduction='avg': is none of its values; use",
        ),
        (lambda g, x, i: g.cross_entropy(x, i[:, 0], 2), "axis=2: is no dim of logits, which has 2"),
        (lambda g, x, i: g.conv_transpose(x, x), "x=(2, 3): has no spatial dims"),
        (
            lambda g, x, i: g.conv_transpose(x[None, None], x.reshape(2, 1, 3, 1)),
            "w=(2, 1, 3, 1): has 2 filters",
        ),
        (
            lambda g, x, i: g.conv_transpose(x[None, None], x[None, None], pad=9),
            "pad=((9, 9), (9, 9)): is more",
        ),
    ],
)
def test_a_wrong_use_names_the_argument(use: Any, text: str) -> None:
    g = GraphBuilder()
    x, i = g.input("x", (2, 3)), g.input("i", (2, 3), "int64")
    with pytest.raises(InvalidRequest) as caught:
        use(g, x, i)
    assert str(caught.value).startswith(text)


# Batch norm from sums.

STATISTICS = ["scale", "bias", "running_mean", "running_variance"]


def normalised(g: GraphBuilder, x: Tensor, parts: int = 1, **given: Any) -> list[Tensor]:
    """A batch norm whose sums are added up in parts of the batch, and the new running statistics."""
    sums = [g.apply(GenStats(x=part)) for part in g.split(x, parts)]
    total, squares = (sum(each[1:], each[0]) for each in zip(*sums, strict=True))
    count = math.prod(x.dims) // x.dims[1]
    found = g.batch_norm_finalize(total, squares, count, **given)
    scale, bias = (g.reshape(each, (-1, 1)) for each in (found.scale, found.bias))
    return [x * scale + bias, found.new_running_mean, found.new_running_variance]


@pytest.mark.parametrize("unbiased", [True, False])
def test_a_batch_norm_from_sums_is_that_of_the_whole_batch(unbiased: bool) -> None:
    given = dict(zip(["x", *STATISTICS], arrays((4, 3, 5), *[(3,)] * 4), strict=True))
    given["running_variance"] = np.abs(given["running_variance"])
    options: Any = {"epsilon": 1e-3, "momentum": 0.3, "unbiased": unbiased}

    def by_sums(g: GraphBuilder, *tensors: Tensor) -> list[Tensor]:
        x, *others = tensors
        return normalised(g, x, 2, **dict(zip(STATISTICS, others, strict=True)), **options)

    def whole(g: GraphBuilder, *tensors: Tensor) -> list[Tensor]:
        return list(g.batch_norm_training(*tensors, **options))

    for number in range(3):
        got, wanted = (
            computed(lambda g, *x, of=function: of(g, *x)[number], *given.values())  # noqa: B023 - called here
            for function in (by_sums, whole)
        )
        np.testing.assert_allclose(got, wanted, rtol=1e-10)
    check_gradients(lambda g, **ts: by_sums(g, *ts.values()), given)


def test_without_optional_operands_a_batch_norm_from_sums_has_neither_scale_nor_running_statistics() -> None:
    g = GraphBuilder()
    sums, squares = (g.input(name, (3,), "float16") for name in ("sums", "squares"))
    found = g.batch_norm_finalize(sums, squares, np.prod((2, 4)), running_mean=g.input("mean", (3,)))
    assert found._fields == ("scale", "bias", "mean", "inverse_deviation", "new_running_mean")
    assert found.new_running_mean.dtype is DType.FLOAT32


@pytest.mark.parametrize("count", [0, -1, 2.5, True, 1 << 60])
def test_a_count_of_elements_is_a_number_of_them(count: Any) -> None:
    g = GraphBuilder()
    sums = g.input("sums", (3,))
    with pytest.raises(InvalidRequest, match="is no number of elements") as caught:
        g.batch_norm_finalize(sums, sums, count)
    assert caught.value.field == "count"
