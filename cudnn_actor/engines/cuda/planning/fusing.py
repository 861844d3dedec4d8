"""Runs reductions, norms and softmaxes with the pointwise operations around them as kernels of our own.

One kernel over lines is the first choice: see `line_kernels`. Norms of channels and their gradients have
kernels of their own: see `kernels.norm_kernels`.
"""

from __future__ import annotations

from collections.abc import Sequence

from cudnn_actor.engines.cuda.cudnn.frontend_graph import Inapplicable, Refused
from cudnn_actor.engines.cuda.kernels.expressions import Expression, Result, Value
from cudnn_actor.engines.cuda.kernels.line_kernels import Reduced, describe_lined, fits
from cudnn_actor.engines.cuda.kernels.norm_kernels import Normal
from cudnn_actor.engines.cuda.operations.fused_norms import FUSED, Normed, beside, elements
from cudnn_actor.engines.cuda.operations.in_lines import ALONE, IN_LINES, compute_in_lines
from cudnn_actor.engines.cuda.planning.bodies import Body, broadcast
from cudnn_actor.engines.cuda.planning.steps import kernel_plan
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.operations import (
    GraphTensor,
    LayerNorm,
    LayerNormBackward,
    Node,
    Pointwise,
    PointwiseMode,
    Reduction,
    ReductionMode,
    RMSNorm,
    RMSNormBackward,
    TensorRole,
)
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["compile_fused", "is_lined", "lines_of_operation", "norm_alone"]

_NORMS = LayerNorm, LayerNormBackward, RMSNorm, RMSNormBackward


def lines_of_operation(
    graph: OperationGraph, operation: Node
) -> tuple[tuple[int, ...], tuple[int, ...], DType] | None:
    """The dims of the tensor that an operation reduces or normalises, a line's axes, and the dtype of sums.

    None for other operations, and for integers, which are reduced exactly.
    """
    x = graph.tensor(operation.reads[0])
    if not isinstance(operation, IN_LINES) or not x.dtype.is_floating:
        return None
    return x.dims, operation.reduced_dims(len(x.dims)), graph.compute(operation)


def norm_alone(graph: OperationGraph) -> Node | None:
    """The norm of rows, or its gradient, that a graph consists of; None for other graphs.

    cuDNN compiles its kernels for such a graph, for each size. Ours take sizes as arguments.
    """
    (first, *others) = graph.operations
    return first if isinstance(first, _NORMS) and not others else None


def compile_fused(graph: OperationGraph, limit: int | None) -> CudaPlan:
    """Compile a graph to one kernel over the lines of its tensors, or to the kernels of its norm.

    Raises `Refused` if there is no such kernel, or if a single operation is better run in another way.
    """
    if len(graph.operations) == 1 and not isinstance(graph.operations[0], (Pointwise, *ALONE)):
        raise Inapplicable("it has no neighbours to be fused")
    norms = [operation for operation in graph.operations if type(operation) in FUSED]
    if len(norms) == 1:
        return _compile_norm(graph, norms[0], limit)
    return _Fuser(graph).plan(limit)


def is_lined(graph: OperationGraph, operation: Node) -> bool:
    """Whether an operation reduces or normalises along lines, and one kernel over them is a good way."""
    found = lines_of_operation(graph, operation)
    return found is not None and fits(*found[:2])


def _compile_norm(graph: OperationGraph, norm: Node, limit: int | None) -> CudaPlan:
    """The graph as the kernels of its norm. Raises `Refused`."""
    named, apart = dict(norm.named()), beside(norm)
    x = graph.tensor(named["x"])
    results = [graph.tensor(uid) for uid in graph.results if uid not in apart]
    _check_norm(graph, norm, results)
    body = _body_of_norm(graph, norm)
    uids = [tensor.uid for tensor in results]
    values = zip(body.of(uids), results, strict=True)
    kernel = Normed(
        operation=norm.with_operands([*named].index),
        tensors=tuple(map(graph.tensor, named.values())),
        body=tuple(body.nodes),
        results=tuple(Result(value, tensor.dtype) for value, tensor in values),
        operands=tuple(tensor.dtype for tensor, _ in body.leaves),
        strides=(*(steps for _, steps in body.leaves), *(broadcast(tensor, x.dims) for tensor in results)),
        in_place=any(tensor.overwrites is not None for tensor in graph.tensors),
    )
    tensors = (*(tensor.uid for tensor, _ in body.leaves), *apart, *uids)
    return kernel_plan(graph, kernel, tensors, kernel.workspace, limit)


def _check_norm(graph: OperationGraph, norm: Node, results: Sequence[GraphTensor]) -> None:
    """Raise `Refused` if the kernels of a norm do not compute all of its graph."""
    if any(operation is not norm and not isinstance(operation, Pointwise) for operation in graph.operations):
        raise Refused("a norm's kernels compute no other reductions")
    apart = set(beside(norm))
    bound = all(graph.tensor(uid).role is TensorRole.BOUND for uid in apart)
    if not bound or not graph.written.isdisjoint(apart & {*norm.reads}):
        raise Refused("weights or statistics of the norm are computed with it")
    dims = graph.tensor(dict(norm.named())["x"]).dims
    if any(tensor.dims != dims for tensor in results):
        raise Refused("a result has other dims than the norm's")


def _body_of_norm(graph: OperationGraph, norm: Node) -> Body:
    """The expressions of a norm and the pointwise operations around it. Raises `Refused`."""
    x, apart = graph.tensor(dict(norm.named())["x"]), beside(norm)
    body = Body(graph, graph.operations, x.dims)
    read_first(graph, body, x.dims, x.uid)
    for operation in graph.operations:
        if isinstance(operation, Pointwise):
            body.add(operation)
            continue
        value = body.put(Normal(tuple(map(body.value, elements(norm)))))
        for uid in norm.writes:
            if uid not in apart:
                body.define(uid, value, graph.compute(norm))
    return body


class _Fuser:
    """Describes one graph as a kernel. Operations describe themselves by calling it as a `Computing`."""

    def __init__(self, graph: OperationGraph) -> None:
        self._graph = graph
        found = {
            None if isinstance(operation, Pointwise) else lines_of_operation(graph, operation)
            for operation in graph.operations
        } - {None}
        others = [operation for operation in graph.operations if not isinstance(operation, Pointwise)]
        if len(found) != 1 or any(lines_of_operation(graph, operation) is None for operation in others):
            raise Inapplicable("its operations have no lines in common")
        ((self._dims, self._axes, self._compute),) = found  # type: ignore[misc]
        self._body = Body(graph, graph.operations, self._dims)

    def plan(self, limit: int | None) -> CudaPlan:
        graph, body = self._graph, self._body
        read_first(graph, body, self._dims)
        for operation in graph.operations:
            if isinstance(operation, Pointwise):
                body.add(operation)
            else:
                self._add(operation)
        results = [graph.tensor(uid) for uid in graph.results]
        strides = [
            *(steps for _, steps in body.leaves),
            *(self._strides_of_result(tensor) for tensor in results),
        ]
        values = zip(body.of(graph.results), results, strict=True)
        kernel = describe_lined(
            body.nodes,
            [Result(value, tensor.dtype) for value, tensor in values],
            [tensor.dtype for tensor, _ in body.leaves],
            self._compute,
            (self._dims, self._axes, strides),
        )
        tensors = (*(tensor.uid for tensor, _ in body.leaves), *graph.results)
        return kernel_plan(graph, kernel, tensors, 0, limit)

    # `Computing`.

    def apply(self, mode: PointwiseMode, *operands: Value) -> Value:
        return self._body.put(Expression(mode, operands, (), self._compute))

    def reduce(self, mode: ReductionMode, operand: Value) -> Value:
        return self._body.put(Reduced(mode, (operand,)))

    # Operations.

    def _add(self, operation: Node) -> None:
        given = {
            name: self._body.value(uid, None if name == "x" else self._weights(uid))
            for name, uid in operation.named(operation.inputs)
        }
        found = compute_in_lines(operation, given, len(self._dims), self)
        for name, uid in operation.named(operation.outputs):
            self._body.define(uid, found[name], self._compute)

    def _weights(self, uid: int) -> tuple[int, ...]:
        """The strides, over all dims, of a tensor that has one number for each element of a line."""
        strides = self._graph.tensor(uid).strides
        return (0,) * (len(self._dims) - len(strides)) + strides

    def _strides_of_result(self, tensor: GraphTensor) -> tuple[int, ...]:
        """The strides of a result over all dims: 0 along a line if it has one element for each line."""
        writer = next(op for op in self._graph.operations if tensor.uid in op.writes)
        if isinstance(writer, Reduction) and not writer.keep_dims:
            steps = iter(tensor.strides)
            return tuple(0 if axis in self._axes else next(steps) for axis in range(len(self._dims)))
        one = tuple(1 if axis in self._axes else size for axis, size in enumerate(self._dims))
        if tensor.dims not in (self._dims, one):
            raise Refused("a result has neither an element for each place nor one for each line")
        return broadcast(tensor, self._dims)


def read_first(graph: OperationGraph, body: Body, dims: tuple[int, ...], *preferred: int) -> None:
    """Make a body read an input of these dims before all others: one of the preferred ones, if possible.

    Raises `Refused` if no input has these dims.
    """
    inputs = [uid for uid in (*preferred, *graph.bound) if uid in graph.bound and uid not in graph.written]
    whole = next((uid for uid in inputs if graph.tensor(uid).dims == dims), None)
    if whole is None:
        raise Refused("nothing that it reads has an element for each place")
    body.value(whole)
