"""Attention with what is known of its masks, heads that are shared, and rotary embedding, on a GPU."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from cudnn_actor.protocol import DType, Graph, GraphBuilder, Tensor

from ..engines.differences import computed
from ..engines.references import relative_error
from .test_epilogues import run

BFLOAT16 = DType.BFLOAT16
B, H, S, D = 3, 4, 128, 64


def attention(bias: tuple[int, ...] | None, heads: int = H, *, causal: bool, joined: bool = False) -> Graph:
    """Attention of heads that lie side by side in rows, perhaps with those of all operands in one."""
    g = GraphBuilder()

    def split(x: Tensor, count: int) -> Tensor:
        return g.transpose(g.reshape(x, (B, S, count, D)), (0, 2, 1, 3))

    if joined:
        rows = g.input("rows", (B, S, (H + 2 * heads) * D), BFLOAT16)
        starts = (0, H * D, (H + heads) * D, (H + 2 * heads) * D)
        parts = [rows[..., start:end] for start, end in itertools.pairwise(starts)]
    else:
        sizes = zip("qkv", (H, heads, heads), strict=True)
        parts = [g.input(name, (B, S, count * D), BFLOAT16) for name, count in sizes]
    q, k, v = (split(part, count) for part, count in zip(parts, (H, heads, heads), strict=True))
    mask = None if bias is None else g.input("bias", bias, BFLOAT16)
    return g.build(y=g.transpose(g.attention(q, k, v, bias=mask, causal=causal), (0, 2, 1, 3)))


def values_of(graph: Graph) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(5)
    values: dict[str, Any] = {p.name: rng.standard_normal(p.spec.dims) for p in graph.inputs}
    if "bias" in values:
        seen = np.arange(S) < np.array([S, 100, 1]).reshape(B, 1, 1, 1)
        values["bias"] = np.broadcast_to(np.where(seen, 0, -math.inf), values["bias"].shape)
    return {p.name: values[p.name].astype(p.spec.dtype.numpy) for p in graph.inputs}


GRAPHS = {
    "a mask of keys": attention((B, 1, 1, S), causal=False),
    "a causal mask of keys": attention((B, 1, 1, S), causal=True),
    "a causal mask of all": attention((B, 1, S, S), causal=True),
    "shared heads": attention(None, 2, causal=True, joined=True),
    "shared heads and a mask of keys": attention((B, 1, 1, S), 2, causal=True, joined=True),
    "of one product": attention((B, 1, 1, S), causal=False, joined=True),
}


@pytest.mark.parametrize("name", GRAPHS)
async def test_attention_with_a_mask_or_shared_heads(name: str) -> None:
    graph = GRAPHS[name]
    values = values_of(graph)
    found, steps = await run(graph, values)
    wanted = computed(graph, {key: each.astype(np.float64) for key, each in values.items()})["y"]
    assert np.isfinite(found["y"].astype(np.float32)).all()
    assert relative_error(found["y"], wanted.astype(np.float64)) < 2e-2
    assert len(steps) == 1, steps


@pytest.mark.parametrize("causal", [False, True])
async def test_rows_that_see_nothing_weigh_keys_alike_if_a_mask_is_finite(causal: bool) -> None:
    graph = attention((B, 1, 1, S), causal=causal)
    values = values_of(graph)
    values["bias"][:2] = -1e38
    found, steps = await run(graph, values)
    wanted = computed(graph, {key: each.astype(np.float64) for key, each in values.items()})["y"]
    assert relative_error(found["y"], wanted.astype(np.float64)) < 2e-2
    assert len(steps) == 1, steps


def rotary() -> Graph:
    """As Llama has it."""
    g = GraphBuilder()
    rows = g.input("rows", (B, S, H * D), BFLOAT16)
    x = g.transpose(g.reshape(rows, (B, S, H, D)), (0, 2, 1, 3))
    cos, sin = (g.input(name, (1, 1, S, D), BFLOAT16) for name in ("cos", "sin"))
    turned = g.concatenate([-x[..., D // 2 :], x[..., : D // 2]], 3)
    return g.build(y=(x * cos + turned * sin).astype(BFLOAT16))


async def test_rotary_embedding_is_one_kernel() -> None:
    graph = rotary()
    values = values_of(graph)
    found, steps = await run(graph, values)
    assert len(steps) == 1, steps
    wanted = computed(graph, values)["y"].astype(np.float64)
    assert relative_error(found["y"], wanted) < 4e-3
