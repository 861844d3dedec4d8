"""Attention and its gradients: heads of any number of features, grouped or not, with masks and biases."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from cudnn_actor.engines.cpu.exact.evaluation import NumPy
from cudnn_actor.protocol import DType, TensorSpec
from cudnn_actor.protocol.operations import (
    Attention,
    AttentionBackward,
    RandomBernoulli,
    Specs,
    alibi_slopes,
)
from cudnn_actor.protocol.operations.base import Array

from .rows import BARE, FLOATS, Asked, Dims, Exact, Made, Row, Sizes, walk

__all__ = ["EXACTNESS", "ROWS"]

EXACTNESS = """\
With D features of a query, E of a value, N terms in a sum and w(n) = 4 √n, a score s may be off by d,
and its share p of the softmax by e · p:

> d = (w(D) + 6) u · scale · sum of \\|q k\\| + 4 u · (\\|bias\\| + \\|ALiBi\\| + max \\|s\\|) + 16 u,
> e = exp(d) - 1

where max is over the keys that a position sees and, in the backward pass, over its statistics. As shares add
up to 1, what counts is how far values are from their mean c. w(N) becomes N / 2, if that is more, where an
input has few different values, whose roundings do not cancel. r is 2⁻¹¹ for float16 and 2⁻⁸ for bfloat16 if
all heads are of multiples of 8 features: cuDNN's fused attention rounds weights, gradients of scores and the
gradients of heads that share keys to the type of its operands, before it goes on. For all else r is 0. t is
2⁻²⁵ for float16 where r is not 0, and 2⁻¹²⁶ for all else (2⁻¹⁰²² for float64): what is smaller may become 0.
g is exp(max d) r + (2 w(N) + 8) u, m is sum of \\|dy v\\| + sum of \\|dy y\\|, whose difference is the
gradient of p, S is the gradient of s, and h the sum of r · \\|dk\\| + t, or r · \\|dv\\| + t, of each of the
heads that share keys. With dropout, p and e where they are multiplied with v or dy, and dy v, are
multiplied with what the weights are, 0 or 1 / (1 - dropout); c is 0, and g and S have 4 and 2 more u. Before
it is rounded, a value may be off by

| | bound |
| --- | --- |
| y | exp(max d) · sum of p e (\\|v - c\\| + \\|y - c\\|) + g · sum of p \\|v\\| + t · sum of \\|v\\| |
| statistics | log(1 + sum of p e) + (w(N) + 8) u + 4 u · max \\|s\\| |
| S | f = (e + 4 u) \\|S\\| + ((1 + e) (w(E) + 3) u · p + 2⁻¹²⁶) · m |
| dq | scale · sum of ((1 + r) f + (r + (w(N) + 4) u) \\|S\\|) \\|k\\| + max(1, scale) · t · sum of \\|k\\| |
| dk | the same with q in the place of k; where heads share keys, also h |
| dv | sum of p ((1 + r) e + r + (w(N) + 4) u) \\|dy\\| + t · sum of \\|dy\\|; also h |
| dbias | sum of (1 + r) f + ((3 + w(N)) r + (w(N) + 4) u) \\|S\\| + max(1, 1 / scale) · t (2 + \\|S / p\\|) |
"""

PLAIN, CAUSAL, GROUPED, SCALED = "plain", "causal", "grouped heads", "scale"
BIASED, SHARED, WIDE = "bias", "shared bias", "bias as wide as sums"
LENGTHS, KEYS = "lengths", "lengths of keys"
ODD, TILES, DECODING = "odd features", "across tiles", "one query"
SIDE_BY_SIDE, SEVERAL = "heads side by side", "several at once"
WINDOW, ALIBI, SLOPES = "window", "alibi", "other slopes"
DROPOUT, ALL = "dropout", "window alibi and dropout"
FORMS = (
    PLAIN,
    CAUSAL,
    GROUPED,
    SCALED,
    BIASED,
    SHARED,
    WIDE,
    LENGTHS,
    KEYS,
    ODD,
    TILES,
    DECODING,
    SIDE_BY_SIDE,
    SEVERAL,
    WINDOW,
    ALIBI,
    SLOPES,
    DROPOUT,
    ALL,
)
_LENGTHS = ("lengths_q", "lengths_kv")
_BIASES = ("bias", "dbias")
_TILES = (1, 63, 64, 65, 127, 128, 129, 200)
_WINDOWS = (0, 1, 2, 5, 16, 40)
_MOST_SCORES = 300_000
_BY_POSITION = (0, 2, 1, 3)


def _make(asked: Asked) -> Made:
    choose = asked.choose
    while True:
        batch, groups, size, rows, columns, features, values = _sizes(asked)
        heads = groups * size
        if batch * heads * rows * columns <= _MOST_SCORES:
            break
    q, y = (batch, heads, rows, features), (batch, heads, rows, values)
    k, v = (batch, groups, columns, features), (batch, groups, columns, values)
    bias = (*_shared(asked, q[:3]), columns)
    dims = {"q": q, "k": k, "v": v, "y": y, "dy": y, "statistics": (*q[:3], 1), "bias": bias, "dbias": bias}
    wide = DType.FLOAT64 if asked.dtype is DType.FLOAT64 else DType.FLOAT32
    dtypes = {"statistics": wide, "state": DType.INT64} | dict.fromkeys(_LENGTHS, DType.INT32)
    for name in _BIASES:
        dtypes[name] = wide if asked.has(WIDE, 0.3) else asked.dtype
    several = asked.form == SEVERAL
    attributes = {
        "causal": several or asked.form in (ALIBI, ALL) or asked.has(CAUSAL, 0.4),
        "scale": choose.one((1.0, 0.37, -0.2, 4.0)) if several or asked.has(SCALED, 0.3) else None,
        "dropout": choose.one((0.1, 0.5, 0.9)) if asked.form in (None, DROPOUT, ALL) else 0.5,
    }
    if asked.form == ALL or asked.has(WINDOW, 0.3):
        attributes |= {name: choose.one((*_WINDOWS, None)) for name in ("window_left", "window_right")}
    if asked.form == ALL or asked.has(ALIBI, 0.15):
        attributes["slopes"] = alibi_slopes(heads)
    elif asked.has(SLOPES, 0.15):
        attributes["slopes"] = tuple(float(slope) for slope in choose.rng.normal(0, 0.3, heads).round(3))
    by_position = several or asked.has(SIDE_BY_SIDE, 0.5)
    named = ("q", "k", "v", "y", "dy", "dq", "dk", "dv")
    orders = dict.fromkeys(named, _BY_POSITION) if by_position else {}
    dims |= {**dict.fromkeys(_LENGTHS, (batch,)), "state": (2,)}
    return Made(dims, attributes, dtypes, orders)


def _shared(asked: Asked, dims: Dims) -> Dims:
    """The first dims of a bias: any of them may be 1."""
    if asked.form in (BIASED, WIDE):
        return dims
    patterns = [*itertools.product((True, False), repeat=3)]
    pattern = asked.choose.one(p for p in patterns if asked.form != SHARED or any(p))
    return tuple(1 if shared else size for shared, size in zip(pattern, dims, strict=True))


def _sizes(asked: Asked) -> tuple[int, ...]:
    """Samples, heads of k, heads of q for each of them, positions of q and of k, features of both kinds."""
    choose = asked.choose
    if asked.form is not None:
        groups, size = (2, 3) if asked.form in (GROUPED, SEVERAL) else (choose.one((2, 3)), 1)
        rows, columns = (int(n) for n in choose.rng.choice(np.arange(9, 60), 2, replace=False))
        if asked.form == TILES:
            rows, columns = choose.one(_TILES[3:]), choose.one(_TILES[3:])
        features = choose.each(2, 1, 40) if asked.form == ODD else choose.one(((64, 64), (32, 32), (64, 128)))
        if asked.form == ODD:
            features = (features[0] | 1, features[1])
        return (2, groups, size, 1 if asked.form == DECODING else rows, columns, *features)
    heads = choose.one(((1, 1), (2, 1), (3, 1), (8, 1), (1, 2), (2, 2), (1, 8), (2, 4), (3, 2)))
    batch, eights = choose.size(4), tuple(8 * choose.size(16) for _ in range(2))
    match asked.sizes:
        case Sizes.ONE:
            return (1,) * 7
        case Sizes.TINY:
            return (*choose.each(3, 1, 3), *choose.each(4, 1, 4))
        case Sizes.VECTOR:
            features = choose.one((eights, eights[:1] * 2))
            return (batch, *heads, 8 * choose.size(25), 8 * choose.size(25), *features)
        case Sizes.LONG:
            features = choose.one((eights[:1] * 2, eights[:1] * 2, choose.each(2, 1, 129)))
            return (batch, *heads, choose.one(_TILES), choose.one(_TILES), *features)
        case _:
            extents = (choose.size(200), choose.size(200), choose.size(128), choose.size(128))
            return (batch, *heads, *extents)


def _arrange(operation: Any, rng: np.random.Generator, values: Exact, specs: Specs) -> None:
    """Lengths of all kinds, any state, and what the forward pass gives for them."""
    if "state" in specs:
        values["state"] = rng.integers(-(1 << 63), 1 << 63, 2)
    for name, longest in zip(_LENGTHS, (specs["q"].dims[2], specs["k"].dims[2]), strict=True):
        if name in specs:
            batch = specs[name].dims[0]
            inside, unusual = rng.integers(0, longest + 1, batch), (0, -3, longest, longest + 1, 2**31 - 1)
            values[name] = np.where(rng.random(batch) < 0.6, inside, rng.choice(unusual, batch))
    if isinstance(operation, AttentionBackward):
        forward: Attention[int] = Attention(q=0, k=1, v=2, y=3, **operation.options)
        values |= forward.evaluate(NumPy(), values, {})


def _factors(operation: Any, values: Exact, dims: Dims) -> Any:
    """The factors of the weights, of these dims: 0 where they are dropped, as `RandomBernoulli` says."""
    if not operation.dropout:
        return 1.0
    drawing: RandomBernoulli[str] = RandomBernoulli(
        state="state", y="y", dims=dims, probability=1 - operation.dropout
    )
    kept = drawing.evaluate(NumPy(), values, {"y": TensorSpec.packed(dims)})["y"]
    return kept / (1 - operation.dropout)


class _Scores:
    """What both bounds begin with: scores, which are seen, and how far off they may be."""

    def __init__(self, operation: Any, values: Exact) -> None:
        q, k, bias = values["q"], values["k"], values.get("bias", np.zeros((1, 1, 1, 1)))
        self.heads = q.shape[1] // k.shape[1]
        self.scale = operation.effective_scale(q.shape[3])
        keys = self.spread(k).swapaxes(2, 3)
        self.seen = _seen(operation, values)
        row, column = np.arange(q.shape[2])[:, None], np.arange(k.shape[2])
        slopes = np.array(operation.slopes or (0.0,))[:, None, None]
        lowered = slopes * np.abs(row - column)
        self.values = np.where(self.seen, q @ keys * self.scale + bias - lowered, -math.inf)
        self.largest = np.where(self.seen, np.abs(self.values), 0.0).max(axis=3, keepdims=True)
        products = np.abs(q) @ np.abs(keys) * abs(self.scale)
        self.off = (walk(q.shape[3]) + 6) * products + 4 * (np.abs(bias) + np.abs(lowered)) + 16
        self.factors = _factors(operation, values, self.values.shape)

    def spread(self, array: Array) -> Array:
        """Of k's heads, the one of each of q's."""
        return np.repeat(array, self.heads, axis=1)

    def by_group(self, array: Array) -> Array:
        """Sums of the heads that share keys."""
        batch, heads, *rest = array.shape
        return array.reshape(batch, heads // self.heads, self.heads, *rest).sum(axis=2)


def _seen(operation: Any, values: Exact) -> Array:
    (batch, _, rows, _), columns = values["q"].shape, values["k"].shape[2]
    row, column = np.arange(rows)[:, None], np.arange(columns)
    seen = np.ones((batch, 1, rows, columns), bool)
    if operation.causal:
        seen &= column <= row
    if operation.window_left is not None:
        seen &= row - column <= operation.window_left
    if operation.window_right is not None:
        seen &= column - row <= operation.window_right
    if "lengths_q" in values:
        seen &= row < values["lengths_q"][:, None, None, None]
    if "lengths_kv" in values:
        seen &= column < values["lengths_kv"][:, None, None, None]
    return seen


def _units(values: Exact, dtype: DType) -> tuple[float, float, float, float]:
    """u; in terms of it r, t, and the least normal number: what is smaller may become 0.

    cuDNN's fused attention takes heads of multiples of 8 features alone.
    """
    u = 2.0**-53 if dtype is DType.FLOAT64 else 2.0**-24
    fused = not (values["q"].shape[3] % 8 or values["v"].shape[3] % 8)
    r = {DType.FLOAT16: 2.0**-11, DType.BFLOAT16: 2.0**-8}.get(dtype, 0.0) if fused else 0.0
    least = 2.0**-1022 if dtype is DType.FLOAT64 else 2.0**-126
    t = 2.0**-25 if r and dtype is DType.FLOAT16 else least
    return u, r / u, t / u, least / u


def _sum(terms: int, values: Mapping[str, Array]) -> float:
    """The error of a sum over positions; more where there are few different terms, which round alike."""
    few = any(values[name].size > 64 * np.unique(values[name]).size for name in ("q", "k", "v"))
    return max(walk(terms), terms / 2 if few else 0.0)


def _forward(operation: Attention[str], values: Exact, specs: Specs) -> Exact:
    """With shares p of errors up to e, y is off by sum(p e |v - y|) / sum(p (1 - e)), if nothing else is.

    Online softmax multiplies sums with the same rounded factors above and below the line, so that these add
    no more than other roundings of sums.
    """
    u, r, t, _ = _units(values, specs["y"].dtype)
    scores, v = _Scores(operation, values), values["v"]
    wanted = operation.evaluate(NumPy(), values, {})
    logarithm = np.where(scores.seen.any(axis=3, keepdims=True), wanted["statistics"], 0.0)
    p = np.where(scores.seen, np.exp(scores.values - logarithm), 0.0)
    off = np.where(scores.seen, scores.off + 4 * scores.largest, 0.0)
    e = p * np.expm1(u * off) / u
    # The shares of what is not dropped do not add up to 1.
    centre = v.mean(axis=2, keepdims=True) * (not operation.dropout)
    apart = (e * scores.factors) @ scores.spread(np.abs(v - centre))
    apart += e.sum(axis=3, keepdims=True) * np.abs(wanted["y"] - scores.spread(centre))
    sums, length = (p * scores.factors) @ scores.spread(np.abs(v)), v.shape[2]
    some = np.where(scores.seen, scores.factors, 0.0)
    of_sum = _sum(length, values)
    worse = np.exp(u * off.max(axis=3, keepdims=True))
    steps = 2 * of_sum + (12 if operation.dropout else 8)
    y = worse * (apart + r * sums) + steps * sums + t * (some @ scores.spread(np.abs(v)))
    of_statistics = np.log1p(u * e.sum(axis=3, keepdims=True)) / u + of_sum + 8 + 4 * scores.largest
    return {"y": y, "statistics": of_statistics}


def _backward(operation: AttentionBackward[str], values: Exact, specs: Specs) -> Exact:
    """Every step's own error, and that of what it is given, in the worst case of signs."""
    u, r, t, least = _units(values, specs["dq"].dtype)
    scores, dy = _Scores(operation, values), values["dy"]
    q, k, v, y = (values[name] for name in "qkvy")
    statistics = np.where(np.isfinite(values["statistics"]), values["statistics"], 0.0)
    p = np.where(scores.seen, np.exp(scores.values - statistics), 0.0)
    e = np.expm1(u * (scores.off + 4 * np.maximum(scores.largest, np.abs(statistics)))) / u
    factors = scores.factors
    of_weights = dy @ scores.spread(v).swapaxes(2, 3) * factors - (dy * y).sum(axis=3, keepdims=True)
    slopes = p * of_weights
    magnitude = np.abs(dy) @ scores.spread(np.abs(v)).swapaxes(2, 3) * factors
    magnitude += np.abs(dy * y).sum(axis=3, keepdims=True)
    size = np.abs(slopes)
    steps = walk(v.shape[3]) + (5 if operation.dropout else 3)
    f = (e + 4) * size + ((1 + u * e) * steps * p + scores.seen * least) * magnitude
    scale, some = abs(scores.scale), np.where(scores.seen, t, 0.0)
    rows, columns = q.shape[2], k.shape[2]

    def of_slopes(terms: int) -> Array:
        rounded = (1 + u * r) * f + (r + _sum(terms, values) + 4) * size
        return scale * rounded + max(1.0, scale) * some

    p = p * factors
    of_p = p * ((1 + u * r) * e + r + _sum(rows * scores.heads, values) + 4) + some * factors
    dk = of_slopes(rows * scores.heads).swapaxes(2, 3) @ np.abs(q)
    dv = of_p.swapaxes(2, 3) @ np.abs(dy)
    if scores.heads > 1:
        # cuDNN writes each head's gradient in the operands' type, and then adds up those of a group.
        dk += r * (np.abs(slopes.swapaxes(2, 3) @ q) * scale + u * dk) + t
        dv += r * (np.abs(p.swapaxes(2, 3) @ dy) + u * dv) + t
    found = {
        "dq": of_slopes(columns) @ scores.spread(np.abs(k)),
        "dk": scores.by_group(dk),
        "dv": scores.by_group(dv),
    }
    if "dbias" in specs:
        summed = tuple(axis for axis in range(3) if specs["dbias"].dims[axis] == 1)
        terms = math.prod(p.shape[axis] for axis in summed)
        # cuDNN multiplies weights that are rounded, and adds up in the operands' type. It rounds S·scale:
        # 28 small gradients on an H200 (cuDNN 9.19), were multiples of the smallest number divided by scale.
        rounded = (3 + walk(terms)) * r + _sum(terms, values) + 4
        smallest = some / min(scale, 1.0) if scale else some
        each = (1 + u * r) * f + rounded * size + smallest * (2 + np.abs(of_weights))
        found["dbias"] = each.sum(axis=summed, keepdims=True)
    return found


_GIVEN: dict[str, tuple[str, ...]] = {
    **dict.fromkeys((PLAIN, CAUSAL, GROUPED, SCALED, ODD, TILES, DECODING, SIDE_BY_SIDE), ()),
    **dict.fromkeys((BIASED, SHARED, WIDE), _BIASES),
    **dict.fromkeys((WINDOW, ALIBI, SLOPES), ()),
    LENGTHS: _LENGTHS,
    KEYS: ("lengths_kv",),
    SEVERAL: (*_BIASES, *_LENGTHS),
    DROPOUT: ("state",),
}


def _row(operation: Any, forms: tuple[str, ...], bounds: Any) -> Row:
    given = tuple((form, (*names, "statistics")) for form, names in _GIVEN.items())
    return Row(
        operation,
        FLOATS,
        ranks=(4,),
        forms=forms,
        make=_make,
        bounds=bounds,
        arrange=_arrange,
        varied=("dy",),
        given=given,
        needs=(("dbias", "bias"),),
        belongs=(("dropout", "state"),),
    )


ROWS = (_row(Attention, (*FORMS, BARE), _forward), _row(AttentionBackward, FORMS, _backward))
