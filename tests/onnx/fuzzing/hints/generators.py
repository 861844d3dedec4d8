"""Operators whose results follow from numbers, and those whose inputs are limited otherwise."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import TensorProto, numpy_helper

from ..draw import Draw
from ..versions import Version
from .parts import Hint, Parts, by_schema

__all__ = ["GENERATORS"]


def range_of(d: Draw, v: Version) -> Parts:
    t = d.dtype(v.schema, "T")
    start, delta = d.randint(-3, 3), d.choice((1, 2, -1, 3) if t.kind in "iu" else (1, 0.5, -0.5, 0.3))
    limit = start + int(np.sign(delta)) * d.randint(-1, 9)
    if t.kind == "u":
        start, delta, limit = abs(start), abs(delta), abs(limit)
    return Parts([np.array(each).astype(t) for each in (start, limit, delta)])


def window(d: Draw, v: Version) -> Parts:
    return Parts([np.array(d.randint(0 if d.seldom() else 1, 9), d.dtype(v.schema, "T1"))])


def mel(d: Draw, v: Version) -> Parts:
    t1, t3 = d.dtype(v.schema, "T1"), d.dtype(v.schema, "T2")
    numbers = [np.array(each, t1) for each in (d.randint(2, 6), d.choice((16, 32)), 8192)]
    return Parts([*numbers, np.array(0, t3), np.array(4096, t3)])


def constant(d: Draw, v: Version) -> Parts:
    kinds: dict[str, Any] = {
        "value": numpy_helper.from_array(d.array(d.choice(("f4", "f2", "f8", "i8", "?")), d.dims())),
        "value_float": 1.5,
        "value_floats": [1.0, -2.0],
        "value_int": 3,
        "value_ints": [1, 2, 3],
    }
    chosen = d.choice([name for name in kinds if v.has(name)])
    return Parts([], dict.fromkeys(v.schema.attributes) | {chosen: kinds[chosen]})


def constant_of_shape(d: Draw, v: Version) -> Parts:
    return Parts([np.array(d.dims(), np.int64)])


def clip(d: Draw, v: Version) -> Parts:
    t, low = d.dtype(v.schema, v.schema.inputs[0].type_str), d.choice((0, 1, -1, 2))
    x, high = d.array(t, d.dims()), low + d.choice((0, 1, 3, -1 if d.seldom(0.2) else 1))
    if len(v.schema.inputs) == 1:
        return Parts([x], {"min": d.choice((None, float(low))), "max": d.choice((None, float(high)))})
    return Parts([x, np.array(low).astype(t), np.array(high).astype(t)])


def dropout(d: Draw, v: Version) -> Parts:
    parts = by_schema(d, v)
    x = parts.inputs[0]
    if len(v.schema.inputs) == 1:
        return Parts([x], {"is_test": 1})
    return Parts(
        [x, np.array(d.choice((0.0, 0.5)), d.dtype(v.schema, "T1")), np.array(d.seldom(0.1))], {"seed": None}
    )


def power(d: Draw, v: Version) -> Parts:
    types = [d.dtype(v.schema, each.type_str) for each in v.schema.inputs]
    base = d.dims()
    exponents = d.arrays.choice(
        [0, 1, 2, 3, 4] if types[1].kind in "iu" else [0.0, 1.0, 2.0, -1.0, 0.5, 1.7], d.broadcast(base)
    )
    return Parts([d.array(types[0], d.broadcast(base)), np.asarray(exponents).astype(types[1])])


def integers(d: Draw, v: Version) -> Parts:
    """Of a quotient or a remainder: a divisor of integers is not 0."""
    parts = by_schema(d, v)
    a, b = parts.inputs[:2]
    if b.dtype.kind in "iu":
        low = np.iinfo(b.dtype).min
        b = np.where(
            (b == 0) | ((b == np.array(-1).astype(b.dtype)) & (b.dtype.kind == "i")), np.array(2, b.dtype), b
        )
        a = np.where(a == low, np.array(3, a.dtype), a) if a.dtype.kind == "i" else a
    fmod = None if v.operator == "Div" else int(a.dtype.kind == "f" or d.random() < 0.4)
    return Parts([a, b], {"fmod": fmod} if fmod else {})


def shift(d: Draw, v: Version) -> Parts:
    t, base = d.dtype(v.schema, "T"), d.dims()
    return Parts(
        [d.array(t, d.broadcast(base)), d.whole(0, 8 * t.itemsize, d.broadcast(base), t)],
        {"direction": d.choice(("LEFT", "RIGHT"))},
    )


def prelu(d: Draw, v: Version) -> Parts:
    t, x = d.dtype(v.schema, "T"), d.dims()
    slope = d.broadcast(x)
    if v.since < 7:
        slope = (1,) if d.random() < 0.5 or len(x) < 2 else (x[1],)
    return Parts([d.array(t, x), d.array(t, slope)])


def bit_cast(d: Draw, v: Version) -> Parts:
    parts = by_schema(d, v)
    x = parts.inputs[0]
    same = {
        1: ("INT8", "UINT8"),
        2: ("INT16", "FLOAT16", "BFLOAT16"),
        4: ("INT32", "FLOAT"),
        8: ("INT64", "DOUBLE"),
    }
    return Parts([x], {"to": getattr(TensorProto, d.choice(same.get(x.dtype.itemsize, ("FLOAT",))))})


def cast(d: Draw, v: Version) -> Parts:
    """Numbers that the other type can have: what becomes of others is not defined, but for floats."""
    t = d.dtype(v.schema, "T1")
    x = d.array(t, d.dims())
    if v.since < 6:
        return Parts([x], {"to": d.choice(("FLOAT", "INT32", "BOOL", "DOUBLE"))})
    return Parts([x], {"saturate": None, "round_mode": None})


def random(d: Draw, v: Version) -> Parts:
    """With bounds in their order: ONNX Runtime looks for ever for numbers between others."""
    attributes = {"shape": list(d.dims()), "dtype": d.choice((None, 1)), "seed": d.choice((None, 1.0))}
    return Parts(
        by_schema(d, v).inputs, attributes | {"low": None, "high": d.choice((None, 2.0)), "scale": None}
    )


def multinomial(d: Draw, v: Version) -> Parts:
    t = d.dtype(v.schema, "T1")
    return Parts([d.array(t, (2, 3))], {"sample_size": 2, "dtype": d.choice((None, 6, 7))})


def slow_label(d: Draw, v: Version) -> Parts:
    keys = {"keys_int64s": [0, 1, 2], "values_floats": [0.5, 1.5, 2.5]}
    nothing: dict[str, Any] = dict.fromkeys(v.schema.attributes)
    return Parts([d.whole(0, 4, d.dims())], nothing | keys)


GENERATORS: dict[str, Hint] = {
    "BitCast": bit_cast,
    "BitShift": shift,
    "BlackmanWindow": window,
    "Cast": cast,
    "Clip": clip,
    "Constant": constant,
    "ConstantOfShape": constant_of_shape,
    "Div": integers,
    "Dropout": dropout,
    "HammingWindow": window,
    "HannWindow": window,
    "LabelEncoder": slow_label,
    "MelWeightMatrix": mel,
    "Mod": integers,
    "Multinomial": multinomial,
    "PRelu": prelu,
    "Pow": power,
    "RandomNormal": random,
    "RandomNormalLike": random,
    "RandomUniform": random,
    "RandomUniformLike": random,
    "Range": range_of,
}
