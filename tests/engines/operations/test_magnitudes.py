"""How large results would be if their terms did not cancel: by that, sums that are nearly 0 are judged."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cudnn_actor.protocol import (
    BatchNormTraining,
    DType,
    GroupNorm,
    InstanceNorm,
    LayerNorm,
    LocalResponseNormBackward,
    Resample,
    ResampleBackward,
    ResampleMode,
    TensorSpec,
)

from ..problems import normal


def check(operation: Any, dims: tuple[int, ...], of: dict[str, TensorSpec], name: str) -> None:
    """Of a result that is linear in the first input: the terms are what each element of that adds."""
    values = normal(dims, DType.FLOAT64, 1)
    given = operation.inputs[0]
    units = np.eye(values.size).reshape(values.size, *dims)
    terms = [
        operation.evaluate(np, {given: unit}, of)[name] * value
        for unit, value in zip(units, values.ravel(), strict=True)
    ]
    wanted = np.sqrt(sum(term**2 for term in terms))
    found = operation.magnitudes(np, {given: values}, of)[name]
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found, wanted, rtol=1e-12)


@pytest.mark.parametrize("mode", [ResampleMode.LINEAR, ResampleMode.CUBIC])
@pytest.mark.parametrize(("dims", "sizes"), [((5, 4), (8, 9)), ((7, 5), (3, 2)), ((1,), (7,))])
def test_resampling(mode: ResampleMode, dims: tuple[int, ...], sizes: tuple[int, ...]) -> None:
    shared: dict[str, Any] = {"sizes": sizes, "mode": mode, "antialias": True, "exclude_outside": True}
    check(Resample(x="x", y="y", **shared), dims, {"y": TensorSpec.packed(sizes)}, "y")
    check(ResampleBackward(dy="dy", dx="dx", **shared), sizes, {"dx": TensorSpec.packed(dims)}, "dx")


@pytest.mark.parametrize(
    "norm",
    [
        LayerNorm(x="x", y="y", mean="mean", axis=2),
        BatchNormTraining(x="x", y="y", mean="mean"),
        InstanceNorm(x="x", y="y", mean="mean"),
        GroupNorm(x="x", y="y", mean="mean", groups=2),
    ],
    ids=lambda norm: norm.kind,
)
def test_means(norm: Any) -> None:
    check(norm, (2, 4, 3, 5), {}, "mean")


def test_gradients_of_local_responses() -> None:
    """Of one element's gradient, the terms of others are the result, and its own two may cancel."""
    operation: Any = LocalResponseNormBackward(dy="dy", x="x", dx="dx", size=3, alpha=0.5)
    x = normal((1, 6, 2), DType.FLOAT64, 2)
    for place in np.ndindex(x.shape):
        dy = np.zeros(x.shape)
        dy[place] = 2.0
        result = abs(operation.evaluate(np, {"dy": dy, "x": x}, {})["dx"])
        found = operation.magnitudes(np, {"dy": dy, "x": x}, {})["dx"]
        own = dy != 0
        np.testing.assert_allclose(found[~own], result[~own], rtol=1e-12)
        assert result[own] <= found[own] * 2**0.5
        assert found[own] <= 2 * (1 + 0.5 * x[own] ** 2)
