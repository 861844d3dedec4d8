"""Operators with subgraphs, and those of lists."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ..draw import FLOATS, Draw
from ..versions import Version
from .parts import Hint, Parts, scalar

__all__ = ["SUBGRAPHS"]


def _info(name: str, dtype: Any, dims: Sequence[int] | None = None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), dims)


def _constant(name: str, array: Any) -> onnx.NodeProto:
    return helper.make_node("Constant", [], [name], value=numpy_helper.from_array(np.asarray(array)))


def _branch(d: Draw, which: str, array: np.ndarray) -> onnx.GraphProto:
    op = d.choice(("Identity", "Neg", "Abs"))
    nodes = [_constant(f"{which}_c", array), helper.make_node(op, [f"{which}_c"], [f"{which}_y"])]
    return helper.make_graph(nodes, which, [], [_info(f"{which}_y", array.dtype, array.shape)])


def branches(d: Draw, v: Version) -> Parts:
    t, dims = d.choice(FLOATS[:4]), d.dims()
    yes, no = (
        _branch(d, each, d.array(t, dims if d.random() < 0.8 or v.since < 11 else d.dims()))
        for each in ("yes", "no")
    )
    return Parts([scalar(d, d.random() < 0.5, np.bool_)], {"then_branch": yes, "else_branch": no}, outputs=1)


def loop(d: Draw, v: Version) -> Parts:
    """A state that grows, and its value at each turn; a condition may end it, also before the first."""
    t, dims, turns = d.choice(FLOATS[:4]), d.dims(), d.choice((0, 1, 2, 3, 4))
    state = d.array(t, dims)
    nodes = [_constant("two", np.array(2, t)), helper.make_node("Mul", ["s", "two"], ["s_out"])]
    nodes.append(helper.make_node("Identity", ["s"], ["seen"]))
    if d.random() < 0.4:
        nodes += [
            _constant("last", np.array(d.choice((0, 1, 2)))),
            helper.make_node("Less", ["i", "last"], ["go"]),
        ]
    else:
        nodes.append(helper.make_node("Identity", ["c"], ["go"]))
    given = [_info("i", np.int64, ()), _info("c", np.bool_, ()), _info("s", t, dims)]
    made = [_info("go", np.bool_, ()), _info("s_out", t, dims), _info("seen", t, dims)]
    body = helper.make_graph(nodes, "body", given, made)
    return Parts(
        [np.array(turns), np.array(not d.seldom(0.2)), state],
        {"body": body},
        needed=frozenset({0}),
        outputs=2,
    )


def scan(d: Draw, v: Version) -> Parts:
    t, steps, inner = (
        d.choice(FLOATS[:4]),
        d.choice((0 if d.seldom() else 1, 1, 2, 3)),
        d.dims(d.choice((0, 1, 2)), empty=False),
    )
    nodes = [helper.make_node("Add", ["s", "x"], ["s_out"]), helper.make_node("Mul", ["s", "x"], ["y"])]
    given, made = ([_info(name, t, inner) for name in names] for names in (("s", "x"), ("s_out", "y")))
    attributes: dict[str, Any] = dict.fromkeys(v.schema.attributes)
    attributes |= {"body": helper.make_graph(nodes, "body", given, made), "num_scan_inputs": 1}
    if v.since == 8:
        x = d.array(t, (2, steps, *inner))
        attributes["directions"] = d.choice((None, [0], [1]))
        return Parts([None, d.array(t, (2, *inner)), x], attributes, outputs=2)
    axis = d.randint(0, len(inner))
    x = d.array(t, (*inner[:axis], steps, *inner[axis:]))
    shown = axis - (x.ndim if v.since >= 11 and d.random() < 0.3 else 0)
    attributes["scan_input_axes"] = [shown] if axis or d.random() < 0.5 else None
    out = d.randint(0, len(inner))
    attributes["scan_output_axes"] = (
        [out - (x.ndim if v.since >= 11 and d.random() < 0.3 else 0)] if out or d.random() < 0.3 else None
    )
    attributes["scan_input_directions"] = d.choice((None, [0], [1]))
    attributes["scan_output_directions"] = d.choice((None, [0], [1]))
    return Parts([d.array(t, inner), x], attributes, outputs=2)


# Lists.


def _list(d: Draw, count: int | None = None, dims: tuple[int, ...] | None = None) -> list[np.ndarray]:
    t, dims = d.choice(("f4", "f4", "i8")), d.dims() if dims is None else dims
    count = d.choice((0, 1, 2, 3)) if count is None else count
    return [d.array(t, dims) for _ in range(count)]


def _place(d: Draw, size: int, last: int) -> np.ndarray:
    return np.array(d.choice((size + 1, -size - 1)) if d.seldom() else d.randint(-size, max(-size, last)))


def at(d: Draw, v: Version) -> Parts:
    of = _list(d)
    return Parts([of, _place(d, len(of), len(of) - 1)])


def insert(d: Draw, v: Version) -> Parts:
    dims = d.dims()
    of = _list(d, dims=dims)
    t = of[0].dtype if of else np.float32
    return Parts([of, d.array(t, dims), _place(d, len(of), len(of))])


def concat(d: Draw, v: Version) -> Parts:
    dims, new = d.dims(least=1), d.choice((None, 0, 1))
    return Parts(
        [_list(d, d.choice((1, 2, 3)), dims)], {"new_axis": new, "axis": d.axis(len(dims) + int(new or 0))}
    )


def split(d: Draw, v: Version) -> Parts:
    x = d.array(d.dtype(v.schema, "T"), d.dims(least=1))
    axis = d.randrange(x.ndim)
    size = x.shape[axis]
    cut = d.randint(0, size)
    parts = d.choice((np.array(max(1, cut)), np.array([cut, size - cut])))
    return Parts([x, parts], {"axis": axis - d.choice((0, x.ndim))})


def mapped(d: Draw, v: Version) -> Parts:
    of = _list(d, d.choice((1, 2, 3)))
    t = of[0].dtype
    nodes = [helper.make_node("Add", ["x", "x"], ["y"])]
    body = helper.make_graph(nodes, "body", [_info("x", t)], [_info("y", t)])
    return Parts([of], {"body": body}, outputs=1)


def empty(d: Draw, v: Version) -> Parts:
    return Parts([], {"dtype": d.choice((None, TensorProto.FLOAT))})


SUBGRAPHS: dict[str, Hint] = {
    "ConcatFromSequence": concat,
    "If": branches,
    "Loop": loop,
    "Scan": scan,
    "SequenceAt": at,
    "SequenceEmpty": empty,
    "SequenceErase": at,
    "SequenceInsert": insert,
    "SequenceMap": mapped,
    "SplitToSequence": split,
}
