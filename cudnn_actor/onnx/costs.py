"""Upper bounds of the cost to compute a node when a model is imported, from its inputs alone.

A node whose operator is not here is not computed during an import, since its cost has no bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import onnx

from cudnn_actor.onnx.schemas import domain_of
from cudnn_actor.onnx.tensors import MOST_DIMS, too_many_dims
from cudnn_actor.onnx.values import Declined

__all__ = ["Cost", "cost_of"]


class Cost(NamedTuple):
    """Bytes that there are at once, at the most, and steps of about a nanosecond each."""

    nbytes: int
    steps: int


_NODE_STEPS = 200_000
"""The steps of a node, in addition to those of its elements: each node makes a reference implementation of
its own."""
_QUICK = Cost(32, 20)
"""The cost of an element of the largest array in NumPy, with three temporary arrays of the same size."""
_SORTED = Cost(64, 400)
_LOOPED = Cost(128, 5_000)
"""The cost of an element in a loop of Python, with the objects that represent it there."""


def _count(dims: Iterable[int]) -> int:
    """The elements of an array; a dim of 0 counts as 1, since a result may lack that dim."""
    count: int = math.prod(max(1, abs(int(dim))) for dim in dims)
    return count


class _Call(NamedTuple):
    """A node with its inputs, None for those left out."""

    node: onnx.NodeProto
    arrays: Sequence[np.ndarray | None]

    def size(self, number: int) -> int:
        """The elements of an input; 1 if it was left out."""
        array = self.arrays[number] if number < len(self.arrays) else None
        return 1 if array is None else _count(array.shape)

    def given_input(self, number: int) -> np.ndarray:
        """An input. Raises `Declined` if it was left out."""
        array = self.arrays[number] if number < len(self.arrays) else None
        if array is None:
            raise Declined(f"input {number} is missing")
        return array

    def numbers_for_dims(self, number: int) -> list[int]:
        """An input as numbers for dims. A list of more than two numbers for each dim that an array can have
        is refused."""
        array = self.given_input(number)
        if array.size > 2 * MOST_DIMS:
            raise Declined(f"has {array.size:,} numbers for dims")
        return [int(each) for each in array.reshape(-1)]

    def attribute(self, name: str, default: int) -> int:
        """An attribute that is a whole number."""
        given: int = next((each.i for each in self.node.attribute if each.name == name), default)
        return given


# Functions for the number of elements of the largest array.


def _little(_: _Call) -> int:
    """The bound for operators that read only dims."""
    return 64


def _constant(call: _Call) -> int:
    """The elements of a constant in the file, as a dense tensor if it is sparse. Eight raw bytes count as one
    element."""
    attributes = call.node.attribute
    if problem := next(filter(None, (too_many_dims(each.sparse_tensor.dims) for each in attributes)), ""):
        raise Declined(problem)
    raw = any(each.t.HasField("raw_data") for each in attributes)
    dense = sum(_count(each.sparse_tensor.dims) for each in attributes)
    return int(call.node.ByteSize()) // (8 if raw else 1) + dense


def _as_given(call: _Call) -> int:
    """The bound for operators whose results have no more elements than their inputs together."""
    return int(call.node.ByteSize()) + sum(call.size(number) for number in range(len(call.arrays)))


def _broadcast(call: _Call) -> int:
    return _broadcast_count([each.shape for each in call.arrays if each is not None])


def _broadcast_count(shapes: Sequence[Sequence[int]]) -> int:
    """The most elements of the array to which arrays of these dims broadcast."""
    rank = max(map(len, shapes), default=0)
    return _count(
        max((shape[-n] for shape in shapes if len(shape) >= n), default=1) for n in range(1, rank + 1)
    )


def _of_shape(call: _Call) -> int:
    return _count(call.numbers_for_dims(0))


def _cost_of_expand(call: _Call) -> int:
    return call.size(0) * _count(call.numbers_for_dims(1))


def _range(call: _Call) -> int:
    start, limit, delta = (call.given_input(number).reshape(-1)[0].item() for number in range(3))
    steps = abs((limit - start) / delta) if delta else 0
    if not math.isfinite(steps):
        raise Declined("is a range without an end")
    return int(steps) + 1


def _cost_of_pad(call: _Call) -> int:
    given = [list(each.ints) for each in call.node.attribute if each.name in ("pads", "paddings")]
    pads = given[0] if given else call.numbers_for_dims(1)
    axes = len(pads) // 2  # each is added to the largest dims: an upper bound for any axes
    dims = sorted(call.given_input(0).shape, reverse=True)
    along = sorted((abs(int(pads[n])) + abs(int(pads[n + axes])) for n in range(axes)), reverse=True)
    along += [0] * (len(dims) - axes)
    return _count(dim + more for dim, more in zip(dims, along, strict=False))


def _cost_of_gather(call: _Call) -> int:
    dims, axis = list(call.given_input(0).shape), call.attribute("axis", 0)
    if not -len(dims) <= axis < len(dims):
        raise Declined(f"has the axis {axis}, for dims {tuple(dims)}")
    del dims[axis]
    return _count(dims) * call.size(1)


def _gathered_nd(call: _Call) -> int:
    x, places = call.given_input(0), call.given_input(1)
    return _count(places.shape[:-1]) * _count(x.shape[places.shape[-1] :]) if places.ndim else 1


def _split(call: _Call) -> int:
    return _as_given(call) + abs(call.attribute("num_outputs", 0))


def _matrices(call: _Call) -> int:
    if call.given_input(0).ndim < 2:
        raise Declined("is of no matrix")
    return _as_given(call)


def _largest(call: _Call) -> int:
    x = call.given_input(0)
    k = call.attribute("k", 0) if len(call.arrays) < 2 else int(call.given_input(1).reshape(-1)[0])
    return _count(x.shape) * (x.ndim + 1) + abs(k)  # an element has a coordinate for each dim


def _non_zero(call: _Call) -> int:
    return call.size(0) * max(1, call.given_input(0).ndim)


def _mel(call: _Call) -> int:
    bins, length = (abs(int(call.given_input(number).reshape(-1)[0])) for number in range(2))
    return (length // 2 + 1) * (bins + 2)


def _product(call: _Call) -> int:
    """The elements of a product: as many matrices as the larger batch, with one operand's rows and the
    other's columns."""
    a, b = (call.given_input(number).shape for number in range(2))
    batch = _broadcast_count([a[:-2], b[:-2]])
    return batch * _count(a[-2:-1]) * (_count(b[-1:]) if len(b) > 1 else 1)


def _gemm(call: _Call) -> int:
    a, b = (call.given_input(number).shape for number in range(2))
    rows = a[-1:] if call.attribute("transA", 0) else a[:1]
    return _count(rows) * _count(b[:1] if call.attribute("transB", 0) else b[-1:])


# Functions for the number of steps, for operators whose steps are not a fixed number for each element.


def _summands(call: _Call) -> int:
    """The steps of a product of matrices, each of whose elements is a sum."""
    elements = _BOUNDS[call.node.op_type][0](call)
    return 2 * elements * max(call.given_input(0).shape, default=1)


class _Einsum(NamedTuple):
    """The sizes of an Einsum's labels, the labels of its result, and how many elements `...` stands for."""

    sizes: dict[str, int]
    result: str
    beside: int

    def count(self, labels: Iterable[str]) -> int:
        return _count(self.sizes[label] for label in labels) * self.beside


def _einsum(call: _Call) -> _Einsum:
    equation = next((each.s for each in call.node.attribute if each.name == "equation"), b"").decode()
    given, arrow, result = "".join(equation.split()).partition("->")
    sizes: dict[str, int] = {}
    beside: list[Sequence[int]] = []
    for number, labels in enumerate(given.split(",")):
        dims = call.given_input(number).shape
        before, dots, behind = labels.partition("...")
        end = len(dims) - len(behind)
        named = (*dims[: len(before)], *dims[end:]) if dots else dims
        for label, dim in zip(before + behind, named, strict=True):
            sizes[label] = max(sizes.get(label, 1), dim)
        if dots:
            beside.append(dims[len(before) : end])
    return _Einsum(sizes, result.replace("...", "") if arrow else "".join(sizes), _broadcast_count(beside))


def _einsum_elements(call: _Call) -> int:
    """The elements of the result, or of the inputs: an einsum is computed in one loop, without temporary
    arrays."""
    found = _einsum(call)
    return max(found.count(found.result), _as_given(call))


def _einsum_terms(call: _Call) -> int:
    """The steps of a loop over all labels."""
    found = _einsum(call)
    return 2 * len(call.arrays) * found.count(found.sizes)


def _suppression(call: _Call) -> int:
    """The comparisons of each box above the threshold with the boxes that were chosen, for each image and
    class."""
    scores = call.given_input(1)
    most, _, bound = ([*call.arrays, None, None, None][n] for n in (2, 3, 4))
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

_Bound = Callable[[_Call], int]
_BOUNDS: dict[str, tuple[_Bound, Cost]] = {
    **dict.fromkeys(("Shape", "Size"), (_little, _QUICK)),
    **dict.fromkeys(_OF_ONE, (_as_given, _QUICK)),
    **dict.fromkeys(_OF_PAIRS, (_broadcast, _QUICK)),
    **dict.fromkeys(_IN_LOOPS, (_as_given, _LOOPED)),
    "Constant": (_constant, _QUICK),
    "ConstantOfShape": (_of_shape, _QUICK),
    "Einsum": (_einsum_elements, _QUICK),
    "Expand": (_cost_of_expand, _QUICK),
    "Gather": (_cost_of_gather, _QUICK),
    "GatherND": (_gathered_nd, _LOOPED),
    "Gemm": (_gemm, _QUICK),
    "MatMul": (_product, _QUICK),
    "MelWeightMatrix": (_mel, _LOOPED),
    "NonMaxSuppression": (_as_given, _LOOPED),
    "NonZero": (_non_zero, _QUICK),
    "OneHot": (_cost_of_expand, _QUICK),
    "Pad": (_cost_of_pad, _QUICK),
    "Range": (_range, _QUICK),
    "Split": (_split, _QUICK),
    "Tile": (_cost_of_expand, _QUICK),
    "TopK": (_largest, _SORTED),
    "EyeLike": (_matrices, _QUICK),
    "Trilu": (_matrices, _QUICK),
}
"""Operators → the elements of the largest array during the computation, and the cost of each element."""
_STEPS: dict[str, _Bound] = {
    "Einsum": _einsum_terms,
    "Gemm": _summands,
    "MatMul": _summands,
    "NonMaxSuppression": _suppression,
}


def cost_of(node: onnx.NodeProto, arrays: Sequence[np.ndarray | None]) -> Cost:
    """An upper bound of the cost to compute a node by the reference implementation.

    Raises `Declined` for an operator without a bound, and for text, whose elements may have any size.
    """
    op, call = node.op_type, _Call(node, arrays)
    if domain_of(node) or op not in _BOUNDS:
        raise Declined(f"values of {op} are not computed when a model is imported")
    text = any(each is not None and each.dtype.kind in "OSU" for each in arrays)
    if text or (op == "Cast" and call.attribute("to", 0) == onnx.TensorProto.STRING):
        raise Declined("text is not computed when a model is imported")
    bound, each = _BOUNDS[op]
    try:
        elements = bound(call)
        steps = _STEPS[op](call) if op in _STEPS else each.steps * elements
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise Declined(f"does not fit its operator: {type(error).__name__}: {error}") from error
    return Cost(each.nbytes * elements, _NODE_STEPS + steps)
