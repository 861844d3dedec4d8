"""Runs an ONNX model in float64 by ONNX's reference evaluator, to judge two results that differ.

Where ONNX Runtime and this package differ by more than 1e-4, `trained_files` compares both with this.
Operators of ONNX Runtime's own that quantise are evaluated as its kernels do, but nothing saturates.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

__all__ = ["DynamicQuantizeLSTM", "evaluated", "in_float64"]

_FLOATS = (TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16)
_Array = np.ndarray[Any, Any]


def evaluated(data: bytes, given: Mapping[str, _Array], *, wide: bool = True) -> list[_Array]:
    """The outputs of a model: in float64, or in its own types, node by node. Blocks; images take minutes."""
    model, inputs = onnx.load_from_string(data), dict(given)
    if wide:
        model = in_float64(model)
        inputs = {name: x.astype(np.float64) if x.dtype.kind == "f" else x for name, x in given.items()}
    own = [DequantizeLinear, DynamicQuantizeLSTM, GatherElements, ScatterElements]
    with np.errstate(all="ignore"):
        return [np.asarray(each) for each in ReferenceEvaluator(model, new_ops=own).run(None, inputs)]


def in_float64(model: onnx.ModelProto) -> onnx.ModelProto:
    """A model whose floats are all of float64: inputs, weights, constants, and what casts give."""
    wide = onnx.ModelProto()
    wide.CopyFrom(model)
    _widen(wide.graph)
    for function in wide.functions:
        _widen_nodes(function.node)
    return wide


def _widen(graph: onnx.GraphProto) -> None:
    del graph.value_info[:]
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type in _FLOATS:
            value.type.tensor_type.elem_type = TensorProto.DOUBLE
    for tensor in graph.initializer:
        _widen_tensor(tensor)
    _widen_nodes(graph.node)


def _widen_nodes(nodes: Any) -> None:
    for node in nodes:
        if node.op_type == "ConstantOfShape" and not node.attribute:
            node.attribute.append(helper.make_attribute("value", numpy_helper.from_array(np.zeros(1))))
        for attribute in node.attribute:
            if attribute.HasField("t"):
                _widen_tensor(attribute.t)
            if attribute.HasField("g"):
                _widen(attribute.g)
            if node.op_type == "Cast" and attribute.name == "to" and attribute.i in _FLOATS:
                attribute.i = TensorProto.DOUBLE
            if node.op_type == "Constant" and attribute.name in ("value_float", "value_floats"):
                number = attribute.f if attribute.name == "value_float" else attribute.floats
                tensor = numpy_helper.from_array(np.array(number, np.float64))
                attribute.CopyFrom(helper.make_attribute("value", tensor))


def _widen_tensor(tensor: onnx.TensorProto) -> None:
    if tensor.data_type in _FLOATS:
        tensor.CopyFrom(
            numpy_helper.from_array(numpy_helper.to_array(tensor).astype(np.float64), tensor.name)
        )


def _quantised(x: _Array) -> tuple[_Array, Any]:
    """The results of `DynamicQuantizeLinear`: bytes minus their zero point, and their scale."""
    low, high = min(x.min(), x.dtype.type(0)), max(x.max(), x.dtype.type(0))
    scale = (high - low) / x.dtype.type(255) or x.dtype.type(1)
    zero = np.rint(-low / scale)
    return np.clip(np.rint(x / scale) + zero, 0, 255) - zero, scale


class DynamicQuantizeLSTM(OpRun):
    """`LSTM` with weights of bytes, whose input as a whole, and whose states at each step, are quantised."""

    op_domain = "com.microsoft"

    def _run(self, x: _Array, w: _Array, r: _Array, *others: Any, **attributes: Any) -> Any:
        bias, _, first, first_cell, _, *scales = (*others, *[None] * (9 - len(others)))[:9]
        both = attributes.get("direction") == "bidirectional"
        hidden, every, last, cells = r.shape[1], [], [], []
        for direction in range(2 if both else 1):
            weights, recurrent = (
                ((each[direction].astype(np.float64) - zero[direction]) * scale[direction]).astype(x.dtype)
                for each, scale, zero in ((w, *scales[:2]), (r, *scales[2:4]))
            )
            zeros = np.zeros((x.shape[1], hidden), x.dtype)
            start = tuple(zeros if each is None else each[direction] for each in (first, first_cell))
            added = np.zeros(8 * hidden, x.dtype) if bias is None else bias[direction]
            backwards = direction == 1 or attributes.get("direction") == "reverse"
            found, *ends = _lstm(x[::-1] if backwards else x, weights, recurrent, added, start)
            every.append(found[::-1] if backwards else found)
            last.append(ends[0])
            cells.append(ends[1])
        return tuple(each.astype(x.dtype) for each in (np.stack(every, 1), np.stack(last), np.stack(cells)))


def _lstm(
    x: _Array, weights: _Array, recurrent: _Array, bias: _Array, start: tuple[_Array, ...]
) -> tuple[_Array, _Array, _Array]:
    """The states of all steps, and the last state and cell. `start`: the first ones."""
    state, cell = start
    hidden, found = len(recurrent), []
    codes, scale = _quantised(x)
    for part in codes @ weights * scale + bias[: 4 * hidden] + bias[4 * hidden :]:
        codes, scale = _quantised(state)
        gates = part + codes @ recurrent * scale
        i, o, f, c = (gates[:, n * hidden : (n + 1) * hidden] for n in range(4))
        cell = _sigmoid(f) * cell + _sigmoid(i) * np.tanh(c)
        state = _sigmoid(o) * np.tanh(cell)
        found.append(state)
    return np.stack(found), state, cell


def _sigmoid(x: _Array) -> Any:
    return 1 / (1 + np.exp(-x))


class DequantizeLinear(OpRun):
    """That of the versions before 19, which the reference evaluator does not have: of a whole tensor."""

    op_domain = ""

    def _run(self, x: _Array, scale: _Array, zero: Any = None, **attributes: Any) -> Any:
        del attributes
        if scale.size != 1:
            raise NotImplementedError("scales of each element along an axis")
        moved = x.astype(scale.dtype) - (0 if zero is None else zero.reshape(()).astype(scale.dtype))
        return (moved * scale.reshape(()),)


class GatherElements(OpRun):
    """That of ONNX, of which the reference evaluator refuses indices that are fewer along other axes, too."""

    op_domain = ""

    def _run(self, x: _Array, indices: _Array, **attributes: Any) -> Any:
        axis, found = attributes.get("axis") or 0, np.empty(indices.shape, x.dtype)
        for place in np.ndindex(indices.shape):
            source = list(place)
            source[axis] = int(indices[place])
            found[place] = x[tuple(source)]
        return (found,)


class ScatterElements(OpRun):
    """The same of what is written."""

    op_domain = ""

    def _run(self, x: _Array, indices: _Array, updates: _Array, **attributes: Any) -> Any:
        if attributes.get("reduction") not in (None, "none"):
            raise NotImplementedError("a reduction")
        axis, found = attributes.get("axis") or 0, x.copy()
        for place in np.ndindex(indices.shape):
            target = list(place)
            target[axis] = int(indices[place])
            found[tuple(target)] = updates[place]
        return (found,)
