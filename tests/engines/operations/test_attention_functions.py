"""Attention of a graph builder beside NumPy: what is seen, sinks, changed scores, several heads."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cudnn_actor import spawn
from cudnn_actor.protocol import DType, GraphBuilder, InvalidRequest, Tensor, alibi_slopes
from cudnn_actor.protocol.types.dtypes import DTypeName

from ...in_one_test import cases_in_one_test
from ..differences import check_gradients, computed

B, H, G, S, L, D, E = 3, 4, 2, 5, 7, 3, 2
"""Samples, heads of queries and of keys, queries, keys, features of keys and of values."""
LENGTHS_Q, LENGTHS_KV = np.array([5, 2, 0], np.int32), np.array([3, 9, 1], np.int32)


def values(rows: int = S, columns: int = L) -> dict[str, Any]:
    chance = np.random.default_rng(3)
    dims = {"q": (B, H, rows, D), "k": (B, G, columns, D), "v": (B, G, columns, E)}
    return {name: chance.normal(size=of) for name, of in dims.items()}


def defined(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    *,
    causal: Any = False,
    window: tuple[int | None, int | None] = (None, None),
    lengths: bool = False,
    alibi: bool = False,
    bias: np.ndarray | None = None,
    sinks: np.ndarray | None = None,
    score: Callable[[np.ndarray], np.ndarray] | None = None,
) -> np.ndarray:
    """Attention, one query after the other."""
    y = np.zeros((B, H, q.shape[2], E))
    for b, h, i in np.ndindex(y.shape[:3]):
        rows = min(LENGTHS_Q[b], q.shape[2]) if lengths else q.shape[2]
        columns = min(LENGTHS_KV[b], k.shape[2]) if lengths else k.shape[2]
        own = i + (columns - rows if causal == "bottom_right" else 0)
        left, right = window[0], 0 if causal else window[1]
        seen = [
            j
            for j in range(columns)
            if (left is None or j >= own - left) and (right is None or j <= own + right) and i < rows
        ]
        scores = k[b, h // (H // G)] @ q[b, h, i] / math.sqrt(D)
        if alibi:
            scores -= alibi_slopes(H)[h] * abs(np.arange(k.shape[2]) - own)
        if bias is not None:
            scores += np.broadcast_to(bias, (B, H, q.shape[2], k.shape[2]))[b, h, i]
        if score is not None:
            scores = score(scores)
        weights = np.exp(scores[seen])
        total = weights.sum() + (0 if sinks is None or i >= rows else np.exp(sinks[h]))
        y[b, h, i] = weights / (total or 1) @ v[b, h // (H // G)][seen]
    return y


def by_builder(given: dict[str, np.ndarray], **options: Any) -> np.ndarray:
    g = GraphBuilder()
    named = {name: options.pop(name) for name in ("bias", "sinks") if options.get(name) is not None}
    arrays = {**given, **named}
    if options.pop("lengths", False):
        arrays |= {"lengths_q": LENGTHS_Q, "lengths_kv": LENGTHS_KV}
    inputs: dict[str, Any] = {name: g.input(name, array.shape, array.dtype) for name, array in arrays.items()}
    return computed(g.build(y=g.attention(**inputs, **options)), arrays)["y"]


WINDOWS: dict[str, dict[str, Any]] = {
    "all": {},
    "causal": {"causal": True},
    "from the end": {"causal": "bottom_right"},
    "some before": {"window": (2, None)},
    "a band": {"window": (1, 1)},
    "some before, from the end": {"causal": "bottom_right", "window": (2, None)},
}
BIAS = np.random.default_rng(7).normal(size=(1, H, S, L))
SINKS = np.array([0.5, -1.0, 2.0, 0.0])


@pytest.mark.parametrize("name", WINDOWS)
def test_what_a_query_sees(name: str) -> None:
    given = values()
    for lengths, alibi, bias, sinks in itertools.product(
        (False, True), (False, True), (None, BIAS), (None, SINKS)
    ):
        options = {**WINDOWS[name], "lengths": lengths, "alibi": alibi, "bias": bias, "sinks": sinks}
        np.testing.assert_allclose(
            by_builder(given, **options), defined(**given, **options), atol=1e-12, err_msg=str(options)
        )


@pytest.mark.parametrize("name", WINDOWS)
def test_scores_that_the_caller_changes(name: str) -> None:
    given = values()
    for lengths, alibi, bias in itertools.product((False, True), (False, True), (None, BIAS)):
        options = {**WINDOWS[name], "lengths": lengths, "alibi": alibi, "bias": bias}
        got = by_builder(given, score=lambda x: 5.0 * x.builder.tanh(x / 5.0), **options)
        wanted = defined(**given, score=lambda x: 5.0 * np.tanh(x / 5.0), **options)
        np.testing.assert_allclose(got, wanted, atol=1e-12, err_msg=str(options))


@pytest.mark.parametrize(("rows", "columns"), [(7, 5), (1, 4), (4, 1), (6, 6)])
def test_causality_from_the_end_with_more_queries_or_more_keys(rows: int, columns: int) -> None:
    given = values(rows, columns)
    got = by_builder(given, causal="bottom_right")
    np.testing.assert_allclose(got, defined(**given, causal="bottom_right"), atol=1e-12)


@pytest.mark.parametrize("dims", [(0, 4, 5, 7), (3, 0, 5, 7), (3, 4, 0, 7), (3, 4, 5, 0)])
def test_there_may_be_no_samples_heads_queries_or_keys(dims: tuple[int, ...]) -> None:
    samples, heads, rows, columns = dims
    of_keys = (samples, heads, columns, D)
    given = {"q": np.ones((samples, heads, rows, D)), "k": np.ones(of_keys), "v": np.ones(of_keys)}
    for options in ({"causal": "bottom_right"}, {"score": lambda x: 2.0 * x}):
        got = by_builder(given, **options)
        np.testing.assert_array_equal(got, np.zeros((samples, heads, rows, D)))


def test_gradients_of_compositions() -> None:
    given = {**values(2, 3), "sinks": SINKS}

    def attended(g: GraphBuilder, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> list[Tensor]:
        return [
            g.attention(q, k, v, sinks=sinks, causal="bottom_right"),
            g.attention(q, k, v, sinks=sinks, window=(1, 0), alibi=True),
            g.attention(q, k, v, score=lambda x: 2.0 * g.tanh(x), window=(None, -1 + 1)),
        ]

    check_gradients(attended, given)


def test_dropout_drops_the_same_with_a_score_function_as_without() -> None:
    given = values()
    state = np.array([5, 0], np.int64)
    found = []
    scores: list[Any] = [None, lambda x: x * 1.0]
    for score in scores:
        g = GraphBuilder()
        inputs: dict[str, Any] = {n: g.input(n, array.shape, "float64") for n, array in given.items()}
        drawn = g.input("state", (2,), "int64")
        y = g.attention(**inputs, dropout=0.4, state=drawn, score=score)
        found.append(computed(g.build(y=y), {**given, "state": state})["y"])
    np.testing.assert_allclose(found[0], found[1], atol=1e-12)


# Several heads.


def projected(heads: int, x: np.ndarray, w: np.ndarray, bias: np.ndarray) -> np.ndarray:
    y = x @ w.T + bias
    return np.asarray(y.reshape(*y.shape[:2], heads, -1).transpose(0, 2, 1, 3))


SIZES = {"q_proj_weight": (6, 4), "k_proj_weight": (6, 3), "v_proj_weight": (8, 5), "out_proj.weight": (7, 8)}
"""Projections of other sizes than the query's, of two heads."""


def test_several_heads_with_projections_of_any_size() -> None:
    chance = np.random.default_rng(2)
    w = {name: chance.normal(size=of) for name, of in SIZES.items()}
    w |= {"in_proj_bias": chance.normal(size=20), "out_proj.bias": chance.normal(size=7)}
    x = {"query": chance.normal(size=(B, S, 4)), "key": chance.normal(size=(B, L, 3))}
    x["value"] = chance.normal(size=(B, L, 5))
    residual = chance.normal(size=(B, S, 7))
    parts = np.split(w["in_proj_bias"], [6, 12])
    names = zip(x, list(SIZES)[:3], parts, strict=True)
    q, k, v = (projected(2, x[name], w[of], part) for name, of, part in names)
    scores = q @ k.transpose(0, 1, 3, 2) / math.sqrt(3)
    weights = np.exp(scores) / np.exp(scores).sum(3, keepdims=True)
    mixed = (weights @ v).transpose(0, 2, 1, 3).reshape(B, S, 8)
    wanted = mixed @ w["out_proj.weight"].T + w["out_proj.bias"] + residual
    g = GraphBuilder()
    tensors = {f"w{n}": g.input(f"w{n}", array.shape, "float64") for n, array in enumerate(w.values())}
    inputs: dict[str, Any] = {name: g.input(name, array.shape, "float64") for name, array in x.items()}
    y = g.multi_head_attention(
        **inputs,
        weights=dict(zip(w, tensors.values(), strict=True)),
        heads=2,
        batch_first=True,
        residual=g.input("r", residual.shape, "float64"),
    )
    given = {**x, **dict(zip(tensors, w.values(), strict=True)), "r": residual}
    np.testing.assert_allclose(computed(g.build(y=y), given)["y"], wanted, atol=1e-11)


@pytest.mark.parametrize("bias", [False, True])
def test_packed_weights_are_those_that_lie_in_them_and_have_one_gradient(bias: bool) -> None:
    features, of_key = 4, 6
    sizes = [features * features, features * of_key, features * features, features * features]
    sizes += [3 * features, features] if bias else []
    chance = np.random.default_rng(1)
    packed, x, key = (chance.normal(size=of) for of in ((sum(sizes),), (S, 2, features), (L, 2, of_key)))
    value = chance.normal(size=(L, 2, features))

    def attended(g: GraphBuilder, packed: Tensor, x: Tensor, key: Tensor, value: Tensor) -> Tensor:
        weights = g.attention_weights(packed, features, key_features=of_key, bias=bias)
        assert [math.prod(each.dims) for each in weights.values()] == sizes
        return g.multi_head_attention(x, key, value, weights=weights, heads=2)

    check_gradients(attended, {"packed": packed, "x": x, "key": key, "value": value})
    parts = np.split(packed, np.cumsum(sizes)[:-1])
    dims = [
        (features, features),
        (features, of_key),
        *[(features, features)] * 2,
        (3 * features,),
        (features,),
    ]
    names = (
        "q_proj_weight",
        "k_proj_weight",
        "v_proj_weight",
        "out_proj.weight",
        "in_proj_bias",
        "out_proj.bias",
    )
    apart = {name: part.reshape(of) for name, part, of in zip(names, parts, dims, strict=False)}
    found = []
    for given in ({"packed": packed}, {f"w{n}": array for n, array in enumerate(apart.values())}):
        g = GraphBuilder()
        tensors = [g.input(name, array.shape, "float64") for name, array in given.items()]
        inputs = [g.input(n, a.shape, "float64") for n, a in (("x", x), ("key", key), ("value", value))]
        if "packed" in given:
            weights = g.attention_weights(tensors[0], features, key_features=of_key, bias=bias)
        else:
            weights = dict(zip(apart, tensors, strict=True))
        y = g.multi_head_attention(*inputs, weights=weights, heads=2)
        found.append(computed(g.build(y=y), {**given, "x": x, "key": key, "value": value})["y"])
    np.testing.assert_array_equal(found[0], found[1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_the_fast_engine_computes_what_the_exact_one_does(dtype: DTypeName) -> None:
    g = GraphBuilder()
    x, sinks = g.input("x", (2, 9, 16), dtype), g.input("sinks", (4,), dtype)
    weights = g.attention_weights(g.input("w", (4 * 16 * 16 + 4 * 16,), dtype), 16)
    y = g.multi_head_attention(x, weights=weights, heads=4, batch_first=True, causal=True, zero_key=True)
    heads = g.transpose(g.reshape(y, (2, 9, 4, 4)), (0, 2, 1, 3))
    z = g.attention(heads, heads, heads, sinks=sinks, causal="bottom_right", window=(4, None))
    graph = g.build(y=y, z=z)
    chance = np.random.default_rng(0)
    arrays = {port.name: (chance.normal(size=port.spec.dims) / 2) for port in graph.inputs}
    found = []
    for exact in (True, False):
        async with spawn(device="cpu", exact=exact) as gpu:
            refs = {
                name: await gpu.upload(array.astype(DType(dtype).numpy)) for name, array in arrays.items()
            }
            results = await gpu.apply(graph, refs)
            found.append([(await gpu.download(ref)).astype(np.float64) for ref in results])
    for one, other in zip(*found, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5 if dtype == "float32" else 0.05)


WRONG: dict[str, tuple[str, Callable[[GraphBuilder], Any]]] = {
    "another alignment": ("causal='top_left'", lambda g: attended(g, causal="top_left")),
    "sinks of other heads": ("sinks", lambda g: attended(g, sinks=g.input("s", (3,)))),
    "sinks and scores": (
        "sinks",
        lambda g: attended(g, sinks=g.input("s", (4,)), score=lambda x: x),
    ),
    "scores of other dims": ("score", lambda g: attended(g, score=lambda x: x[:, :1])),
    "no weights": ("weights", lambda g: headed(g, {})),
    "no such weight": ("weights", lambda g: headed(g, {"in_proj_weights": (12, 4)})),
    "a key without a value": ("weights", lambda g: headed(g, {"bias_k": (1, 1, 4)})),
    "three projections of other sizes": ("in_proj_weight", lambda g: headed(g, {"in_proj_weight": (13, 4)})),
    "a bias of another size": ("in_proj_bias", lambda g: headed(g, {"in_proj_bias": (11,)})),
    "projections of another key": ("in_proj_weight", lambda g: headed(g, {"in_proj_weight": (12, 5)})),
    "three heads": ("heads", lambda g: headed(g, {}, heads=3)),
    "no heads": ("heads", lambda g: headed(g, {}, heads=0)),
    "another result": ("out_proj.weight", lambda g: headed(g, {"out_proj.weight": (4, 5)})),
    "an image": ("query", lambda g: headed(g, {}, dims=(2, 3, 4, 4))),
    "packed weights of another size": ("packed", lambda g: g.attention_weights(g.input("p", (79,)), 4)),
    "no features": ("features", lambda g: g.attention_weights(g.input("p", (80,)), 0)),
}
MODULE = {"in_proj_weight": (12, 4), "in_proj_bias": (12,), "out_proj.weight": (4, 4), "out_proj.bias": (4,)}


def attended(g: GraphBuilder, **options: Any) -> Tensor:
    q, k, v = (g.input(name, (1, 4, 3, 2)) for name in "qkv")
    return g.attention(q, k, v, **options)


def headed(
    g: GraphBuilder, others: dict[str, tuple[int, ...]], heads: int = 2, dims: tuple[int, ...] = (3, 2, 4)
) -> Tensor:
    sizes = {**MODULE, **others} if others or heads != 2 or len(dims) != 3 else {}
    weights = {name: g.input(f"w{n}", of) for n, (name, of) in enumerate(sizes.items())}
    return g.multi_head_attention(g.input("x", dims), weights=weights, heads=heads)


@cases_in_one_test
@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused_by_name(name: str) -> None:
    field, function = WRONG[name]
    with pytest.raises(InvalidRequest, match=field):
        function(GraphBuilder())
