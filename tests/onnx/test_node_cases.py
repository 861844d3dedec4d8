"""What the cases of ONNX's node suite want of pooling is what ONNX computes."""

from __future__ import annotations

import itertools

import numpy as np
from onnx.reference.ops import op_pool_common

from .node_cases import pooled


def test_pooling_is_that_of_onnx() -> None:
    """With padding that counts and not, dilations, strides and windows that end behind the input."""
    rng = np.random.default_rng(0)
    for kind, counts, strides, dilations, ceil, (before, behind) in itertools.product(
        ("AVG", "MAX", "LPPOOL"), (0, 1), ([1, 1], [2, 3]), (None, [2, 1]), (False, True), ((0, 0), (1, 1))
    ):
        x = rng.standard_normal((1, 2, 6, 7)).astype(np.float32)
        pads = [before, before, behind, behind]
        out, around = op_pool_common.get_output_shape_explicit_padding(
            pads, x.shape[2:], [2, 3], strides, dilations, ceil
        )
        ends = [(around[i], around[i + 2]) for i in range(2)]
        fill = np.nan if kind == "MAX" or not counts else 0
        padded = np.pad(x, [(0, 0), (0, 0), *ends], constant_values=fill)
        asked = (padded, x.shape, [2, 3], strides, out, kind, around, pads, dilations, counts, 3)
        wanted, found = op_pool_common.pool(*asked), pooled(*asked)
        assert found.dtype == wanted.dtype
        np.testing.assert_allclose(found, wanted, rtol=2e-6, atol=2e-7, err_msg=str(asked[2:]))
