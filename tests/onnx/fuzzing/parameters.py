"""Attributes by their names and types, where no hint of the operator gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from onnx import TensorProto, defs, numpy_helper

from .draw import Draw
from .versions import Version

__all__ = ["attributes"]

_TYPES = [
    *("FLOAT", "FLOAT", "FLOAT16", "DOUBLE", "BFLOAT16", "INT8", "UINT8", "INT16", "UINT16"),
    *("INT32", "INT64", "INT64", "UINT32", "UINT64", "BOOL"),
]
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "activation": ("none", "silu", "swish"),
    "approximate": ("none", "tanh"),
    "auto_pad": ("NOTSET", "VALID", "SAME_UPPER", "SAME_LOWER"),
    "case_change_action": ("LOWER", "UPPER", "NONE"),
    "direction": ("forward", "reverse", "bidirectional"),
    "norm": ("MAX", "L1", "L2"),
    "padding_mode": ("zeros", "border", "reflection"),
    "reduction": ("none", "add", "mul", "min", "max"),
    "update_rule": ("linear", "gated", "delta", "gated_delta"),
}
_MODES: Mapping[str, tuple[str, ...]] = {
    "DepthToSpace": ("DCR", "CRD"),
    "GridSample": ("linear", "nearest", "cubic", "bilinear", "bicubic"),
    "Momentum": ("standard", "nesterov"),
    "Pad": ("constant", "edge", "reflect", "wrap"),
    "RoiAlign": ("avg", "max"),
    "SpaceToDepth": ("DCR", "CRD"),
    "TensorScatter": ("linear", "circular"),
    "TfIdfVectorizer": ("TF", "IDF", "TFIDF"),
}
_LOSSES = ("none", "mean", "sum")


def _type(d: Draw, v: Version, x: Any) -> int:
    return int(getattr(TensorProto, d.choice(_TYPES)))


def _perm(d: Draw, v: Version, x: Any) -> list[int]:
    rank = x.ndim if isinstance(x, np.ndarray) else 2
    found = d.sample(range(rank), rank)
    return [*found, 0] if d.seldom(0.02) else found


def _rank(x: Any) -> int:
    return x.ndim if isinstance(x, np.ndarray) else 2


_NAMED: Mapping[str, Callable[[Draw, Version, Any], Any]] = {
    "axes": lambda d, v, x: d.axes(_rank(x), least=int(not d.seldom())),
    "axis": lambda d, v, x: d.axis(_rank(x)),
    "batch_axis": lambda d, v, x: d.choice((0, 1)),
    "blocksize": lambda d, v, x: d.choice((1, 2, 2, 3)),
    "dtype": _type,
    "output_datatype": lambda d, v, x: d.choice((1, 1, 10, 11)),
    "p": lambda d, v, x: d.choice((1, 2, 2, 3)),
    "perm": _perm,
    "softmax_precision": lambda d, v, x: d.choice((1, 10, 11)),
    "stash_type": lambda d, v, x: 1 if not d.seldom() else d.choice((10, 11)),
    "time_axis": lambda d, v, x: d.choice((0, 1)),
    "to": _type,
    "value": lambda d, v, x: numpy_helper.from_array(d.array(d.choice(("f4", "f8", "i4", "i8", "?")), (1,))),
}


def _string(d: Draw, v: Version, name: str) -> str:
    if d.seldom(0.02):
        return "nonsense"
    if name == "mode":
        return d.choice(_MODES.get(v.operator, ("constant",)))
    if name == "reduction" and "Loss" in v.operator:
        return d.choice(_LOSSES)
    return d.choice(_CHOICES.get(name, ("a", "")))


def _drawn(d: Draw, v: Version, declared: Any, x: Any) -> Any:
    if declared.type == _KIND.STRING:
        return _string(d, v, declared.name)
    if declared.name in _NAMED:
        return _NAMED[declared.name](d, v, x)
    return _OF_TYPE[declared.type](d) if declared.type in _OF_TYPE else None


_KIND = defs.OpSchema.AttrType
_FLOATS = (0.0, 1.0, -1.0, 0.5, 2.0, 0.1, 1e-3)
_OF_TYPE: Mapping[Any, Callable[[Draw], Any]] = {
    _KIND.INT: lambda d: d.choice((0, 1)) if not d.seldom(0.03) else d.choice((-1, 2, 3)),
    _KIND.FLOAT: lambda d: d.choice(_FLOATS),
    _KIND.INTS: lambda d: d.sizes(d.randint(1, 3), 0, 3),
    _KIND.FLOATS: lambda d: d.choices(_FLOATS, k=d.randint(1, 3)),
    _KIND.STRINGS: lambda d: ["a", "bc"],
}
"""Attributes of which nothing but the type is known; flags are such, too."""


def attributes(d: Draw, v: Version, x: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    """The given attributes, and others of the operator, each of which may be left out.

    `x`: the operator's first input. Given ones that are None are left out.
    """
    found = dict(given)
    for name, declared in sorted(v.schema.attributes.items()):
        if name not in found and (declared.required or d.random() < 0.55):
            found[name] = _drawn(d, v, declared, x)
    return {name: value for name, value in found.items() if value is not None and v.has(name)}
