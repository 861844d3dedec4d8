"""Nodes whose inputs are all constants: computed once, by ONNX's own reference implementation."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from cudnn_actor.onnx.budget import Budget
from cudnn_actor.onnx.costs import cost_of
from cudnn_actor.onnx.schemas import domain_of, infer
from cudnn_actor.onnx.values import Declined, Value

__all__ = ["empty_results", "fold", "inferred_results", "misfit", "slices"]

_ANY = 1000
_LIST = 1024
"""The most elements of a value that dims may follow from: axes, sizes, pads."""
_OTHERWISE = {
    "AffineGrid": _ANY,
    "AveragePool": _ANY,
    "BatchNormalization": _ANY,
    "ConvTranspose": _ANY,
    "Dropout": 10,
    "GRU": _ANY,
    "GlobalMaxPool": _ANY,
    "Hardmax": 13,
    "LRN": _ANY,
    "LSTM": _ANY,
    "LayerNormalization": _ANY,
    "LogSoftmax": 13,
    "LpNormalization": _ANY,
    "LpPool": _ANY,
    "MaxPool": _ANY,
    "PRelu": _ANY,
    "QLinearConv": _ANY,
    "RNN": _ANY,
    "RoiAlign": 16,
    "Shape": _ANY,
    "Softmax": 13,
    "Unique": _ANY,
}
"""Operators → before which version the reference implementation gives something else than their text says."""

_OF_FLOATS = frozenset({"Gemm"})
"""Operators whose reference implementation computes integers in float64."""

_Arrays = Sequence[np.ndarray | None]


def slices(
    dims: Sequence[int], starts: Sequence[int], ends: Sequence[int], axes: Sequence[int], steps: Sequence[int]
) -> tuple[slice, ...]:
    """The slices that `Slice` takes of a tensor. Starts and ends are clamped as ONNX does, not as Python
    does."""
    found = [slice(None)] * len(dims)
    for each, start, end, step in zip(axes, starts, ends, steps, strict=True):
        if step == 0:
            raise Declined("has a step of 0")
        axis = each % len(dims)
        dim = dims[axis]
        low, high = (0, dim) if step > 0 else (-1, dim - 1)
        first = min(max(start + dim if start < 0 else start, 0), high)
        last = min(max(end + dim if end < 0 else end, low), high)
        found[axis] = slice(first, None if last < 0 else last, step)
    return tuple(found)


def _slice(_: onnx.NodeProto, arrays: _Arrays) -> np.ndarray | None:
    x, *numbers = arrays
    if not numbers or x is None:  # in this version, all steps are 1
        return None
    lists = [None if each is None else each.reshape(-1).tolist() for each in (*numbers, None, None)]
    starts, ends = lists[0] or [], lists[1] or []
    axes = range(len(starts)) if lists[2] is None else lists[2]
    return x[slices(x.shape, starts, ends, axes, lists[3] or [1] * len(starts))]


def _unsqueeze(node: onnx.NodeProto, arrays: _Arrays) -> np.ndarray | None:
    axes = [each.ints for each in node.attribute if each.name == "axes"]
    x = arrays[0]
    return np.expand_dims(x, tuple(axes[0])) if axes and x is not None else None


def _check_repeats(_: onnx.NodeProto, arrays: _Arrays) -> np.ndarray | None:
    x, repeats = arrays[:2]
    if len(arrays) == 2 and x is not None and repeats is not None and repeats.shape != (x.ndim,):
        raise Declined(f"has repeats of dims {repeats.shape} for {x.ndim} dims")
    return None


def _constant(node: onnx.NodeProto, _: _Arrays) -> np.ndarray | None:
    """The tensor of a `Constant`. The reference implementation takes ten times as long to read it."""
    if len(node.attribute) != 1 or len(node.output) != 1:
        return None
    (value,) = node.attribute
    if value.name != "value" or value.type != onnx.AttributeProto.TENSOR or value.ref_attr_name:
        return None
    try:
        return onnx.numpy_helper.to_array(value.t)
    except Exception:  # noqa: BLE001 - the reference implementation says what is wrong
        return None


_OWN: dict[str, Callable[[onnx.NodeProto, _Arrays], np.ndarray | None]] = {
    "Constant": _constant,
    "Slice": _slice,
    "Tile": _check_repeats,
    "Unsqueeze": _unsqueeze,
}
"""Functions for operators for which the reference implementation errs or takes long. Where one returns None,
the reference implementation is asked."""
_DEFAULTS: dict[str, _Arrays] = {
    "NonMaxSuppression": [None, None, np.zeros(1, "int64"), np.zeros(1, "f4"), np.full(1, -np.inf, "f4")]
}
"""Values of optional inputs that the reference implementation cannot do without."""


def fold(
    node: onnx.NodeProto, arrays: _Arrays, opsets: Mapping[str, int], budget: Budget
) -> tuple[np.ndarray | None, ...]:
    """Compute the results of a node, and count them in the budget.

    Raises `Declined` if the reference implementation cannot compute them, and `TooMuch` before anything is
    allocated if they would be over the budget.
    """
    budget.check(*cost_of(node, arrays))
    results = _compute(node, arrays, opsets)
    budget.keep(sum(each.nbytes for each in results if each is not None))
    return results


def _compute(
    node: onnx.NodeProto, arrays: _Arrays, opsets: Mapping[str, int]
) -> tuple[np.ndarray | None, ...]:
    if not domain_of(node):
        whole = any(each is not None and each.dtype.kind in "iu" for each in arrays[:1])
        if opsets.get("", 1) < _OTHERWISE.get(node.op_type, 0) or (whole and node.op_type in _OF_FLOATS):
            raise Declined("its constant cannot be computed: the reference implementation errs")
        own = _OWN[node.op_type](node, arrays) if node.op_type in _OWN else None
        if own is not None:
            return (own,)
        left = _DEFAULTS.get(node.op_type, ())
        arrays = [
            left[n] if n < len(left) and (n >= len(arrays) or arrays[n] is None) else arrays[n]
            for n in range(max(len(arrays), len(left)))
        ]
    names = [f"i{number}" if array is not None else "" for number, array in enumerate(arrays)]
    outputs = [f"o{number}" if name else "" for number, name in enumerate(node.output)]
    bare = onnx.NodeProto()
    bare.CopyFrom(node)
    del bare.input[:], bare.output[:]
    bare.input.extend(names)
    bare.output.extend(outputs)
    function = onnx.helper.make_function(
        "fold",
        "fold",
        list(filter(None, names)),
        list(filter(None, outputs)),
        [bare],
        [onnx.helper.make_opsetid(domain, version) for domain, version in opsets.items()],
    )
    feeds = {name: array for name, array in zip(names, arrays, strict=True) if array is not None}
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            results = iter(ReferenceEvaluator(function).run(None, feeds, attributes={}))
    except Exception as error:
        reason = str(error)[:200] or type(error).__name__
        raise Declined(f"its constant cannot be computed: {reason}") from error
    found = [next(results) if name else None for name in outputs]
    for each in found:
        if each is not None and not isinstance(each, np.ndarray | np.generic):
            raise Declined(f"gives a {type(each).__name__}, not a tensor")
    if node.op_type == "ReduceSumSquare" and arrays[0] is not None:  # the reference widens integers
        found = [np.asarray(each).astype(arrays[0].dtype) for each in found]
    return tuple(None if each is None else np.asarray(each) for each in found)


def empty_results(
    node: onnx.NodeProto, values: Sequence[Value | None], opsets: Mapping[str, int]
) -> tuple[np.ndarray | None, ...] | None:
    """The results of a node if none of them has elements; None if that does not follow from dims."""
    found = inferred_results(node, values, opsets)
    if found is None or not all(each is None or 0 in each[0] for each in found):
        return None
    return tuple(None if each is None else np.empty(*each) for each in found)


def misfit(
    node: onnx.NodeProto,
    values: Sequence[Value | None],
    opsets: Mapping[str, int],
    *,
    ranks_alone: bool = False,
) -> str:
    """The contradiction that ONNX finds between the dims of a node's inputs and its operator; empty if it
    finds none.

    `ranks_alone`: whether ONNX is told only the ranks of computed values, not their dims.
    """
    known = _known_inputs(node, values)
    if known is None:
        return ""
    types, data = known
    if ranks_alone:
        for name, value in zip(node.input, values, strict=True):
            for dim in () if value is None or value.fixed else types[name].tensor_type.shape.dim:
                dim.ClearField("dim_value")
    return infer(node, types, data, opsets)[1]


def _known_inputs(
    node: onnx.NodeProto, values: Sequence[Value | None]
) -> tuple[Mapping[str, onnx.TypeProto], Mapping[str, onnx.TensorProto]] | None:
    """The types of a node's inputs, and the elements of short constants; None if ONNX has no such type."""
    present = [(name, value) for name, value in zip(node.input, values, strict=True) if value is not None]
    try:
        types = {name: value.type for name, value in present}
        lists = ((name, value.elements) for name, value in present if value.fixed and value.size <= _LIST)
        return types, {name: onnx.numpy_helper.from_array(array) for name, array in lists}
    except (LookupError, TypeError, ValueError):
        return None


def inferred_results(
    node: onnx.NodeProto, values: Sequence[Value | None], opsets: Mapping[str, int]
) -> list[tuple[tuple[int, ...], np.dtype[Any]] | None] | None:
    """The dims and dtypes of a node's results, with None for a result that is left out; None if ONNX cannot
    infer them."""
    known = _known_inputs(node, values)
    if known is None:
        return None
    found, _ = infer(node, *known, opsets)
    results: list[tuple[tuple[int, ...], np.dtype[Any]] | None] = []
    for name in node.output:
        if not name:
            results.append(None)
            continue
        kind = found[name].tensor_type if name in found else onnx.TypeProto.Tensor()
        sizes = kind.shape.dim
        if not kind.HasField("shape") or not all(each.HasField("dim_value") for each in sizes):
            return None
        dims = tuple(each.dim_value for each in sizes)
        results.append((dims, onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)))
    return results
