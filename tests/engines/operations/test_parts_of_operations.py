"""Parts of results follow from the parts of operands that operations name."""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np
import pytest

from cudnn_actor.engines.cpu.exact.evaluation import XP, exact
from cudnn_actor.protocol import TensorSpec
from cudnn_actor.protocol.operations import Pad

from ...gpu.operations.cases import arrays
from ...gpu.operations.drawing import draw
from ...in_one_test import cases_in_one_test

FAMILIES = (
    *("response_norm", "grid_sampling", "sorting", "reduction", "indexing", "pooling", "normalization"),
    *("softmax", "attention", "movement"),
)


def spread(size: int) -> slice:
    """Every third place, the last among them, as checks of plans choose places."""
    return slice((size - 1) % 3, None, 3) if size > 3 else slice(None)


@cases_in_one_test
@pytest.mark.parametrize("family", FAMILIES)
def test_spread_places_of_results_follow_from_what_they_need(family: str) -> None:
    seed, cut = secrets.randbelow(1 << 32), 0
    for number in range(2000):
        if cut >= 12:
            break
        case = draw(family, seed, number)
        operation: Any = case.operation
        specs = {**case.specs, **case.outputs}
        if any(0 in spec.dims for spec in specs.values()):
            continue
        (dims, *_) = [spec.dims for spec in case.outputs.values()]
        for axis in range(len(dims)):
            region = tuple(spread(size) if n == axis else slice(None) for n, size in enumerate(dims))
            needed = operation.needs(specs, dict.fromkeys(case.outputs, region))
            if needed is None or dims[axis] <= 3:
                continue
            cut += 1
            values = {name: exact(array) for name, array in arrays(case).items()}
            parts = {name: array[needed[name]] if name in needed else array for name, array in values.items()}
            with np.errstate(all="ignore"):
                whole = operation.evaluate(XP, values, case.outputs)
                of_parts = {
                    name: TensorSpec.packed(whole[name][region].shape, spec.dtype)
                    for name, spec in case.outputs.items()
                }
                found = operation.evaluate(XP, parts, of_parts)
            for name in case.outputs:
                np.testing.assert_allclose(
                    found[name], whole[name][region], rtol=1e-12, atol=0, err_msg=f"seed {seed}: {case}"
                )
    assert cut >= 12


def test_a_part_of_a_pad_follows_from_that_part_where_nothing_is_around_it() -> None:
    pad = Pad(x=0, y=1, before=(0, 2, 0), after=(0, 0, 0), steps=(1, 1, -1), value=7.0)
    x = np.arange(60.0).reshape(5, 3, 4)
    specs = {"x": TensorSpec.packed((5, 3, 4)), "y": TensorSpec.packed((5, 5, 4))}
    whole = pad.evaluate(XP, {"x": x}, specs)["y"]
    region = (slice(1, None, 3), slice(0, 5), slice(None))
    needed = pad.needs(specs, {"y": region})
    assert needed is not None
    part = pad.evaluate(XP, {"x": x[needed["x"]]}, {"y": TensorSpec.packed((2, 5, 4))})["y"]
    np.testing.assert_array_equal(part, whole[region])
    for axis in (1, 2):  # padded, and in reverse
        cut = tuple(slice(1, None) if n == axis else slice(None) for n in range(3))
        assert pad.needs(specs, {"y": cut}) is None
