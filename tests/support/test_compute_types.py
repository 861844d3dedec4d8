"""What docs/cudnn.md says of the types that cuDNN's plans compute in."""

from __future__ import annotations

import itertools

import pytest

from cudnn_actor.protocol import DType

from .child import Child
from .compute_types import KINDS, plans

FLOATS = tuple(dtype for dtype in DType if dtype.is_floating)


@pytest.mark.parametrize("kind", KINDS)
def test_no_type_but_float16_is_computed_in_less_than_float32(child: Child, kind: str) -> None:
    found = {pair for pair in itertools.product(FLOATS, repeat=2) if child.call(plans, kind, *pair)}
    usual = {(dtype, DType.FLOAT32) for dtype in FLOATS if dtype is not DType.FLOAT64}
    wide = {(DType.FLOAT64, DType.FLOAT64)}
    assert found - usual - wide == ({(DType.FLOAT16, DType.FLOAT16)} if kind != "elements" else set())
    assert usual <= found
    assert (wide <= found) is (kind not in ("product", "elements"))
