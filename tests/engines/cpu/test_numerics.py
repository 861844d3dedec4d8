from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import scipy.special

from cudnn_actor.engines.cpu.boxes import box_dims, boxes, count_boxes, largest_tile
from cudnn_actor.engines.cpu.exact.special import erfc
from cudnn_actor.engines.cpu.rounding import rounding_to


def test_erfc_is_accurate_to_the_last_bits_in_either_tail() -> None:
    x = np.concatenate([np.linspace(-7, 26, 20_001), [0.0, 0.46875, 4.0, -0.46875, -4.0, 1e-300]])
    exact = np.array([math.erfc(v) for v in x])
    assert np.max(np.abs(erfc(x) - exact) / exact) < 2e-15


def test_erfc_gives_the_same_erf_as_scipy() -> None:
    x = np.random.default_rng(0).normal(scale=2, size=10_000)
    np.testing.assert_allclose(1 - erfc(x), scipy.special.erf(x), rtol=0, atol=5e-16)


def test_erfc_has_its_limits() -> None:
    got = erfc(np.array([np.inf, -np.inf, np.nan, 0.0, 30.0, -1e308]))
    np.testing.assert_array_equal(got, [0, 2, np.nan, 1, 0, 2])


def rounded(values: list[float], dtype: type) -> list[float]:
    result: np.ndarray = np.empty(len(values), dtype)
    rounding_to(result.dtype)(result, np.array(values))
    return [float(v) for v in result]


def test_bfloat16_is_rounded_once() -> None:
    tie, bit = 1 + 2.0**-8, 2.0**-40
    assert rounded([tie - bit, tie, tie + bit], ml_dtypes.bfloat16) == [1, 1, 1 + 2.0**-7]
    odd = 1 + 3 * 2.0**-8
    assert rounded([odd - bit, odd, -odd + bit], ml_dtypes.bfloat16) == [1.0078125, 1.015625, -1.0078125]


def test_bfloat16_keeps_zeros_subnormals_and_infinities() -> None:
    least = 2.0**-133
    values = [0.0, least, least / 2, least / 2 * (1 + 2.0**-40), 1e-320, 3.4e38, -math.inf]
    with np.errstate(over="ignore"):
        got = rounded(values, ml_dtypes.bfloat16)
    assert got == [0.0, least, 0.0, least, 0.0, math.inf, -math.inf]
    assert math.isnan(rounded([math.nan], ml_dtypes.bfloat16)[0])


def test_every_bfloat16_survives_the_way_through_float64() -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    numbers = bits[(bits & 0x7FFF) <= 0x7F80].view(ml_dtypes.bfloat16)
    back = np.empty_like(numbers)
    rounding_to(back.dtype)(back, numbers.astype(np.float64))
    np.testing.assert_array_equal(back.view(np.uint16), numbers.view(np.uint16))


def test_integers_round_half_to_even_and_saturate() -> None:
    values = [0.5, 1.5, -2.5, 126.5, 1e30, -1e30, math.nan]
    assert rounded(values, np.int8) == [0, 2, -2, 126, 127, -128, 0]


def test_boxes_cover_every_element_once() -> None:
    seen = np.zeros((3, 2, 5, 7), int)
    tile = (2, 2, 2, 3)
    parts = list(boxes(seen.shape, tile))
    for box in parts:
        seen[box] += 1
        assert all(size <= limit for size, limit in zip(box_dims(box), tile, strict=True))
    assert (seen == 1).all()
    assert len(parts) == count_boxes(seen.shape, tile)


def test_the_largest_tile_splits_images_before_rows_and_never_channels() -> None:
    dims = (8, 4, 6, 6)
    assert largest_tile(dims, math.prod, 10_000) == dims
    assert largest_tile(dims, math.prod, 3 * 144) == (3, 4, 6, 6)
    assert largest_tile(dims, math.prod, 50) == (1, 4, 2, 6)
    assert largest_tile(dims, math.prod, 9) == (1, 4, 1, 2)
    assert largest_tile(dims, math.prod, 0) == (1, 4, 1, 1)
