"""How arrays are cut into blocks."""

from __future__ import annotations

import math

import numpy as np
import pytest

from cudnn_actor.engines.cpu.fast.blocks import block_elements, merged_axes, pieces

from ....in_one_test import cases_in_one_test

DIMS = [(5,), (17, 1000), (10_000, 3), (3, 2, 9000), (40_000,), (2, 70_000), (1, 1)]
MOST = [1, 100, 16_384]


@cases_in_one_test
@pytest.mark.parametrize(
    ("dims", "most"), [(dims, most) for dims in DIMS for most in MOST if math.prod(dims) <= 1000 * most]
)
def test_pieces_have_each_element_once_and_no_more_of_them_than_asked_for(
    dims: tuple[int, ...], most: int
) -> None:
    seen = np.zeros(dims, int)
    for place in pieces(dims, most):
        seen[place] += 1
        assert seen[place].size <= max(most, 16)
    assert (seen == 1).all()


def test_axes_are_merged_in_the_order_of_memory() -> None:
    pictures = np.arange(2 * 3 * 4 * 5).reshape(2, 4, 5, 3).transpose(0, 3, 1, 2)  # channels last
    bias = np.arange(3).reshape(1, 3, 1, 1)
    dims, (of_pictures, of_bias) = merged_axes((2, 3, 4, 5), [pictures, bias])
    assert dims == (40, 3)
    np.testing.assert_array_equal(of_pictures, np.arange(120).reshape(40, 3))
    np.testing.assert_array_equal(of_bias, np.tile([0, 1, 2], (40, 1)))


def test_blocks_of_very_large_tensors_are_larger() -> None:
    sizes = [block_elements((size,)) for size in (100, 1 << 20, 1 << 25, 1 << 29)]
    assert sizes == sorted(sizes)
    assert sizes[0] == 100
    assert sizes[-1] <= 1 << 17
