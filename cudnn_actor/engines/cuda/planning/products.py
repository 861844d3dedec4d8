"""Runs a product with what follows it as one step of cuBLASLt's, where that has an epilogue for it.

Rounding is part of a graph's meaning. So what follows must be computed on values that are
not rounded before: a residual that is added to a product in bfloat16 is not what cuBLASLt
adds to its sums. GELU is fused only in the form with tanh, which is cuBLASLt's.

For anything else, cuBLASLt computes what it can, and a kernel of our own the rest. What
lies between them has the type that the graph gives it, mostly float32: that is worth its
way through memory for large products with small results.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from cudnn_actor.engines.base import EngineFailure
from cudnn_actor.engines.cuda.cudnn.frontend_graph import Refused
from cudnn_actor.engines.cuda.operations.cublaslt import ACTIVATIONS, LtProduct, Operands, lt_product
from cudnn_actor.engines.cuda.planning.candidates import AbsentDevice
from cudnn_actor.engines.cuda.planning.splitting import compile_split
from cudnn_actor.engines.cuda.planning.steps import bound_sources, finish, placed
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.engines.cuda.running.recipe import ProductStep, Scratch, Step, aligned
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.operations import (
    FUNCTIONS,
    GraphTensor,
    MatMul,
    Node,
    Pointwise,
    PointwiseMode,
    TensorRole,
)

__all__ = ["GraphProduct", "Halves", "compile_halves", "compile_product", "halves_of", "is_split_by_default"]
__all__ += ["product_of"]

_WORKSPACE_BYTES = 32 << 20
"""What NVIDIA recommends for Hopper and later."""
_LEAST_WORK, _MOST_BETWEEN = 1 << 31, 32 << 20
"""Of a product and another kernel: products of elements, and bytes between them, which stay in the cache."""


class GraphProduct(NamedTuple):
    """A graph as a product for cuBLASLt, without an algorithm, and the tensors whose addresses that takes."""

    product: LtProduct
    uids: tuple[int, ...]


class _Meaning(NamedTuple):
    """A product, what is added to it, and a function of that."""

    operands: Operands
    activation: PointwiseMode | None = None


def product_of(graph: OperationGraph) -> GraphProduct | None:
    """A graph as a product for cuBLASLt; None if it is something else.

    It is none where cuBLASLt has no epilogue for what follows, or does not take what lies as the tensors do.
    """
    found = _meaning(graph)
    if found is None:
        return None
    with contextlib.suppress(Refused):
        product, tensors = lt_product(graph.numerics, *found)
        return GraphProduct(product, tuple(tensor.uid for tensor in tensors))
    return None


class Halves(NamedTuple):
    """A product with the epilogues that cuBLASLt has, what follows it, and the tensor between them."""

    first: OperationGraph
    rest: OperationGraph
    between: GraphTensor


def halves_of(graph: OperationGraph) -> Halves | None:
    """A product in two parts, the first as large as can be; None if there is no first part, or no second."""
    product, *behind = operations = graph.operations
    if not isinstance(product, MatMul) or not all(isinstance(each, Pointwise) for each in behind):
        return None
    for number in reversed(range(1, len(operations))):
        (uid,) = operations[number - 1].writes
        tensor = graph.tensor(uid)
        if tensor.role is TensorRole.VIRTUAL and any(uid in each.reads for each in operations[number:]):
            between = msgspec.structs.replace(tensor, role=TensorRole.BOUND)
            first = _part(graph, operations[:number], between)
            if first is not None and product_of(first) is not None:
                rest = _part(graph, operations[number:], between)
                return None if rest is None else Halves(first, rest, between)
    return None


def is_split_by_default(graph: OperationGraph, halves: Halves) -> bool:
    """Whether cuBLASLt's kernel and another one are expected to take less time than one of cuDNN's."""
    product, nbytes = graph.operations[0], halves.between.spec.nbytes
    work = product.work({name: graph.tensor(uid).spec for name, uid in product.named()})
    return work >= _LEAST_WORK and nbytes <= _MOST_BETWEEN


def _part(graph: OperationGraph, operations: Sequence[Node], between: GraphTensor) -> OperationGraph | None:
    """Some operations as a graph; None if they read what is computed in the others besides `between`."""
    touched = {uid for each in operations for uid in (*each.reads, *each.writes)}
    written = {uid for each in operations for uid in each.writes}
    tensors = [between if uid == between.uid else graph.tensor(uid) for uid in sorted(touched)]
    if any(tensor.role is TensorRole.VIRTUAL and tensor.uid not in written for tensor in tensors):
        return None
    read = {uid for each in operations for uid in each.reads}
    return OperationGraph(
        tensors=tuple(
            tensor if tensor.overwrites in read else msgspec.structs.replace(tensor, overwrites=None)
            for tensor in tensors
        ),
        operations=tuple(operations),
        numerics=graph.numerics,
    )


def compile_halves(
    graph: OperationGraph, halves: Halves, handle: Any, limit: int | None, choice: int = 0
) -> CudaPlan:
    """Returns a graph as a step of cuBLASLt's, with the algorithm of that index, and a kernel of our own.

    Raises `Refused`.
    """
    product = product_of(halves.first)
    assert product is not None, "that is what the first half is"
    sources = bound_sources(graph) | {halves.between.uid: Scratch(0)}
    nbytes = aligned(halves.between.spec.nbytes)
    steps: list[Step] = []
    plans = [
        (halves.first, compile_product(halves.first, product, handle, limit, choice)),
        (halves.rest, compile_split(halves.rest, handle, limit)),
    ]
    for part, plan in plans:
        buffers = [sources[uid] for uid in part.bound]
        numbers = [graph.scalars.index(uid) for uid in part.scalars]
        steps += [placed(step, buffers, numbers, nbytes) for step in plan.recipe.steps]
    return finish(graph, steps, [], nbytes + max(plan.recipe.scratch for _, plan in plans), limit)


def _meaning(graph: OperationGraph) -> _Meaning | None:
    """The product that a graph computes, if cuBLASLt's epilogues are all that follows."""
    operation, *behind = graph.operations
    if not isinstance(operation, MatMul) or len(graph.results) != 1:
        return None
    (result,) = graph.results
    if graph.tensor(operation.y).dims != graph.tensor(result).dims:
        return None
    found: _Meaning | None = _Meaning(Operands(*map(graph.tensor, (operation.a, operation.b, result))))
    uid = operation.y
    for each in behind:
        if found is None or not isinstance(each, Pointwise) or not _is_exact(graph, uid):
            return None
        found, uid = _followed(found, each, uid, graph), each.result
    return None if found is None or uid != result or _overwrites_early(found.operands) else found


def _is_exact(graph: OperationGraph, uid: int) -> bool:
    """Whether a value is that of a sum, not rounded to another type, and read once."""
    tensor, reads = graph.tensor(uid), [read for each in graph.operations for read in each.reads]
    exact = tensor.dtype is graph.compute(graph.operations[0])
    return tensor.role is TensorRole.VIRTUAL and exact and reads.count(uid) == 1


def _followed(
    product: _Meaning, operation: Pointwise[int], uid: int, graph: OperationGraph
) -> _Meaning | None:
    """A product with an operation that reads its value, `uid`; None if there is no such epilogue."""
    others = [graph.tensor(operand) for operand in operation.operands if operand != uid]
    if len(others) == len(operation.operands):
        return None
    match operation.mode, others:
        case PointwiseMode.IDENTITY, []:
            return product
        case PointwiseMode.ADD, [other] if product.activation is None:
            operands = _with_added(product.operands, other)
            return None if operands is None else product._replace(operands=operands)
        case mode, [] if mode in ACTIVATIONS and product.activation is None and _has_defaults(operation):
            return product._replace(activation=mode)
    return None


def _overwrites_early(operands: Operands) -> bool:
    """Whether the result is stored over an operand that may still be read, as a residual of it may not."""
    a, b, y, _, bias = operands
    read = [tensor.uid for tensor in (a, b, bias) if tensor is not None]
    return y.overwrites is not None and y.overwrites in read


def _with_added(operands: Operands, other: GraphTensor) -> Operands | None:
    """The operands with a residual or a bias, if it can be one and there is none yet."""
    y = operands.y
    if other.role is not TensorRole.BOUND or other.dtype is not y.dtype or len(other.dims) != len(y.dims):
        return None
    if other.dims == y.dims and operands.added is None and any(size > 1 for size in y.dims[:-1]):
        return operands._replace(added=other)
    is_bias = other.dims == (*(1,) * (len(y.dims) - 1), y.dims[-1]) and other.strides[-1] == 1
    return operands._replace(bias=other) if is_bias and operands.bias is None else None


def _has_defaults(operation: Pointwise[int]) -> bool:
    """Whether a function has no parameters but those that it has by default."""
    return operation.effective_parameters == FUNCTIONS[operation.mode].parameters


def compile_product(
    graph: OperationGraph, of: GraphProduct, handle: Any, limit: int | None, choice: int = 0
) -> CudaPlan:
    """Returns a graph that is a product as one step, with the algorithm of that index: see `chosen`.

    Raises `Refused`.
    """
    if isinstance(handle, AbsentDevice):
        raise Refused("cuBLASLt chooses algorithms for the device that is there")
    most = _WORKSPACE_BYTES if limit is None else min(limit, _WORKSPACE_BYTES)
    try:
        chosen = next(itertools.islice(of.product.chosen(most, choice + 1), choice, None), None)
    except EngineFailure as failure:
        raise Refused(str(failure)) from failure
    if chosen is None:
        raise Refused(f"cuBLASLt has no algorithm {choice} for it")
    sources = bound_sources(graph)
    places = [sources[uid] for uid in of.uids]
    if chosen.workspace:
        places.append(Scratch(0))
    return finish(graph, [ProductStep(chosen, tuple(places))], [], aligned(chosen.workspace), limit)
