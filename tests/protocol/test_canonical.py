"""One encoding per value."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from cudnn_actor.protocol.graphs.canonical import canonical_bytes

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=8,
)


@given(PLAIN, PLAIN)
def test_two_values_share_canonical_bytes_only_when_they_are_the_same(one: object, other: object) -> None:
    # repr tells 1 from True, 1 from 1.0 and 0.0 from -0.0, which == does not.
    assert (canonical_bytes(one) == canonical_bytes(other)) is (repr(one) == repr(other))


@pytest.mark.parametrize("value", [{1: 2}, {1}, object(), b"bytes", 1j])
def test_what_has_no_fixed_order_has_no_canonical_form(value: object) -> None:
    with pytest.raises(TypeError, match="no canonical form"):
        canonical_bytes(value)
