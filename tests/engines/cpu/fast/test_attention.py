"""Attention and its gradients in the fast CPU engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cudnn_actor.engines.cpu.fast.attention import attention
from cudnn_actor.engines.cpu.fast.attention_gradients import attention_backward
from cudnn_actor.protocol import DType, TensorSpec
from cudnn_actor.protocol.operations import Attention, AttentionBackward

from .kernel_cases import Make, check
from .kernel_runs import LANES, run_kernel

MAKES: dict[Any, Make] = {Attention: attention, AttentionBackward: attention_backward}


def test_random_problems_are_right_within_their_bounds_on_any_number_of_lanes() -> None:
    check("attention", MAKES, 40)


def wanted_and_found(
    operation: Any, q: tuple[int, ...], k: tuple[int, ...], **more: np.ndarray
) -> list[dict[str, np.ndarray]]:
    """The results of the definition, and those of the kernel."""
    rng = np.random.default_rng(8)
    given = {
        name: rng.standard_normal(dims, np.float32) for name, dims in (("q", q), ("k", k), ("v", k))
    } | more
    specs = {name: TensorSpec.packed(array.shape, DType(array.dtype.name)) for name, array in given.items()}
    specs |= {"y": TensorSpec.packed(q), "statistics": TensorSpec.packed((*q[:3], 1))}
    exact = {
        name: array.astype(np.float64 if array.dtype.kind == "f" else np.int64)
        for name, array in given.items()
    }
    with np.errstate(all="ignore"):
        wanted = operation.evaluate(np, exact, specs)
    found = [run_kernel(attention, operation, specs, given, lanes) for lanes in LANES]
    for name in wanted:
        assert all(np.array_equal(found[0][name], each[name], equal_nan=True) for each in found)
    return [wanted, found[0]]


@pytest.mark.each_value
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_left": 700, "window_right": 3}], ids=str)
@pytest.mark.parametrize(("q", "k"), [((1, 2, 150, 8), (1, 1, 1500, 8)), ((2, 4, 1, 8), (2, 2, 40_000, 8))])
def test_long_keys_are_summed_up_block_by_block(
    options: dict[str, Any], q: tuple[int, ...], k: tuple[int, ...]
) -> None:
    operation = Attention(q="q", k="k", v="v", y="y", statistics="statistics", **options)
    wanted, found = wanted_and_found(operation, q, k)
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=2e-5)


def test_a_row_that_sees_nothing_is_zero() -> None:
    operation = Attention(
        q="q",
        k="k",
        v="v",
        y="y",
        statistics="statistics",
        bias="bias",
        lengths_q="lengths_q",
        lengths_kv="lengths_kv",
    )
    bias = np.zeros((1, 1, 9, 7), np.float32)
    bias[:, :, 2], bias[:, :, 3, 1:] = -np.inf, -np.inf
    lengths = {"lengths_q": np.array([9, 4, -1], np.int32), "lengths_kv": np.array([0, 20, 5], np.int32)}
    wanted, found = wanted_and_found(operation, (3, 2, 9, 4), (3, 2, 7, 4), bias=bias, **lengths)
    assert not found["y"][0].any()
    assert not found["y"][1, :, 2].any()
    assert not found["y"][2].any()
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("special", [np.inf, -np.inf, np.nan])
def test_infinity_and_nan_in_a_score_are_as_in_the_definition(special: float) -> None:
    bias = np.zeros((1, 1, 5, 6), np.float32)
    bias[..., 2, 3] = special
    operation = Attention(q="q", k="k", v="v", y="y", statistics="statistics", bias="bias")
    wanted, found = wanted_and_found(operation, (1, 1, 5, 4), (1, 1, 6, 4), bias=bias)
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-5, atol=1e-6)


STATE = np.array([123456789, (1 << 34) - 5], np.int64)
"""Numbers that begin inside of a block of four, and soon need more than 32 bits."""


@pytest.mark.each_value
@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
@pytest.mark.parametrize(
    ("q", "k"),
    [((1, 2, 150, 8), (1, 1, 150, 8)), ((2, 4, 1, 8), (2, 2, 4001, 8)), ((2, 3, 70, 8), (2, 3, 1501, 8))],
)
def test_dropout_has_the_factors_of_the_definition_in_every_block(
    options: dict[str, Any], q: tuple[int, ...], k: tuple[int, ...]
) -> None:
    names: Any = {"q": "q", "k": "k", "v": "v", "state": "state", "y": "y", "statistics": "statistics"}
    wanted, found = wanted_and_found(Attention(**names, dropout=0.3, **options), q, k, state=STATE)
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=1e-4, atol=2e-5)


def test_gradients_drop_the_weights_that_the_forward_pass_has_dropped() -> None:
    rng, q, k = np.random.default_rng(8), (1, 4, 90, 8), (1, 2, 1100, 8)
    dims = {"q": q, "k": k, "v": k, "dy": q, "bias": (1, 1, 1, k[2])}
    given: dict[str, Any] = {name: rng.standard_normal(of) for name, of in dims.items()} | {"state": STATE}
    forward: Any = {name: name for name in ("q", "k", "v", "bias", "state", "y", "statistics")}
    specs = {name: TensorSpec.packed(array.shape, DType(array.dtype.name)) for name, array in given.items()}
    specs |= {"y": TensorSpec.packed(q), "statistics": TensorSpec.packed((*q[:3], 1))}
    given |= Attention(**forward, dropout=0.4).evaluate(np, given, specs)
    backward: Any = {name: name for name in (*forward, "dy", "dq", "dk", "dv", "dbias")}
    operation: Any = AttentionBackward(**backward, dropout=0.4)
    specs = {
        name: TensorSpec.packed(array.shape, "int64" if name == "state" else "float32")
        for name, array in given.items()
    }
    specs |= operation.infer(specs)
    wanted = operation.evaluate(np, given, specs)
    for lanes in (1, 2):
        found = run_kernel(attention_backward, operation, specs, given, lanes)
        for name, array in wanted.items():
            np.testing.assert_allclose(found[name], array, rtol=1e-3, atol=1e-4)
