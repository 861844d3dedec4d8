"""Products, norms, losses, attention and quantised operators."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..draw import Draw
from ..versions import Version
from .parts import Hint, Parts
from .windows import conv as _conv

__all__ = ["PRODUCTS"]


def _types(d: Draw, v: Version) -> list[np.dtype[Any]]:
    return [d.dtype(v.schema, each.type_str) for each in v.schema.inputs]


def _operands(d: Draw) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Dims of two operands of a matrix product."""
    m, k, n = d.size(), d.size(empty=d.seldom(0.3)), d.size()
    batch = d.dims(d.choice((0, 0, 1, 2)))
    a = (k,) if d.random() < 0.15 else (*d.broadcast(batch), m, k)
    b = (k,) if d.random() < 0.15 else (*d.broadcast(batch), k, n)
    return a, b


def matmul(d: Draw, v: Version) -> Parts:
    a, b = _operands(d)
    types = _types(d, v)
    inputs = [d.array(types[0], a), d.array(types[1], b)]
    if v.operator == "MatMulInteger":
        rows = a[-2:-1] if d.random() < 0.3 and len(a) > 1 else ()
        columns = b[-1:] if d.random() < 0.3 and len(b) > 1 else ()
        inputs += [
            d.array(types[2], rows if len(a) == 2 else ()),
            d.array(types[3], columns if len(b) == 2 else ()),
        ]
    return Parts(inputs)


def gemm(d: Draw, v: Version) -> Parts:
    m, k, n = d.size(), d.size(), d.size()
    over_a, over_b = d.randint(0, 1), d.randint(0, 1)
    t = _types(d, v)[0]
    a, b = (k, m) if over_a else (m, k), (n, k) if over_b else (k, n)
    c = d.broadcast((m, n))
    attributes = {
        "transA": over_a,
        "transB": over_b,
        "alpha": d.choice((None, 0.5, 0.0)),
        "beta": d.choice((None, 0.5, 0.0)),
        "broadcast": int(c != (m, n)),
    }
    return Parts([d.array(t, a), d.array(t, b), d.array(t, c)], attributes)


def einsum(d: Draw, v: Version) -> Parts:
    sizes = {letter: d.randint(1, 4) for letter in "abcde"}
    terms = ["".join(d.choices("abcde", k=d.randint(1, 3))) for _ in range(d.randint(1, 3))]
    letters = sorted(set("".join(terms)))
    result = "->" + "".join(d.sample(letters, d.randint(0, len(letters))))
    t, wide = _types(d, v)[0], d.random() < 0.15
    arrays = [d.array(t, (*((2,) if wide else ()), *(sizes[letter] for letter in term))) for term in terms]
    if wide:
        terms, result = [f"...{term}" for term in terms], result.replace("->", "->...")
    equation = ",".join(terms) + (result if d.random() < 0.8 or wide else "")
    return Parts(arrays, {"equation": equation.replace("->", " -> ") if d.seldom(0.1) else equation})


def det(d: Draw, v: Version) -> Parts:
    n = d.randint(1, 4)
    return Parts([d.array(_types(d, v)[0], (*d.dims(d.choice((0, 1, 2))), n, n))])


# Norms.


def batch_normalization(d: Draw, v: Version) -> Parts:
    types, channels = _types(d, v), d.randint(1, 3)
    x = (d.randint(1, 3), channels, *d.dims(d.choice((0, 1, 2)), empty=False))
    inputs = [
        d.array(types[0], x),
        *(d.array(t, (channels,)) for t in types[1:4]),
        d.positive(types[4], (channels,)),
    ]
    attributes: dict[str, Any] = {
        "is_test": 1,
        "spatial": d.choice((None, 1)),
        "training_mode": 0,
        "consumed_inputs": [0, 0, 0, 1, 1],
    }
    return Parts(inputs, attributes | {"epsilon": d.choice((None, 1e-3))}, outputs=1)


def instance_normalization(d: Draw, v: Version) -> Parts:
    t, channels = _types(d, v)[0], d.randint(1, 3)
    x = (d.randint(1, 2), channels, *d.dims(d.choice((1, 2)), empty=False))
    return Parts(
        [d.array(t, x), d.array(t, (channels,)), d.array(t, (channels,))], {"epsilon": d.choice((None, 1e-3))}
    )


def group_normalization(d: Draw, v: Version) -> Parts:
    groups, t = d.randint(1, 3), _types(d, v)[0]
    channels = groups * d.randint(1, 2)
    x, of = (
        (d.randint(1, 2), channels, *d.dims(d.choice((1, 2)), empty=False)),
        (groups if v.since < 21 else channels,),
    )
    return Parts(
        [d.array(t, x), d.array(t, of), d.array(t, of)],
        {"num_groups": groups, "epsilon": d.choice((None, 1e-3))},
    )


def layer_normalization(d: Draw, v: Version) -> Parts:
    if (
        v.operator == "RMSNormalization"
    ):  # ONNX infers the type of x for the result, and declares that of the scale
        d.prefer("V", d.dtype(v.schema, "T"))
    types, x = _types(d, v), d.dims(d.randint(1, 4), empty=d.seldom())
    axis = d.randrange(len(x))
    attributes = {"axis": axis - d.choice((0, len(x))), "epsilon": d.choice((None, 1e-3))}
    of = d.broadcast(x[axis:]) if d.random() < 0.3 else x[axis:]
    return Parts([d.array(t, x if not n else of) for n, t in enumerate(types)], attributes)


# Losses.


def loss(d: Draw, v: Version) -> Parts:
    types, classes = _types(d, v), d.randint(1, 4)
    rest = d.dims(d.choice((0, 0, 1, 2)), empty=False)
    batch = d.randint(1, 3)
    ignored = d.choice((None, None, 0, -1, 255))
    target = d.whole(0, classes, (batch, *rest), types[1])
    if ignored is not None:
        target = np.where(d.arrays.random(target.shape) < 0.2, np.array(ignored, types[1]), target)
    inputs = [d.array(types[0], (batch, classes, *rest)), target, d.positive(types[2], (classes,))]
    return Parts(inputs, {"ignore_index": ignored})


# Attention.


def attention(d: Draw, v: Version) -> Parts:
    batch, heads, few = d.randint(1, 2), d.choice((1, 2, 4)), d.choice((1, 1, 2))
    kv_heads = heads // few if heads % few == 0 else heads
    queries, keys, size, v_size = d.randint(1, 4), d.randint(1, 5), d.choice((2, 4, 8)), d.choice((2, 4))
    q, k, value = (
        (batch, heads, queries, size),
        (batch, kv_heads, keys, size),
        (batch, kv_heads, keys, v_size),
    )
    attributes: dict[str, Any] = dict.fromkeys(
        ("q_num_heads", "kv_num_heads", "left_window_size", "right_window_size")
    )
    if d.random() < 0.4:
        q, k, value = ((each[0], each[2], each[1] * each[3]) for each in (q, k, value))  # type: ignore[assignment]
        attributes |= {"q_num_heads": heads, "kv_num_heads": kv_heads}
    d.prefer("T2", d.dtype(v.schema, "T1"))  # ONNX's own function multiplies both
    d.prefer("U", np.bool_ if d.random() < 0.3 else d.dtype(v.schema, "T1"))
    t = _types(d, v)
    past = d.randint(1, 3) if d.random() < 0.3 else 0
    total = past + keys
    mask_dims = d.choice(
        ((queries, total), (1, 1, queries, total), (batch, heads, queries, total), (batch, 1, 1, total))
    )
    inputs: list[Any] = [d.array(t[0], q), d.array(t[1], k), d.array(t[2], value), d.array(t[3], mask_dims)]
    if past:
        inputs += [
            d.array(t[4], (batch, kv_heads, past, size)),
            d.array(t[5], (batch, kv_heads, past, v_size)),
        ]
    attributes |= {
        "is_causal": d.choice((None, 0, 1)),
        "scale": d.choice((None, 0.5)),
        "softcap": d.choice((None, 2.0, 0.0)),
        "qk_matmul_output_mode": d.choice((None, 0, 1, 2, 3)),
        "softmax_precision": None,
    }
    return Parts(inputs, attributes, needed=frozenset({4, 5}), outputs=d.choice((1, 1, 3, 4)) if past else 1)


def flex_attention(d: Draw, v: Version) -> Parts:
    t, batch, heads, size = _types(d, v), d.randint(1, 2), d.randint(1, 2), d.choice((2, 4))
    q, k = d.randint(1, 4), d.randint(1, 4)
    dims = [(batch, heads, q, size), (batch, heads, k, size), (batch, heads, k, d.choice((2, 4)))]
    return Parts(
        [d.array(each, dim) for each, dim in zip(t, dims, strict=True)],
        {"score_mod": None, "prob_mod": None, "softmax_precision": None},
    )


def linear_attention(d: Draw, v: Version) -> Parts:
    t, batch, heads, size, steps = (
        _types(d, v),
        d.randint(1, 2),
        d.choice((1, 2)),
        d.choice((2, 4)),
        d.randint(1, 4),
    )
    rule = d.choice(("linear", "gated", "delta", "gated_delta"))
    packed = (batch, steps, heads * size)
    inputs: list[Any] = [d.array(each, packed) for each in t[:3]] + [
        d.array(t[3], (batch, heads, size, size))
    ]
    inputs.append(d.array(t[4], packed) if "gated" in rule else None)
    inputs.append(d.positive(t[5], (batch, steps, heads)) if "delta" in rule else None)
    attributes = {
        "q_num_heads": heads,
        "kv_num_heads": heads,
        "update_rule": rule,
        "chunk_size": None,
        "scale": d.choice((None, 0.5)),
    }
    return Parts(inputs, attributes, needed=frozenset({4, 5}))


def rotary(d: Draw, v: Version) -> Parts:
    t, batch, heads, steps, size = (
        _types(d, v),
        d.randint(1, 2),
        d.randint(1, 2),
        d.randint(1, 4),
        d.choice((4, 8)),
    )
    turned = d.choice((0, 0, size // 2))
    by_place = d.random() < 0.5
    cache = (6, (turned or size) // 2) if by_place else (batch, steps, (turned or size) // 2)
    flat = d.random() < 0.4
    x = (batch, steps, heads * size) if flat else (batch, heads, steps, size)
    attributes = {"num_heads": heads if flat else None, "rotary_embedding_dim": turned or None}
    inputs = [
        d.array(t[0], x),
        d.array(t[1], cache),
        d.array(t[2], cache),
        d.whole(0, 6, (batch, steps)) if by_place else None,
    ]
    return Parts(inputs, attributes, needed=frozenset({3}))


def causal_conv(d: Draw, v: Version) -> Parts:
    t, batch, channels, steps, taps = (
        _types(d, v),
        d.randint(1, 2),
        d.randint(1, 3),
        d.randint(1, 5),
        d.randint(1, 4),
    )
    inputs = [(batch, channels, steps), (channels, 1, taps), (channels,), (batch, channels, taps - 1)]
    return Parts([d.array(each, dims) for each, dims in zip(t, inputs, strict=True)])


# Quantised operators.


def _scale(d: Draw, t: Any, dims: Sequence[int]) -> np.ndarray:
    if np.dtype(t).kind in "iu":
        return d.whole(1, 4, dims, t)
    if d.flavour == "ties":
        return d.arrays.choice([0.25, 0.5, 1.0, 2.0], tuple(dims)).astype(t)
    return d.positive(t, dims)


def quantize(d: Draw, v: Version) -> Parts:
    t, x = _types(d, v), list(d.dims(empty=d.seldom(0.1)))
    axis = d.randrange(len(x)) if x else 0
    kind = d.choice(("one", "one", "axis", "block")) if x and v.since >= 13 else "one"
    of: tuple[int, ...] = ()
    block = None
    if kind == "axis":
        of = (x[axis],)
    elif kind == "block" and v.has("block_size"):
        block = d.randint(1, 3)
        of = tuple(-(-dim // block) if n == axis else dim for n, dim in enumerate(x))
    attributes = {
        "axis": (axis - d.choice((0, len(x)))) if x else None,
        "block_size": block,
        "output_dtype": None,
        "precision": None,
        "saturate": None,
    }
    values = d.array(t[0], x)
    if v.operator == "QuantizeLinear" and values.dtype.kind == "f":
        with np.errstate(over="ignore"):
            values = values * np.array(20, values.dtype)
    return Parts([values, _scale(d, t[1], of), d.array(t[2], of)], attributes)


def dynamic_quantize(d: Draw, v: Version) -> Parts:
    return Parts([d.array(np.float32, d.dims(empty=d.seldom(0.1)))])


def qlinear_matmul(d: Draw, v: Version) -> Parts:
    t = _types(d, v)
    a, b = _operands(d)
    rows = a[-2:-1] if len(a) == 2 and d.random() < 0.2 else ()
    columns = b[-1:] if len(b) == 2 and d.random() < 0.2 else ()
    y = (*rows,) if d.seldom() else ()
    dims = [a, rows, rows, b, columns, columns, y, y]
    return Parts(
        [
            _scale(d, kind, each) if n in (1, 4, 6) else d.array(kind, each)
            for n, (kind, each) in enumerate(zip(t, dims, strict=True))
        ]
    )


def qlinear_conv(d: Draw, v: Version) -> Parts:
    plain = _conv(d, v)
    t = _types(d, v)
    x, w = (np.asarray(plain.inputs[number]).shape for number in (0, 1))
    each = (w[0],) if d.random() < 0.4 else ()
    inputs = [
        d.array(t[0], x),
        _scale(d, t[1], ()),
        d.array(t[2], ()),
        d.array(t[3], w),
        _scale(d, t[4], each),
    ]
    inputs += [
        d.array(t[5], each),
        _scale(d, t[6], ()),
        d.array(t[7], ()),
        d.whole(-50, 50, (w[0],), np.int32),
    ]
    return Parts(inputs, plain.attributes)


# Training.


def optimizer(d: Draw, v: Version) -> Parts:
    dims, t = d.dims(), d.dtype(v.schema, "T2")
    states = {"Adagrad": 1, "Adam": 2, "Momentum": 1}[v.operator]
    count = d.choice((1, 1, 2))
    inputs = [np.array(0.1, d.dtype(v.schema, "T1")), np.array(d.choice((0, 1, 5)))]
    inputs += [d.array(t, dims) for _ in range(2 * count)] + [
        d.positive(t, dims) for _ in range(states * count)
    ]
    return Parts(inputs, outputs=(1 + states) * count)


PRODUCTS: dict[str, Hint] = {
    "Adagrad": optimizer,
    "Adam": optimizer,
    "Attention": attention,
    "BatchNormalization": batch_normalization,
    "CausalConvWithState": causal_conv,
    "DequantizeLinear": quantize,
    "Det": det,
    "DynamicQuantizeLinear": dynamic_quantize,
    "Einsum": einsum,
    "FlexAttention": flex_attention,
    "Gemm": gemm,
    "GroupNormalization": group_normalization,
    "InstanceNormalization": instance_normalization,
    "LayerNormalization": layer_normalization,
    "LinearAttention": linear_attention,
    "MatMul": matmul,
    "MatMulInteger": matmul,
    "Momentum": optimizer,
    "NegativeLogLikelihoodLoss": loss,
    "QLinearConv": qlinear_conv,
    "QLinearMatMul": qlinear_matmul,
    "QuantizeLinear": quantize,
    "RMSNormalization": layer_normalization,
    "RotaryEmbedding": rotary,
    "SoftmaxCrossEntropyLoss": loss,
}
