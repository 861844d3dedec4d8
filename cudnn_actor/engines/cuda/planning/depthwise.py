"""Runs a depthwise convolution with the pointwise operations behind it as one kernel."""

from __future__ import annotations

from collections.abc import Callable

from cudnn_actor.engines.cuda.cudnn.frontend_graph import Refused
from cudnn_actor.engines.cuda.kernels.depthwise_geometry import Pass, Tile, tiles
from cudnn_actor.engines.cuda.kernels.depthwise_kernels import Depthwise
from cudnn_actor.engines.cuda.kernels.expressions import Leaf, Result
from cudnn_actor.engines.cuda.planning.bodies import Body, broadcast
from cudnn_actor.engines.cuda.planning.steps import kernel_plan
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.operations import (
    Convolution,
    ConvolutionBackwardData,
    ConvolutionBackwardFilter,
    ConvolutionForward,
    GraphTensor,
    Node,
    Pointwise,
    TensorRole,
)
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["compile_depthwise", "is_depthwise", "ways_of_depthwise"]

_PASSES: dict[type[Node], Pass] = {
    ConvolutionForward: Pass.FORWARD,
    ConvolutionBackwardData: Pass.DATA,
    ConvolutionBackwardFilter: Pass.FILTER,
}
_DTYPES = (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16)
_SPATIAL, _MOST_TAPS, _MOST_STRIDE, _LARGEST = 2, 11, 4, 1 << 30
"""The spatial dims, the most taps of a row, the largest stride of backward data, and the largest padding,
dilation and stride."""


def is_depthwise(operation: Node, form: Callable[[int], GraphTensor]) -> bool:
    """Whether our depthwise kernels can run an operation. `form` returns a tensor as it is stored, by uid."""
    if not isinstance(operation, Convolution):
        return False
    conv, (x, w, y) = operation.conv, map(form, operation.of_shape)
    read = [form(uid) for uid in operation.reads]
    return (
        conv.spatial_dims == _SPATIAL
        and 1 < conv.groups == x.dims[1]
        and read[0].dtype in _DTYPES
        and read[0].dtype is read[1].dtype
        and w.dims[3] <= _MOST_TAPS
        and (not isinstance(operation, ConvolutionBackwardData) or max(conv.stride) <= _MOST_STRIDE)
        and max(*conv.pre_padding, *conv.post_padding, *conv.dilation, *conv.stride) < _LARGEST
        and all(tensor.strides[1] == 1 for tensor in (x, y) if tensor.uid in operation.reads)
    )


def compile_depthwise(graph: OperationGraph, limit: int | None, choice: int = 0) -> CudaPlan:
    """Returns the graph as one kernel: the one with the index `choice` among `ways_of_depthwise`.

    Raises `Refused` if our depthwise kernels cannot run the graph, or if it has no such choice.
    """
    described = _choices(graph)
    if choice >= len(described):
        raise Refused("its tensors do not lie as kernels for depthwise convolutions need them")
    kernel, tensors = described[choice]
    return kernel_plan(graph, kernel, [tensor.uid for tensor in tensors], kernel.workspace, limit)


def ways_of_depthwise(graph: OperationGraph) -> int:
    """How many choices there are; 0 if there are no kernels for the graph."""
    try:
        return len(_choices(graph))
    except Refused:
        return 0


def _choices(graph: OperationGraph) -> list[tuple[Depthwise, list[GraphTensor]]]:
    """The kernels to choose from, each with its tensors: operands, then results. Raises `Refused`."""
    others = [operation for operation in graph.operations if not isinstance(operation, Pointwise)]
    if len(others) != 1 or not is_depthwise(others[0], graph.tensor):
        raise Refused("it is no depthwise convolution with channels side by side")
    (operation,) = others
    assert isinstance(operation, Convolution)
    made = _Description(graph, operation)
    return [(kernel, made.tensors) for kernel in tiles(made.kernel())]


class _Description:
    """Describes the kernel of one graph."""

    def __init__(self, graph: OperationGraph, operation: Convolution[int]) -> None:
        self._graph, self._operation = graph, operation
        self._dims = graph.tensor(operation.writes[0]).dims
        self.tensors: list[GraphTensor] = []

    def kernel(self) -> Depthwise:
        """The kernel with a placeholder as its tile. Sets `tensors`. Raises `Refused`."""
        graph, operation = self._graph, self._operation
        given = [graph.tensor(uid) for uid in operation.reads]
        results = [graph.tensor(uid) for uid in graph.results]
        if any(tensor.role is not TensorRole.BOUND for tensor in given):
            raise Refused("an operand of the convolution is computed")
        if any(tensor.overwrites in operation.reads for tensor in results):
            raise Refused("a result overwrites an operand of the convolution")
        if any(tensor.dims != self._dims for tensor in results):
            raise Refused("a result has other dims than the convolution's")
        if not isinstance(operation, ConvolutionBackwardFilter) and any(of.strides[1] != 1 for of in results):
            raise Refused("a result's channels do not lie side by side")
        body = Body(graph, graph.operations, self._dims, first=1)
        (made,) = operation.writes
        for other in graph.operations:
            if isinstance(other, Pointwise):
                body.add(other)
            else:
                body.define(made, Leaf(0, DType.FLOAT32), DType.FLOAT32)
        x, w, y = (graph.tensor(uid).dims for uid in operation.of_shape)
        self.tensors = [*given, *(tensor for tensor, _ in body.leaves), *results]
        steps = [broadcast(tensor, tensor.dims) for tensor in given]
        steps += [*(of for _, of in body.leaves), *(broadcast(tensor, self._dims) for tensor in results)]
        values = zip(body.of(graph.results), results, strict=True)
        return Depthwise(
            of=_PASSES[type(operation)],
            conv=operation.conv,
            x=x,
            w=w,
            y=y,
            body=tuple(body.nodes),
            results=tuple(Result(value, tensor.dtype) for value, tensor in values),
            operands=tuple(tensor.dtype for tensor in self.tensors[: -len(results)]),
            strides=tuple(steps),
            alignments=tuple(tensor.alignment for tensor in self.tensors),
            tile=Tile(1, 1, 1),
        )
