"""Which of cuDNN's candidates are tried first: cuDNN's own first ones, but for small attention and norms."""

from __future__ import annotations

from typing import Any

import pytest

from cudnn_actor.engines.cuda.planning.ranking import rank
from cudnn_actor.protocol import DType, GraphBuilder, Numerics, OperationGraph

BFLOAT16, FLOAT16, FLOAT32 = DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32
OF_ATTENTION = ["eng9_k24=7", "eng8_k24=6", "eng8_k24=5", "eng8_k24=3", "eng8_k24=33"]
OF_NORMS = ["eng6_k14=0_k24=0", "eng6_k14=1_k24=0", "eng4_k24=0_k30=3", "eng4_k24=0_k30=1", "eng41_k24=0"]


def attention(
    samples: int, heads: int, queries: int, width: int = 64, dtype: DType = BFLOAT16, **options: Any
) -> OperationGraph:
    g = GraphBuilder()
    keys = options.pop("keys", queries)
    q = g.input("q", (samples, heads, queries, width), dtype)
    k, v = (g.input(name, (samples, heads, keys, width), dtype) for name in "kv")
    if options.pop("lengths", False):
        options["lengths_kv"] = g.input("n", (samples,), DType.INT32)
    return g.build(y=g.attention(q, k, v, **options)).body


def norm(rows: tuple[int, ...], dtype: DType = BFLOAT16) -> OperationGraph:
    g = GraphBuilder()
    scale, bias = (g.input(name, (768,), dtype) for name in ("scale", "bias"))
    return g.build(y=g.layer_norm(g.input("x", (*rows, 768), dtype), scale, bias)).body


FEW = {
    "a vision transformer, one image": attention(1, 12, 197),
    "causal, one sample": attention(1, 12, 128, causal=True),
    "float16": attention(2, 8, 64, dtype=FLOAT16),
}
MANY = {
    "many samples": attention(32, 12, 128),
    "long": attention(1, 8, 1024),
    "few queries and many keys": attention(1, 12, 1, keys=1024),
    "wide": attention(1, 12, 128, 128),
    "float32": attention(1, 12, 128, dtype=FLOAT32),
    "lengths": attention(1, 12, 128, lengths=True),
}


@pytest.mark.parametrize("name", FEW)
def test_small_tiles_go_first_for_few_queries(name: str) -> None:
    assert rank(FEW[name], OF_ATTENTION) == [3, 0, 1, 2, 4]


@pytest.mark.parametrize("name", MANY)
def test_other_attention_is_tried_in_cudnns_order(name: str) -> None:
    assert rank(MANY[name], OF_ATTENTION) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("rows", [(128,), (1, 197), (2, 64)])
def test_one_engine_goes_first_for_norms_of_few_rows(rows: tuple[int, ...]) -> None:
    assert rank(norm(rows), OF_NORMS) == [2, 3, 0, 1, 4]
    assert rank(norm(rows), OF_NORMS[:2]) == [0, 1]


@pytest.mark.parametrize(
    "graph", [norm((32, 128)), norm((49,)), norm((128,), FLOAT32)], ids=["many rows", "fewer rows", "float32"]
)
def test_other_norms_are_tried_in_cudnns_order(graph: OperationGraph) -> None:
    assert rank(graph, OF_NORMS) == [0, 1, 2, 3, 4]


def test_what_numerics_prefer_goes_first() -> None:
    g = GraphBuilder(Numerics(prefer=("k14=1", "eng41")))
    scale = g.input("scale", (768,), BFLOAT16)
    graph = g.build(y=g.layer_norm(g.input("x", (128, 768), BFLOAT16), scale)).body
    assert rank(graph, OF_NORMS) == [1, 4, 2, 3, 0]
