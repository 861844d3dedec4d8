"""Plans that are made where there is no time have no kernel that cuDNN compiles."""

from __future__ import annotations

import pytest

from ..engines.hasty_graphs import COMPILED, PRECOMPILED, WITHOUT_BIAS
from .building import Hasty, hasty_plan
from .child import Child

BY_CUBLASLT = {"residual", "shortcut", "bounded", "gelu", "tanh"}
"""These are products for cuBLASLt: it does not choose without a device."""


@pytest.mark.parametrize("name", [name for name in COMPILED if name not in BY_CUBLASLT])
def test_a_plan_built_soon_leaves_out_what_would_be_compiled(child: Child, name: str) -> None:
    found: Hasty = child.call(hasty_plan, COMPILED[name])
    assert found.left_out
    assert found.compiled == [False] * len(found.compiled)
    assert found.compiled


def test_a_plan_built_soon_leaves_out_candidates_that_cudnn_says_it_compiles(child: Child) -> None:
    found: Hasty = child.call(hasty_plan, WITHOUT_BIAS)
    assert found.left_out
    assert found.compiled == [False]


@pytest.mark.parametrize("name", PRECOMPILED)
def test_a_plan_built_soon_is_the_first_choice_if_that_compiles_nothing(child: Child, name: str) -> None:
    found: Hasty = child.call(hasty_plan, PRECOMPILED[name])
    assert not found.left_out
    assert found.compiled == [False]
    assert found.tag == found.first
