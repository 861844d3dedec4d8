"""Gradients of norms in graphs, against finite differences in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cudnn_actor.protocol import (
    BatchNormTraining,
    DType,
    GenStats,
    GraphBuilder,
    GroupNorm,
    InstanceNorm,
    LayerNorm,
    RMSNorm,
    Tensor,
)

from ...in_one_test import cases_in_one_test
from ..differences import Function, check_gradients, gradients
from ..problems import normal

IMAGE, CHANNELS = (3, 4, 2, 3), (4,)
EPSILON: Any = {"epsilon": 0.1}


def values(*, running: bool = False, **dims: tuple[int, ...]) -> dict[str, np.ndarray]:
    given = {name: np.asarray(normal(of, DType.FLOAT64, n)) for n, (name, of) in enumerate(dims.items())}
    if running:
        given |= {"mean": normal(CHANNELS, DType.FLOAT64, 8), "variance": 1 + np.arange(4.0)}
    return given


WEIGHTED = values(x=IMAGE, scale=CHANNELS, bias=CHANNELS)
RUNNING = values(x=IMAGE, scale=CHANNELS, bias=CHANNELS, running=True)
ALL = ("new_running_mean", "new_running_variance", "mean", "inverse_deviation")
FUNCTIONS: dict[str, tuple[Function, dict[str, np.ndarray]]] = {
    "layer norm": (
        lambda g, x, scale, bias: g.layer_norm(x, scale, bias, axis=2, **EPSILON),
        values(x=IMAGE, scale=(2, 3), bias=(2, 3)),
    ),
    "layer norm without weights": (lambda g, x: g.layer_norm(x, axis=-2, **EPSILON), values(x=IMAGE)),
    "layer norm with its statistics": (
        lambda g, x: g.apply(LayerNorm(x=x, axis=1, **EPSILON), also=("mean", "inverse_deviation")),
        values(x=IMAGE),
    ),
    "the mean alone": (
        lambda g, x: g.apply(LayerNorm(x=x, axis=1, **EPSILON), also=("mean",)).mean,
        values(x=IMAGE),
    ),
    "rms norm": (lambda g, x, scale: g.rms_norm(x, scale, **EPSILON), values(x=IMAGE, scale=(3,))),
    "rms norm with its statistics": (
        lambda g, x: g.apply(RMSNorm(x=x, axis=2, **EPSILON), also=("inverse_rms",)),
        values(x=IMAGE),
    ),
    "batch norm": (
        lambda g, x, scale, bias, mean, variance: g.batch_norm(x, mean, variance, scale, bias, **EPSILON),
        RUNNING,
    ),
    "batch norm without weights": (
        lambda g, x, mean, variance: g.batch_norm(x, mean, variance, **EPSILON),
        values(x=IMAGE, running=True),
    ),
    "batch norm training": (
        lambda g, x, scale, bias: g.batch_norm_training(x, scale, bias, **EPSILON),
        WEIGHTED,
    ),
    "batch norm with all statistics": (
        lambda g, x, scale, bias, mean, variance: g.apply(
            BatchNormTraining(
                x=x,
                scale=scale,
                bias=bias,
                running_mean=mean,
                running_variance=variance,
                momentum=0.3,
                **EPSILON,
            ),
            also=ALL,
        ),
        RUNNING,
    ),
    "a running variance alone": (
        lambda g, x, mean, variance: (
            g.batch_norm_training(
                x, None, None, mean, variance, momentum=0.3, unbiased=False
            ).new_running_variance
        ),
        values(x=IMAGE, running=True),
    ),
    "instance norm": (lambda g, x, scale, bias: g.instance_norm(x, scale, bias, **EPSILON), WEIGHTED),
    "instance norm with its statistics": (
        lambda g, x: g.apply(InstanceNorm(x=x, **EPSILON), also=("mean", "inverse_deviation")),
        values(x=IMAGE),
    ),
    "group norm": (lambda g, x, scale, bias: g.group_norm(x, 2, scale, bias, **EPSILON), WEIGHTED),
    "group norm with its statistics": (
        lambda g, x: g.apply(GroupNorm(x=x, groups=2, **EPSILON), also=("mean", "inverse_deviation")),
        values(x=IMAGE),
    ),
    "response norm": (
        lambda g, x: g.local_response_norm(x, 2, alpha=0.7, beta=0.6, bias=1.3),
        values(x=IMAGE),
    ),
    "sums of channels": (lambda g, x: g.apply(GenStats(x=x)), values(x=IMAGE)),
    "the sum of squares alone": (lambda g, x: g.apply(GenStats(x=x)).sum_of_squares, values(x=IMAGE)),
    "of two dims": (
        lambda g, x, scale: g.batch_norm_training(x, scale, **EPSILON),
        values(x=(5, 4), scale=CHANNELS),
    ),
}


@cases_in_one_test
@pytest.mark.parametrize("name", FUNCTIONS)
def test_gradients_are_those_of_finite_differences(name: str) -> None:
    function, given = FUNCTIONS[name]
    check_gradients(function, given, tolerance=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_gradients_have_the_dtypes_of_their_tensors(dtype: str) -> None:
    def function(g: GraphBuilder, x: Tensor, mean: Tensor, variance: Tensor) -> list[Tensor]:
        return [g.batch_norm(x, mean, variance), g.instance_norm(x), g.group_norm(x, 2)]

    kind = DType(dtype).numpy
    given = values(x=IMAGE, running=True)
    given |= {"x": given["x"].astype(kind), "variance": given["variance"].astype(np.float32)}
    given["mean"] = given["mean"].astype(kind)
    _, found = gradients(function, given, ["x", "mean", "variance"])
    wide: Any = {name: array.astype(np.float64) for name, array in given.items()}
    _, wanted = gradients(function, wide, ["x", "mean", "variance"])
    for name, got in found.items():
        assert got.dtype == given[name].dtype
        bound = {"float32": 1e-5, "float16": 1e-2}.get(dtype, 6e-2)
        error = np.abs(got.astype(np.float64) - wanted[name]).max() / np.abs(wanted[name]).max()
        assert error < bound, name
