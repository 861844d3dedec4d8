"""Runs a product with the operations behind it as one step of cuBLASLt's, if it has epilogues for them.

Rounding is part of a graph's meaning, and cuBLASLt does not round before its epilogues. So
the graph must not round a value between the product and its result: a product that is
rounded to bfloat16 before a residual is added is not fused with the sum. GELU is fused only
in the form with tanh, as cuBLASLt's is. A bias of a narrower type than the result is
converted first, by a kernel of our own.
"""

from __future__ import annotations

import contextlib
import itertools
from typing import Any, NamedTuple

import msgspec

from cudnn_actor.engines.base import EngineFailure
from cudnn_actor.engines.cuda.cudnn.frontend_graph import Refused
from cudnn_actor.engines.cuda.library.libcublas import WORKSPACE_BYTES
from cudnn_actor.engines.cuda.operations.cublaslt import ACTIVATIONS, LtProduct, Operands, lt_product
from cudnn_actor.engines.cuda.planning.candidates import AbsentDevice
from cudnn_actor.engines.cuda.planning.copy_kernels import copy_kernel
from cudnn_actor.engines.cuda.planning.steps import bound_sources, finish
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.engines.cuda.running.recipe import KernelStep, ProductStep, Scratch, Step, align
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.graphs.remembering import remember
from cudnn_actor.protocol.operations import (
    FUNCTIONS,
    GraphTensor,
    MatMul,
    Pointwise,
    PointwiseMode,
    TensorRole,
)
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["GraphProduct", "compile_product", "product_of"]

_MOST_KNOWN = 256
"""The most graphs whose products are remembered: a build asks for each several times."""


class GraphProduct(NamedTuple):
    """A graph as a product for cuBLASLt, without an algorithm.

    `uids`: the tensors whose addresses it takes. `bias`: the bias as the product takes it, if it is a copy.
    """

    product: LtProduct
    uids: tuple[int, ...]
    bias: GraphTensor | None = None


class _Meaning(NamedTuple):
    """A product, what is added to it, and a function of that."""

    operands: Operands
    activation: PointwiseMode | None = None


def product_of(graph: OperationGraph) -> GraphProduct | None:
    """A graph as a product for cuBLASLt; None if it is none.

    None, too, if cuBLASLt has no epilogue for an operation behind the product, or does not take the tensors'
    layouts.
    """
    return _product_of(graph) if isinstance(graph.operations[0], MatMul) else None


@remember(_MOST_KNOWN)
def _product_of(graph: OperationGraph) -> GraphProduct | None:
    """The product of a graph that begins with a matrix product: see `product_of`."""
    found = _meaning_of(graph)
    if found is None:
        return None
    with contextlib.suppress(Refused):
        product, tensors = lt_product(graph.numerics, *found)
        bias = found.operands.bias
        converted = bias is not None and bias.dtype is not graph.tensor(bias.uid).dtype
        return GraphProduct(product, tuple(tensor.uid for tensor in tensors), bias if converted else None)
    return None


def _meaning_of(graph: OperationGraph) -> _Meaning | None:
    """The product that a graph computes; None if cuBLASLt lacks an epilogue for an operation behind it."""
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
        found, uid = _with_epilogue(found, each, uid, graph), each.result
    return None if found is None or uid != result or _overwrites_early(found.operands) else found


def _is_exact(graph: OperationGraph, uid: int) -> bool:
    """Whether a value is a sum that is not rounded to another type, and that is read once."""
    tensor, reads = graph.tensor(uid), [read for each in graph.operations for read in each.reads]
    exact = tensor.dtype is graph.compute(graph.operations[0])
    return tensor.role is TensorRole.VIRTUAL and exact and reads.count(uid) == 1


def _with_epilogue(
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
    """Whether the result is stored over an operand that may still be read. A residual may be overwritten."""
    a, b, y, _, bias = operands
    read = [tensor.uid for tensor in (a, b, bias) if tensor is not None]
    return y.overwrites is not None and y.overwrites in read


def _with_added(operands: Operands, other: GraphTensor) -> Operands | None:
    """The operands with a residual or a bias, if it can be one and there is none yet."""
    y = operands.y
    if other.role is not TensorRole.BOUND or len(other.dims) != len(y.dims):
        return None
    same, widened = other.dtype is y.dtype, other.dtype.is_half and y.dtype is DType.FLOAT32
    if other.dims == y.dims and operands.added is None and any(size > 1 for size in y.dims[:-1]):
        return operands._replace(added=other) if same else None
    is_bias = other.dims == (*(1,) * (len(y.dims) - 1), y.dims[-1]) and other.strides[-1] == 1
    if not is_bias or operands.bias is not None or not (same or widened):
        return None
    return operands._replace(bias=other if same else msgspec.structs.replace(other, dtype=y.dtype))


def _has_defaults(operation: Pointwise[int]) -> bool:
    """Whether a function has no parameters but those that it has by default."""
    return operation.effective_parameters == FUNCTIONS[operation.mode].parameters


def compile_product(
    graph: OperationGraph, of: GraphProduct, handle: Any, limit: int | None, choice: int = 0
) -> CudaPlan:
    """Returns a graph that is a product as one step, with the algorithm of that index: see `with_algorithms`.

    Raises `Refused`.
    """
    if isinstance(handle, AbsentDevice):
        raise Refused("cuBLASLt chooses algorithms for the device that is there")
    most = WORKSPACE_BYTES if limit is None else min(limit, WORKSPACE_BYTES)
    try:
        chosen = next(itertools.islice(of.product.with_algorithms(most, choice + 1), choice, None), None)
    except EngineFailure as failure:
        raise Refused(str(failure)) from failure
    if chosen is None:
        raise Refused(f"cuBLASLt has no algorithm {choice} for it")
    sources, scratch, steps = bound_sources(graph), align(chosen.workspace), list[Step]()
    if of.bias is not None:
        given, place = graph.tensor(of.bias.uid), Scratch(scratch, of.bias.spec.nbytes)
        scratch += align(of.bias.spec.nbytes)
        steps.append(KernelStep(copy_kernel(given, of.bias), (place, sources[given.uid])))
        sources[given.uid] = place
    places = (sources[uid] for uid in of.uids)
    steps.append(
        ProductStep(chosen, (*places, *([Scratch(0, chosen.workspace)] if chosen.workspace else [])))
    )
    return finish(graph, steps, [], scratch, limit)
