"""Functions of a graph builder for blocks of images, affine places, neighbourhoods and flipped filters."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from cudnn_actor.protocol import DType, GraphBuilder, InvalidRequest
from cudnn_actor.protocol.types.dtypes import DTypeName

from ..engines.differences import check_gradients
from ..engines.problems import normal
from ..in_one_test import cases_in_one_test
from .test_graph_functions import computed

BLOCKS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "line": ((2, 3, 9), {"size": 3, "stride": 2}),
    "overlapping": ((2, 3, 5, 6), {"size": (3, 2), "pad": 1}),
    "apart": ((1, 2, 7, 6), {"size": 2, "stride": 3, "dilation": (2, 1)}),
    "side by side": ((2, 2, 7, 6), {"size": (3, 2), "stride": (3, 2)}),
    "padded, side by side": ((1, 2, 4, 5), {"size": 2, "stride": 2, "pad": ((1, 0), (0, 2))}),
    "in strips": ((1, 2, 12, 9), {"size": (5, 4), "stride": (2, 2), "pad": (2, 1)}),
    "in strips that end early": ((2, 1, 17), {"size": 7, "stride": 3}),
    "with gaps": ((1, 2, 11, 9), {"size": 2, "stride": 4, "pad": 1}),
    "of one element": ((1, 3, 2, 3), {"size": 1}),
    "in padding alone": ((1, 1, 2, 2), {"size": 1, "pad": 2, "stride": 2}),
    "volume": ((1, 2, 4, 3, 5), {"size": (2, 3, 2), "stride": (1, 2, 2), "pad": (1, 1, 0)}),
    "no samples": ((0, 2, 4, 4), {"size": 2}),
    "no channels": ((2, 0, 4, 4), {"size": 3, "pad": 1}),
}
each_way = pytest.mark.parametrize(("dims", "options"), BLOCKS.values(), ids=BLOCKS)


def places(image: Sequence[int], options: dict[str, Any]) -> np.ndarray:
    """Which element each element of each block is, counted in the image in row-major order; -1 for padding.

    Dims (elements of a block, blocks).
    """
    rank = len(image)
    size, stride, dilation = (
        np.broadcast_to(options.get(n, 1), rank) for n in ("size", "stride", "dilation")
    )
    pad = options.get("pad", 0)
    pairs = [np.broadcast_to(pad if isinstance(pad, int) else pad[n], 2) for n in range(rank)]
    counts = [
        1 + (image[n] + sum(pairs[n]) - dilation[n] * (size[n] - 1) - 1) // stride[n] for n in range(rank)
    ]
    rows = []
    for tap in itertools.product(*map(range, size)):
        row = []
        for block in itertools.product(*map(range, counts)):
            at = [
                b * s + t * d - p[0]
                for b, s, t, d, p in zip(block, stride, tap, dilation, pairs, strict=True)
            ]
            inside = all(0 <= a < n for a, n in zip(at, image, strict=True))
            row.append(np.ravel_multi_index(at, image) if inside else -1)
        rows.append(row)
    return np.array(rows)


def columns(x: np.ndarray, options: dict[str, Any]) -> np.ndarray:
    at = places(x.shape[2:], options)
    flat = np.concatenate([x.reshape(*x.shape[:2], math.prod(x.shape[2:])), np.zeros((*x.shape[:2], 1))], 2)
    return flat[:, :, at].reshape(x.shape[0], x.shape[1] * at.shape[0], at.shape[1])


@cases_in_one_test
@each_way
def test_blocks_become_columns_and_columns_are_summed_up(dims: Any, options: dict[str, Any]) -> None:
    x = np.asarray(normal(dims, DType.FLOAT64, 0))
    wanted = columns(x, options)
    np.testing.assert_array_equal(computed(lambda g, x: g.unfold(x, **options), x), wanted)

    given = np.asarray(normal(wanted.shape, DType.FLOAT64, 1))
    at = places(dims[2:], options)
    total = np.zeros((*dims[:2], math.prod(dims[2:]) + 1))
    parts = given.reshape(*dims[:2], *at.shape)
    for place in np.ndindex(*at.shape):
        total[:, :, at[place]] += parts[:, :, *place]
    got = computed(lambda g, c: g.fold(c, dims[2:], **options), given)
    np.testing.assert_allclose(got, total[:, :, :-1].reshape(dims), rtol=1e-13, atol=1e-13)


def test_long_blocks_do_not_take_many_operations() -> None:
    """As many as strides fit into one, and not as many as it has elements."""
    g = GraphBuilder()
    columns = g.unfold(g.input("x", (1, 1, 10_240)), 2048, stride=512)
    graph = g.build(y=g.fold(columns, (10_240,), 2048, stride=512))
    assert len(graph.body.operations) < 40


@pytest.mark.parametrize("name", ["overlapping", "apart", "padded, side by side", "in strips", "volume"])
def test_columns_and_their_sums_have_gradients(name: str) -> None:
    dims, options = BLOCKS[name]
    x = np.asarray(normal(dims, DType.FLOAT64, 0))
    check_gradients(lambda g, x: g.unfold(x, **options), {"x": x})
    given = np.asarray(normal(columns(x, options).shape, DType.FLOAT64, 1))
    check_gradients(lambda g, c: g.fold(c, dims[2:], **options), {"c": given})


@pytest.mark.parametrize("dtype", ["int8", "uint64", "bool", "float16"])
def test_columns_are_of_any_type(dtype: DTypeName) -> None:
    x = (np.arange(24).reshape(1, 2, 3, 4) % 7).astype(dtype)
    options: dict[str, Any] = {"size": 2, "pad": 1}
    got = computed(lambda g, x: g.unfold(x, **options), x, dtype=dtype)
    np.testing.assert_array_equal(got, columns(x, options).astype(dtype))
    back = computed(lambda g, x: g.fold(g.unfold(x, **options), (3, 4), **options), x, dtype=dtype)
    np.testing.assert_array_equal(back, (x.astype(np.int64) * 4).astype(dtype))  # each is in four blocks


def test_sums_of_half_types_are_rounded_once() -> None:
    """In float16, 2048 + 1 is 2048."""
    given = np.zeros((1, 2, 2, 2, 2))
    given[0, 1, 1, 0, 0], given[0, 0, 1, 1, 0], given[0, 1, 0, 0, 1] = 2048, 1, 1  # all in the middle
    got = computed(lambda g, c: g.fold(c, (3, 3), 2), given.reshape(1, 4, 4), dtype="float16")
    assert got[0, 0, 1, 1] == 2050


def test_nan_stays_in_its_place() -> None:
    given = np.zeros((1, 4, 4))
    given[0, 0, 0] = np.nan
    got = computed(lambda g, c: g.fold(c, (3, 3), 2), given)
    assert np.isnan(got[0, 0, 0, 0])
    assert np.isnan(got).sum() == 1


# Affine places.


@cases_in_one_test
@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize("dims", [(2, 3, 4), (2, 3, 4, 5), (1, 1, 1, 3), (2, 1, 2, 3, 1), (0, 1, 2, 2)])
def test_affine_places_are_a_matrix_times_those_of_the_elements(
    dims: tuple[int, ...], align_corners: bool
) -> None:
    samples, _, *sizes = dims
    rank = len(sizes)
    theta = np.asarray(normal((samples, rank, rank + 1), DType.FLOAT64, 0))
    along = [
        np.linspace(-1, 1, n) * (1 if align_corners else (n - 1) / n) if n > 1 else np.zeros(1) for n in sizes
    ]
    grid = np.stack([*np.meshgrid(*along, indexing="ij")[::-1], np.ones(sizes)], -1)
    wanted = np.einsum("...j,nij->n...i", grid, theta)
    got = computed(lambda g, t: g.affine_grid(t, dims, align_corners=align_corners), theta)
    assert got.shape == (samples, *sizes, rank)
    np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-14)


def test_affine_places_have_gradients_and_sample_what_they_name() -> None:
    theta, x = (np.asarray(normal(dims, DType.FLOAT64, 3)) for dims in ((2, 2, 3), (2, 1, 3, 4)))
    check_gradients(lambda g, t: g.affine_grid(t, x.shape), {"t": theta})
    identity = np.broadcast_to(np.eye(2, 3), (2, 2, 3))
    for aligned in (False, True):
        got = computed(
            lambda g, x, t, a=aligned: g.grid_sample(
                x, g.affine_grid(t, x.dims, align_corners=a), align_corners=a
            ),
            x,
            identity,
        )
        np.testing.assert_allclose(got, x, rtol=1e-12, atol=1e-12)


# Neighbourhoods.


@pytest.mark.parametrize(
    ("dims", "size"), [((2, 3, 7), 3), ((1, 2, 5, 4), 4), ((1, 2, 3, 4), (1, 9)), ((1, 1, 3, 4, 3), 2)]
)
def test_a_divisive_norm_divides_by_a_power_of_the_squares_around(dims: tuple[int, ...], size: Any) -> None:
    x = np.asarray(normal(dims, DType.FLOAT64, 0))
    sizes = np.broadcast_to(size, len(dims) - 2)
    wanted = np.empty_like(x)
    for at in np.ndindex(*dims):
        around = [slice(max(0, a - (n - 1) // 2), a + n // 2 + 1) for a, n in zip(at[2:], sizes, strict=True)]
        squares = (x[(at[0], at[1], *around)] ** 2).sum() / sizes.prod()
        wanted[at] = x[at] / (1.5 + 0.5 * squares) ** 0.6
    options = {"alpha": 0.5, "beta": 0.6, "bias": 1.5}
    got = computed(lambda g, x: g.divisive_norm(x, size, **options), x)
    np.testing.assert_allclose(got, wanted, rtol=1e-13)
    check_gradients(lambda g, x: g.divisive_norm(x, size, **options), {"x": x})


@pytest.mark.parametrize(
    ("dims", "size", "of_means"),
    [
        ((2, 2, 6), 3, (2, 2, 6)),
        ((1, 2, 4, 5), (3, 4), (1, 2, 4, 5)),
        ((2, 3, 3, 4), 2, (1, 3, 1, 1)),
        ((1, 1, 3, 2, 4), 3, (1, 1, 3, 2, 4)),
        ((1, 1, 3), 9, (1, 1, 3)),
    ],
)
def test_a_divisive_norm_with_means_divides_by_a_power_of_the_squares_of_deviations(
    dims: tuple[int, ...], size: Any, of_means: tuple[int, ...]
) -> None:
    x, means = np.asarray(normal(dims, DType.FLOAT64, 0)), np.asarray(normal(of_means, DType.FLOAT64, 1))
    sizes = np.broadcast_to(size, len(dims) - 2)
    wanted = np.empty_like(x)
    for at in np.ndindex(*dims):
        around = [slice(max(0, a - (n - 1) // 2), a + n // 2 + 1) for a, n in zip(at[2:], sizes, strict=True)]
        off = x[(at[0], at[1], *around)] - np.broadcast_to(means, dims)[at]
        wanted[at] = x[at] / (1.5 + 0.5 * (off**2).sum() / sizes.prod()) ** 0.6
    options = {"alpha": 0.5, "beta": 0.6, "bias": 1.5}
    got = computed(lambda g, x, means: g.divisive_norm(x, size, means=means, **options), x, means)
    np.testing.assert_allclose(got, wanted, rtol=1e-12)
    check_gradients(
        lambda g, x, means: g.divisive_norm(x, size, means=means, **options), {"x": x, "means": means}
    )


def test_deviations_that_are_much_smaller_than_the_means_are_not_lost() -> None:
    x = np.asarray(normal((1, 1, 5, 5), DType.FLOAT32, 0)) * np.float32(0.1) + np.float32(1000)
    means = np.full_like(x, 1000)
    options = {"alpha": 1.0, "beta": 0.5, "bias": 0.0}
    got = computed(
        lambda g, x, means: g.divisive_norm(x, 1, means=means, **options), x, means, dtype="float32"
    )
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, x / abs(x - means), rtol=1e-6)


def test_squares_of_half_types_do_not_overflow() -> None:
    got = computed(
        lambda g, x: g.divisive_norm(x, 1, alpha=1, beta=0.5), np.full((1, 1, 3), 6e4), dtype="float16"
    )
    assert got.dtype == np.float16
    np.testing.assert_allclose(got, 1)


# Filters that are read backwards.


@pytest.mark.parametrize("options", [{}, {"pad": 2, "stride": 2}, {"groups": 2, "dilation": 2}])
def test_a_flipped_filter_is_read_backwards(options: dict[str, Any]) -> None:
    x, w = (
        np.asarray(normal(dims, DType.FLOAT64, 0))
        for dims in ((2, 4, 7, 6), (4, 4 // options.get("groups", 1), 3, 2))
    )
    back = w[:, :, ::-1, ::-1]
    for name in ("conv", "conv_transpose"):
        got = computed(lambda g, x, w, n=name: getattr(g, n)(x, w, flipped=True, **options), x, w)
        wanted = computed(lambda g, x, w, n=name: getattr(g, n)(x, w, **options), x, back)
        np.testing.assert_array_equal(got, wanted)
    check_gradients(lambda g, x, w: g.conv(x, w, flipped=True, **options), {"x": x, "w": w}, tolerance=1e-6)


def test_a_flipped_convolution_is_numpys() -> None:
    x, w = (np.asarray(normal((n,), DType.FLOAT64, n)) for n in (9, 4))
    got = computed(lambda g, x, w: g.conv(x[None, None], w[None, None], pad=3, flipped=True), x, w)
    np.testing.assert_allclose(got[0, 0], np.convolve(x, w), rtol=1e-13)


# Batch norm of each activation.


def test_each_activation_may_have_statistics_of_its_own() -> None:
    x = np.asarray(normal((5, 2, 3, 4), DType.FLOAT64, 0))
    mean, scale, bias = (np.asarray(normal((2, 3, 4), DType.FLOAT64, n)) for n in (1, 2, 3))
    variance = mean**2 + 0.5
    weights = (scale, bias)

    got = computed(
        lambda g, x, m, v, s, b: g.batch_norm(x, m, v, s, b, per_activation=True), x, mean, variance, *weights
    )
    np.testing.assert_allclose(got, (x - mean) / np.sqrt(variance + 1e-5) * scale + bias, rtol=1e-12)

    wanted = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5) * scale + bias
    got = computed(lambda g, x, s, b: g.batch_norm_training(x, s, b, per_activation=True), x, *weights)
    np.testing.assert_allclose(got, wanted, rtol=1e-11, atol=1e-12)

    new = {"y": wanted, "mean": 0.9 * mean + 0.1 * x.mean(0), "var": 0.9 * variance + 0.1 * x.var(0, ddof=1)}
    for place, name in enumerate(new):
        got = computed(
            lambda g, x, s, b, m, v, n=place: g.batch_norm_training(x, s, b, m, v, per_activation=True)[n],
            *(x, *weights, mean, variance),
        )
        np.testing.assert_allclose(got, new[name], rtol=1e-11, atol=1e-12, err_msg=name)
    values = {"x": x, "s": scale, "b": bias}
    check_gradients(
        lambda g, x, s, b: g.batch_norm_training(x, s, b, per_activation=True), values, tolerance=1e-6
    )
    values = {"x": x, "m": mean, "v": variance, **values}
    check_gradients(lambda g, x, m, v, s, b: g.batch_norm(x, m, v, s, b, per_activation=True), values)


def test_new_statistics_of_each_activation_have_names() -> None:
    g = GraphBuilder()
    x, m, v = g.input("x", (4, 2, 3)), g.input("m", (2, 3)), g.input("v", (2, 3))
    made = g.batch_norm_training(x, running_mean=m, running_variance=v, per_activation=True)
    assert made._fields == ("y", "new_running_mean", "new_running_variance")
    g.build(y=made.y, updates={"m": made.new_running_mean, "v": made.new_running_variance})


# Mistakes.


@cases_in_one_test
@pytest.mark.parametrize(
    ("use", "text"),
    [
        (
            lambda g, x: g.unfold(x, 9),
            "size=(9, 9): spans 9 inputs, but the padded input has 4 in spatial dim 0;",
        ),
        (lambda g, x: g.unfold(x, 0), "size=(0, 0): has a value that is not from 1"),
        (lambda g, x: g.fold(x, (4, 4), 2), "x=(1, 2, 4, 5): has no columns of blocks of (2, 2)"),
        (lambda g, x: g.fold(x[0], (4, 4), 2), "x=(2, 4, 5): has no columns of blocks of (2, 2)"),
        (lambda g, x: g.fold(x[0], 4, 2), "output=4: does not say how many spatial dims"),
        (lambda g, x: g.affine_grid(x, (1, 2, 3)), "theta=float32 (1, 2, 4, 5): does not fit dims (1, 2, 3)"),
        (lambda g, x: g.affine_grid(x, (1, 2)), "dims=(1, 2): are not those of an image"),
        (lambda g, x: g.divisive_norm(x, 1 << 20), "size="),
        (
            lambda g, x: g.divisive_norm(x, 3, means=x[0]),
            "means=(2, 4, 5): does not have a number for each element of x; give it dims (1, 2, 4, 5), or 1",
        ),
        (
            lambda g, x: g.divisive_norm(x, 3, means=x.astype("int32")),
            "means=int32: is not a floating-point dt",
        ),
        (lambda g, x: g.divisive_norm(x, 3, means=3.0), "means=3.0: is a number where a tensor belongs"),
        (lambda g, x: g.conv(x, x, flipped=1), "flipped=1: is neither True nor False"),
        (
            lambda g, x: g.batch_norm(x, x[0, :, 0, 0], x[0], per_activation=True),
            "mean=(2,): does not have a number for each element of a sample; give it dims (2, 4, 5)",
        ),
    ],
)
def test_a_wrong_use_names_the_argument(use: Any, text: str) -> None:
    g = GraphBuilder()
    with pytest.raises(InvalidRequest) as caught:
        use(g, g.input("x", (1, 2, 4, 5)))
    assert str(caught.value).startswith(text)
