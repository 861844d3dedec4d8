"""Normalisations, and softmax."""

from __future__ import annotations

from cudnn_actor.onnx.nodes import Node, Result
from cudnn_actor.onnx.operator_table import operator
from cudnn_actor.onnx.operators.casts import dtype_of
from cudnn_actor.onnx.operators.rows import of_rows
from cudnn_actor.onnx.values import Contradiction, Declined, Unfit
from cudnn_actor.protocol.graphs.graph_builder import GraphBuilder, Tensor
from cudnn_actor.protocol.operations import LayerNorm, ReductionMode
from cudnn_actor.protocol.types.dtypes import DType

__all__: list[str] = []


@operator("Softmax", "LogSoftmax", since=1)
def softmax(node: Node, g: GraphBuilder) -> Result:
    x, of = node.tensor(0), g.softmax if node.op == "Softmax" else g.log_softmax
    axis = node.axis()
    return of(x, axis) if node.version >= 13 else of_rows(g, of, x, axis)


@operator("BatchNormalization", since=7)
def batch_norm(node: Node, g: GraphBuilder) -> Result:
    if not node.attribute("spatial", 1):
        raise Declined("has statistics of each element")
    x, scale, bias, mean, variance = node.tensors()
    epsilon = node.attribute("epsilon")
    if node.attribute("training_mode", 0):
        return _training(node, g, epsilon)
    if node.version < 14 and any(node.wants(number) for number in range(1, 5)):
        raise Declined("batch statistics of a version before 14")
    own = (DType.FLOAT32 if x.dtype is not DType.FLOAT64 else DType.FLOAT64, x.dtype)
    vectors = [
        each if each.dtype in own else g.astype(each, own[0]) for each in (mean, variance, scale, bias)
    ]
    return g.batch_norm(x, *vectors, epsilon=epsilon)


def _training(node: Node, g: GraphBuilder, epsilon: float) -> Result:
    """Normalise with the statistics of the batch. The results have the dtypes of x and of the running
    statistics."""
    operands, dtypes = node.tensors(), [node.dtype(number) for number in range(5)]
    if len(set(dtypes)) > 1:
        wide = DType.FLOAT64 if DType.FLOAT64 in dtypes else DType.FLOAT32
        operands = [node.cast(each, wide) for each in operands]
    momentum = 1 - node.attribute("momentum")
    made = g.batch_norm_training(*operands, epsilon=epsilon, momentum=momentum, unbiased=False)
    return tuple(node.cast(each, dtypes[number]) for each, number in zip(made, (0, 3, 3), strict=False))


@operator("InstanceNormalization", since=6)
def instance_norm(node: Node, g: GraphBuilder) -> Result:
    for number in (1, 2):
        node.require(number, node.dims(0)[1])
    x, scale, bias = node.tensors()
    return g.instance_norm(x, scale, bias, epsilon=node.attribute("epsilon"))


@operator("GroupNormalization", since=18)
def group_norm(node: Node, g: GraphBuilder) -> Result:
    groups, channels = node.attribute("num_groups"), node.dims(0)[1]
    if channels % groups:
        raise Unfit(f"has {channels} channels, which are no {groups} groups")
    for number in (1, 2):
        node.require(number, groups if node.version < 21 else channels)
    if not node.value(0).size:
        return node.value(0)
    x, scale, bias = node.tensors()
    if node.version < 21:  # one number for each group
        scale, bias = (_repeat(g, each, x.dims[1] // groups) for each in (scale, bias))
    return g.group_norm(x, groups, scale, bias, epsilon=node.attribute("epsilon"))


def _repeat(g: GraphBuilder, x: Tensor, count: int) -> Tensor:
    wide = g.broadcast_to(g.reshape(x, (*x.dims, 1)), (*x.dims, count))
    return g.reshape(wide, (x.dims[0] * count,))


@operator("LRN", since=1)
def local_response_norm(node: Node, g: GraphBuilder) -> Result:
    options = {name: node.attribute(name) for name in ("alpha", "beta", "bias")}
    return g.local_response_norm(node.tensor(0), node.attribute("size"), **options)


@operator("LpNormalization", since=1)
def lp_norm(node: Node, g: GraphBuilder) -> Result:
    x, axis = node.tensor(0), node.axis()
    if node.attribute("p") not in (1, 2):
        raise Contradiction(f"has p {node.attribute('p')}, where it takes 1 and 2")
    mode = ReductionMode.L1 if node.attribute("p") == 1 else ReductionMode.L2
    norm = g.reduce(mode, x, axis, keepdims=True)
    return x / g.where(g.equal(norm, 0.0), 1.0, norm)


@operator("MeanVarianceNormalization", since=9)
def mean_variance_norm(node: Node, g: GraphBuilder) -> Result:
    """ONNX's own function is of float32 alone in its first version. No axes are all of them, as of means."""
    if not node.value(0).size:
        return node.value(0)
    x, axes = node.tensor(0), node.axes() or None
    wide = x if not x.dtype.is_half else g.astype(x, DType.FLOAT32)
    apart = g.subtract(wide, g.mean(wide, axes, keepdims=True))
    deviation = g.sqrt(g.mean(g.multiply(apart, apart), axes, keepdims=True))
    return node.cast(g.divide(apart, g.add(deviation, 1e-9)), x.dtype)


@operator("LayerNormalization", since=17)
def layer_norm(node: Node, g: GraphBuilder) -> Result:
    operation = LayerNorm(
        x=node.tensor(0),
        scale=_of_row(node, g, 1),
        bias=_of_row(node, g, 2),
        axis=node.axis(),
        epsilon=node.attribute("epsilon"),
    )
    names = ("mean", "inverse_deviation")
    wanted = tuple(name for number, name in enumerate(names, 1) if node.wants(number))
    made = g.apply(operation, also=wanted)
    if not wanted:
        return made
    stash = dtype_of(node.attribute("stash_type"))
    return made.y, *(node.cast(getattr(made, name), stash) if name in wanted else None for name in names)


@operator("RMSNormalization", since=23)
def rms_norm(node: Node, g: GraphBuilder) -> Result:
    x, scale, dtype = node.tensor(0), _of_row(node, g, 1), node.dtype(1)
    if x.dtype is not dtype:  # which is that of the result
        wide = DType.FLOAT64 if DType.FLOAT64 in (x.dtype, dtype) else DType.FLOAT32
        x, scale = node.cast(x, wide), None if scale is None else node.cast(scale, wide)
    y = g.rms_norm(x, scale, axis=node.axis(), epsilon=node.attribute("epsilon"))
    return node.cast(y, dtype)


def _of_row(node: Node, g: GraphBuilder, number: int) -> Tensor | None:
    """A scale or a bias, which has a number for each element of a row of x."""
    if not node.has(number):
        return None
    dims = node.dims(0)[node.axis() :]
    value = node.tensor(number)
    extra = max(0, value.rank - len(dims))
    return g.broadcast_to(g.reshape(value, value.dims[extra:]) if extra else value, dims)
