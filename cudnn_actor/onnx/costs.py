"""What it costs to compute a node when a model is imported: an upper bound, from its inputs alone.

An operator that is not here is not computed then: there is no bound for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import onnx

from cudnn_actor.onnx.tensors import MOST_DIMS, too_many_dims
from cudnn_actor.onnx.values import Declined

__all__ = ["Cost", "cost_of"]

_Arrays = Sequence[np.ndarray | None]


class Cost(NamedTuple):
    """Bytes that there are at once, at the most, and steps of about a nanosecond each."""

    nbytes: int
    steps: int


_QUICK = Cost(32, 20)
"""Of an element of the largest array in NumPy: it, and three others that are needed for a moment."""
_SORTED = Cost(64, 400)
_LOOPED = Cost(128, 5_000)
"""Of an element in a loop of Python, with the objects that stand for it there."""


def _count(dims: Iterable[int]) -> int:
    """The elements of an array; a dim of 0 counts as 1, since a result may lack that dim."""
    count: int = math.prod(max(1, abs(int(dim))) for dim in dims)
    return count


def _size(arrays: _Arrays, number: int) -> int:
    """The elements of an input; 1 if it was left out."""
    array = arrays[number] if number < len(arrays) else None
    return 1 if array is None else _count(array.shape)


def _given(arrays: _Arrays, number: int) -> np.ndarray:
    array = arrays[number] if number < len(arrays) else None
    if array is None:
        raise Declined(f"input {number} is missing")
    return array


def _listed(arrays: _Arrays, number: int) -> list[int]:
    """Numbers for dims. Longer lists than an array can have dims are not looked at, but for two of each."""
    array = _given(arrays, number)
    if array.size > 2 * MOST_DIMS:
        raise Declined(f"has {array.size:,} numbers for dims")
    return [int(each) for each in array.reshape(-1)]


def _attribute(node: onnx.NodeProto, name: str, default: int) -> int:
    given: int = next((each.i for each in node.attribute if each.name == name), default)
    return given


# How many elements the largest array has.


def _little(node: onnx.NodeProto, arrays: _Arrays) -> int:
    """Of operators that look at dims alone."""
    del node, arrays
    return 64


def _constant(node: onnx.NodeProto, arrays: _Arrays) -> int:
    """What the file has, or a sparse tensor as a dense one. A raw byte is an eighth of an element or more."""
    del arrays
    if problem := next(filter(None, (too_many_dims(each.sparse_tensor.dims) for each in node.attribute)), ""):
        raise Declined(problem)
    raw = any(each.t.HasField("raw_data") for each in node.attribute)
    dense = sum(_count(each.sparse_tensor.dims) for each in node.attribute)
    return int(node.ByteSize()) // (8 if raw else 1) + dense


def _as_given(node: onnx.NodeProto, arrays: _Arrays) -> int:
    """Of operators whose results have no more elements than their inputs together."""
    return int(node.ByteSize()) + sum(_size(arrays, number) for number in range(len(arrays)))


def _broadcast(node: onnx.NodeProto, arrays: _Arrays) -> int:
    del node
    shapes = [each.shape for each in arrays if each is not None]
    rank = max((len(shape) for shape in shapes), default=0)
    return _count(
        max((shape[-n] for shape in shapes if len(shape) >= n), default=1) for n in range(1, rank + 1)
    )


def _of_shape(node: onnx.NodeProto, arrays: _Arrays) -> int:
    del node
    return _count(_listed(arrays, 0))


def _expanded(node: onnx.NodeProto, arrays: _Arrays) -> int:
    del node
    return _size(arrays, 0) * _count(_listed(arrays, 1))


def _range(node: onnx.NodeProto, arrays: _Arrays) -> int:
    del node
    start, limit, delta = (_given(arrays, number).reshape(-1)[0].item() for number in range(3))
    steps = abs((limit - start) / delta) if delta else 0
    if not math.isfinite(steps):
        raise Declined("is a range without an end")
    return int(steps) + 1


def _one_hot(node: onnx.NodeProto, arrays: _Arrays) -> int:
    del node
    return _size(arrays, 0) * _count(_listed(arrays, 1))


def _padded(node: onnx.NodeProto, arrays: _Arrays) -> int:
    given = [list(each.ints) for each in node.attribute if each.name in ("pads", "paddings")]
    pads = given[0] if given else _listed(arrays, 1)
    axes = len(pads) // 2  # each is added to the largest dims: an upper bound for any axes
    dims = sorted(_given(arrays, 0).shape, reverse=True)
    along = sorted((abs(int(pads[n])) + abs(int(pads[n + axes])) for n in range(axes)), reverse=True)
    along += [0] * (len(dims) - axes)
    return _count(dim + more for dim, more in zip(dims, along, strict=False))


def _gathered(node: onnx.NodeProto, arrays: _Arrays) -> int:
    dims, axis = list(_given(arrays, 0).shape), _attribute(node, "axis", 0)
    if not -len(dims) <= axis < len(dims):
        raise Declined(f"has the axis {axis}, for dims {tuple(dims)}")
    del dims[axis]
    return _count(dims) * _size(arrays, 1)


def _gathered_nd(node: onnx.NodeProto, arrays: _Arrays) -> int:
    del node
    x, places = _given(arrays, 0), _given(arrays, 1)
    return _count(places.shape[:-1]) * _count(x.shape[places.shape[-1] :]) if places.ndim else 1


def _split(node: onnx.NodeProto, arrays: _Arrays) -> int:
    return _as_given(node, arrays) + abs(_attribute(node, "num_outputs", 0))


def _matrices(node: onnx.NodeProto, arrays: _Arrays) -> int:
    if _given(arrays, 0).ndim < 2:
        raise Declined("is of no matrix")
    return _as_given(node, arrays)


def _largest(node: onnx.NodeProto, arrays: _Arrays) -> int:
    x = _given(arrays, 0)
    k = _attribute(node, "k", 0) if len(arrays) < 2 else int(_given(arrays, 1).reshape(-1)[0])
    return _count(x.shape) * (x.ndim + 1) + abs(k)  # each element has the place of each dim


def _non_zero(node: onnx.NodeProto, arrays: _Arrays) -> int:
    del node
    return _size(arrays, 0) * max(1, _given(arrays, 0).ndim)


def _mel(node: onnx.NodeProto, arrays: _Arrays) -> int:
    del node
    bins, length = (abs(int(_given(arrays, number).reshape(-1)[0])) for number in range(2))
    return (length // 2 + 1) * (bins + 2)


def _product(node: onnx.NodeProto, arrays: _Arrays) -> int:
    """Matrices: as many as the larger batch, with the rows of one and the columns of the other."""
    del node
    a, b = (_given(arrays, number).shape for number in range(2))
    batch = _broadcast_count(a[:-2], b[:-2])
    return batch * _count(a[-2:-1]) * (_count(b[-1:]) if len(b) > 1 else 1)


def _broadcast_count(a: Sequence[int], b: Sequence[int]) -> int:
    rank = max(len(a), len(b))
    wide = zip((1,) * (rank - len(a)) + tuple(a), (1,) * (rank - len(b)) + tuple(b), strict=True)
    return _count(max(pair) for pair in wide)


def _gemm(node: onnx.NodeProto, arrays: _Arrays) -> int:
    a, b = (_given(arrays, number).shape for number in range(2))
    rows = a[-1:] if _attribute(node, "transA", 0) else a[:1]
    return _count(rows) * _count(b[:1] if _attribute(node, "transB", 0) else b[-1:])


# How many steps there are, where they are not a number for each element.


def _summands(node: onnx.NodeProto, arrays: _Arrays) -> int:
    """Of a product of matrices: each element is a sum."""
    elements = _BOUNDS[node.op_type][0](node, arrays)
    return 2 * elements * max(_given(arrays, 0).shape, default=1)


def _suppression(node: onnx.NodeProto, arrays: _Arrays) -> int:
    """Each box above the threshold is compared with those that were chosen, for each image and class."""
    del node
    scores = _given(arrays, 1)
    most, _, bound = ([*arrays, None, None, None][n] for n in (2, 3, 4))
    chosen = 0 if most is None else max(0, int(most.reshape(-1)[0]))
    above = np.count_nonzero(scores > (-np.inf if bound is None else bound.reshape(-1)[0]), axis=-1)
    return _LOOPED.steps * (int(np.sum(above * np.minimum(above, chosen))) + _count(scores.shape))


# fmt: off
_OF_ONE = (
    "Abs", "Acos", "Acosh", "ArgMax", "ArgMin", "Asin", "Asinh", "Atan", "Atanh", "BitCast", "BitwiseNot",
    "Cast", "CastLike", "Ceil", "Clip", "Compress", "Concat", "Cos", "Cosh", "CumProd", "CumSum",
    "DepthToSpace", "Dropout", "Elu", "Exp", "Flatten", "Floor", "HardSigmoid", "HardSwish",
    "Identity", "IsInf", "IsNaN", "LeakyRelu", "Log", "LogSoftmax", "Mish", "Neg", "Not", "Reciprocal",
    "ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin",
    "ReduceProd", "ReduceSum", "ReduceSumSquare", "Relu", "Reshape", "Round", "Selu", "Shrink", "Sigmoid",
    "Sign", "Sin", "Sinh", "Slice", "Softmax", "Softplus", "Softsign", "SpaceToDepth", "Sqrt", "Squeeze",
    "Swish", "Tan", "Tanh", "ThresholdedRelu", "Transpose", "Unsqueeze",
)
"""Operators whose results have no more elements than their inputs."""
_OF_PAIRS = (
    "Add", "And", "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "DequantizeLinear", "Div", "Equal",
    "Greater", "GreaterOrEqual", "Less", "LessOrEqual", "Max", "Mean", "Min", "Mod", "Mul", "Or", "PRelu",
    "Pow", "QuantizeLinear", "Sub", "Sum", "Where", "Xor",
)
"""Operators of elements that broadcast."""
_IN_LOOPS = (
    "Celu", "Erf", "GatherElements", "Gelu", "ReverseSequence", "Scatter", "ScatterElements", "ScatterND",
)
"""Operators with no more elements than their inputs, that are loops of Python in the reference."""
# fmt: on

_Bound = Callable[[onnx.NodeProto, _Arrays], int]
_BOUNDS: dict[str, tuple[_Bound, Cost]] = {
    **dict.fromkeys(("Shape", "Size"), (_little, _QUICK)),
    **dict.fromkeys(_OF_ONE, (_as_given, _QUICK)),
    **dict.fromkeys(_OF_PAIRS, (_broadcast, _QUICK)),
    **dict.fromkeys(_IN_LOOPS, (_as_given, _LOOPED)),
    "Constant": (_constant, _QUICK),
    "ConstantOfShape": (_of_shape, _QUICK),
    "Expand": (_expanded, _QUICK),
    "Gather": (_gathered, _QUICK),
    "GatherND": (_gathered_nd, _LOOPED),
    "Gemm": (_gemm, _QUICK),
    "MatMul": (_product, _QUICK),
    "MelWeightMatrix": (_mel, _LOOPED),
    "NonMaxSuppression": (_as_given, _LOOPED),
    "NonZero": (_non_zero, _QUICK),
    "OneHot": (_one_hot, _QUICK),
    "Pad": (_padded, _QUICK),
    "Range": (_range, _QUICK),
    "Split": (_split, _QUICK),
    "Tile": (_expanded, _QUICK),
    "TopK": (_largest, _SORTED),
    "EyeLike": (_matrices, _QUICK),
    "Trilu": (_matrices, _QUICK),
}
"""Operators → the elements of the largest array there is on the way, and the cost of each."""
_STEPS: dict[str, _Bound] = {"Gemm": _summands, "MatMul": _summands, "NonMaxSuppression": _suppression}


def cost_of(node: onnx.NodeProto, arrays: _Arrays) -> Cost:
    """What it costs to compute a node by the reference implementation, at the most.

    Raises `Declined` for an operator without a bound, and for text, whose elements may have any size.
    """
    op = node.op_type
    if node.domain not in ("", "ai.onnx") or op not in _BOUNDS:
        raise Declined(f"values of {op} are not computed when a model is imported")
    text = any(each is not None and each.dtype.kind in "OSU" for each in arrays)
    if text or (op == "Cast" and _attribute(node, "to", 0) == onnx.TensorProto.STRING):
        raise Declined("text is not computed when a model is imported")
    bound, each = _BOUNDS[op]
    try:
        elements = bound(node, arrays)
        steps = _STEPS[op](node, arrays) if op in _STEPS else each.steps * elements
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise Declined(f"does not fit its operator: {type(error).__name__}: {error}") from error
    return Cost(each.nbytes * elements, steps)
