"""Runs reductions, norms and softmaxes with the pointwise operations around them as one kernel."""

from __future__ import annotations

from collections.abc import Mapping

from cudnn_actor.engines.cuda.operations.in_lines import IN_LINES
from cudnn_actor.engines.cuda.plans.frontend_graph import Refused
from cudnn_actor.engines.cuda.plans.kernels import (
    Constant,
    Earlier,
    Expression,
    Leaf,
    Result,
    Scalar,
    Value,
    expression,
)
from cudnn_actor.engines.cuda.plans.line_kernels import Reduced, lined
from cudnn_actor.engines.cuda.plans.plan import CudaPlan
from cudnn_actor.engines.cuda.plans.recipe import LinedStep
from cudnn_actor.engines.cuda.plans.steps import finish, given_sources
from cudnn_actor.protocol.dtypes import DType
from cudnn_actor.protocol.graph import OperationGraph
from cudnn_actor.protocol.operations import (
    GraphTensor,
    Node,
    Pointwise,
    PointwiseMode,
    Reduction,
    TensorRole,
)

__all__ = ["compile_fused", "lines_of_operation"]


def lines_of_operation(
    graph: OperationGraph, operation: Node
) -> tuple[tuple[int, ...], tuple[int, ...], DType] | None:
    """The dims of what an operation reduces or normalises, the axes of a line, and the type of its sums.

    None if it is no such operation, or not one of floats.
    """
    row = IN_LINES.get(type(operation))
    if row is None:
        return None
    x = graph.tensor(operation.reads[0])
    compute = graph.compute(operation)
    return (x.dims, row.axes(operation, len(x.dims)), compute) if compute.is_floating else None


def compile_fused(graph: OperationGraph, limit: int | None) -> CudaPlan:
    """The graph as one kernel over the lines of its tensors.

    Raises `Refused` if it has no such lines, or a single operation that is better run otherwise.
    """
    alone = IN_LINES.get(type(graph.operations[0])) if len(graph.operations) == 1 else None
    if alone is not None and not alone.alone:
        raise Refused("it has no neighbours to be fused")
    return _Fuser(graph).plan(limit)


class _Fuser:
    """Describes one graph as a kernel. It is the `Computing` that operations describe themselves with."""

    def __init__(self, graph: OperationGraph) -> None:
        self._graph = graph
        found = {
            None if isinstance(operation, Pointwise) else lines_of_operation(graph, operation)
            for operation in graph.operations
        } - {None}
        others = [operation for operation in graph.operations if not isinstance(operation, Pointwise)]
        if len(found) != 1 or any(lines_of_operation(graph, operation) is None for operation in others):
            raise Refused("its operations have no lines in common")
        ((self._dims, self._axes, self._compute),) = found  # type: ignore[misc]
        self._read = {uid for operation in graph.operations for uid in operation.reads}
        self._body: list[Expression | Reduced] = []
        self._values: dict[int, Value] = {}
        self._leaves: list[tuple[GraphTensor, tuple[int, ...]]] = []

    def plan(self, limit: int | None) -> CudaPlan:
        graph = self._graph
        inputs = [uid for uid in graph.bound if uid not in graph.written]
        whole = [uid for uid in inputs if graph.tensor(uid).dims == self._dims]
        if not whole:
            raise Refused("nothing that it reads has an element for each place")
        self._leaf(graph.tensor(whole[0]), graph.tensor(whole[0]).strides)
        for operation in graph.operations:
            if isinstance(operation, Pointwise):
                self._add_pointwise(operation)
            else:
                self._add(operation)
        results = [graph.tensor(uid) for uid in graph.results]
        strides = [*(steps for _, steps in self._leaves), *(self._result_steps(tensor) for tensor in results)]
        kernel = lined(
            self._body,
            [Result(self._values[tensor.uid], tensor.dtype) for tensor in results],
            [tensor.dtype for tensor, _ in self._leaves],
            self._compute,
            (self._dims, self._axes, strides),
        )
        sources = given_sources(graph)
        tensors = [*(tensor for tensor, _ in self._leaves), *results]
        step = LinedStep(kernel, tuple(sources[tensor.uid] for tensor in tensors))
        return finish(graph, [step], [], 0, limit)

    # `Computing`.

    def apply(self, mode: PointwiseMode, *operands: Value) -> Value:
        return self._put(Expression(mode, operands, (), self._compute))

    def reduce(self, mode: object, operand: Value) -> Value:
        return self._put(Reduced(mode, operand))  # type: ignore[arg-type]

    def _put(self, node: Expression | Reduced) -> Earlier:
        self._body.append(node)
        return Earlier(len(self._body) - 1)

    # Operations.

    def _add_pointwise(self, operation: Pointwise[int]) -> None:
        operands = tuple(self._value(uid) for uid in operation.operands)
        dtype, used = self._graph.tensor(operation.result).dtype, operation.result in self._read
        node = expression(operation, operands, self._graph.compute(operation), dtype, used=used)
        self._values[operation.result] = self._put(node)

    def _add(self, operation: Node) -> None:
        given = {
            name: self._value(uid, weights=name != "x") for name, uid in operation.named(operation.inputs)
        }
        found: Mapping[str, Value] = IN_LINES[type(operation)].compute(operation, given, self)
        for name, uid in operation.named(operation.outputs):
            dtype, value = self._graph.tensor(uid).dtype, found[name]
            if uid in self._read and dtype is not self._compute:
                value = self._put(Expression(PointwiseMode.IDENTITY, (value,), (), self._compute, dtype))
            self._values[uid] = value

    def _value(self, uid: int, *, weights: bool = False) -> Value:
        """What an operation reads; `weights`: a number for each element of a line."""
        if uid in self._values:
            return self._values[uid]
        tensor = self._graph.tensor(uid)
        if tensor.role is TensorRole.SCALAR:
            return Scalar(self._graph.scalars.index(uid))
        if tensor.value is not None:
            return Constant(tensor.value)
        if weights:
            missing = len(self._dims) - len(tensor.dims)
            return self._leaf(tensor, (0,) * missing + tensor.strides)
        return self._leaf(tensor, self._steps(tensor))

    def _leaf(self, tensor: GraphTensor, steps: tuple[int, ...]) -> Leaf:
        if (tensor, steps) not in self._leaves:
            self._leaves.append((tensor, steps))
        return Leaf(self._leaves.index((tensor, steps)), tensor.dtype)

    def _steps(self, tensor: GraphTensor) -> tuple[int, ...]:
        """A tensor's strides over all dims: 0 where it is broadcast."""
        if len(tensor.dims) != len(self._dims):
            raise Refused("its tensors have different ranks")
        sizes = zip(tensor.dims, self._dims, tensor.strides, strict=True)
        return tuple(0 if own == 1 and size != 1 else step for own, size, step in sizes)

    def _result_steps(self, tensor: GraphTensor) -> tuple[int, ...]:
        writer = next(op for op in self._graph.operations if tensor.uid in op.writes)
        if isinstance(writer, Reduction) and not writer.keep_dims:
            steps = iter(tensor.strides)
            return tuple(0 if axis in self._axes else next(steps) for axis in range(len(self._dims)))
        one = tuple(1 if axis in self._axes else size for axis, size in enumerate(self._dims))
        if tensor.dims not in (self._dims, one):
            raise Refused("a result has neither an element for each place nor one for each line")
        return self._steps(tensor)
