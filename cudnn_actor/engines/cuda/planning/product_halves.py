"""Runs a product by cuBLASLt, and the operations that cuBLASLt has no epilogue for as a kernel of our own.

The tensor between them has the type that the graph gives it, mostly float32, and goes through
memory. That takes time, so only autotuning tries it, except for functions that are known to
take long in cuDNN's graph: those of gates, and GELU by erf where the graph rounds to a half
type before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from cudnn_actor.engines.cuda.planning.fusion_rules import SLOW_EPILOGUES
from cudnn_actor.engines.cuda.planning.products import compile_product, product_of
from cudnn_actor.engines.cuda.planning.splitting import compile_split
from cudnn_actor.engines.cuda.planning.steps import bound_sources, finish, place_part
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.engines.cuda.running.recipe import Scratch, Step, align
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.operations import GraphTensor, MatMul, Node, Pointwise, PointwiseMode, TensorRole

__all__ = ["Halves", "compile_halves", "halves_of", "is_split_by_default"]


_COSTLY = frozenset({PointwiseMode.ERF, PointwiseMode.GELU})
"""The modes that take longer in cuDNN's graph than in a kernel that reads the product in a half type.

For each element of the result, cuDNN's graph of a product, a bias and GELU takes 3.8 to 4.6 ps (H100; ViT,
BERT and ConvNeXt, 32 samples). A product with a bias by cuBLASLt and such a kernel take 3.2 with rows of 96
numbers, and 4.6 with rows of 768.
"""
_LONGEST_ROWS = 512
"""The longest rows of the product's operands: longer ones gain nothing (ViT), or lose a tenth (BERT)."""
_LEAST_BYTES = 8 << 20
"""The fewest bytes of the tensor between the halves, where rows are no longer than `_LONGEST_ROWS`."""
_SMALL = range(256 << 10, 5 << 20)
"""Elements of a small product that is split if its rows are no shorter than `_SHORTEST_ROWS`.

Microseconds by cuDNN and split, H200: 784 x 192 x 768, 7.5 and 6.8; 196 x 384 x 1536, 7.7 and 6.4;
197 x 768 x 3072, 9.2 and 8.7; 1568 x 768 x 3072, 29.7 and 23.7; H100: 1024 x 768 x 3072, 22.7 and 18.2. With
49 rows, or with 3136 of 96 numbers, nothing is gained.
"""
_SHORTEST_ROWS = 192


class Halves(NamedTuple):
    """A product with epilogues that cuBLASLt has, the other operations, and the tensor between the two."""

    first: OperationGraph
    rest: OperationGraph
    between: GraphTensor


def halves_of(graph: OperationGraph) -> Halves | None:
    """A product in two parts, the first as large as possible; None if one of them would be empty."""
    products = [each for each in graph.operations if not isinstance(each, Pointwise)]
    if len(products) != 1 or not isinstance(products[0], MatMul):
        return None
    chain = _chain(graph, products[0])
    for length in reversed(range(1, len(chain) + 1)):
        first = chain[:length]
        rest = [each for each in graph.operations if each not in first]
        (uid,) = first[-1].writes
        if graph.tensor(uid).role is TensorRole.VIRTUAL and rest:
            between = msgspec.structs.replace(graph.tensor(uid), role=TensorRole.BOUND)
            head, tail = (_part(graph, part, between) for part in (first, rest))
            found = None if head is None or tail is None else product_of(head)
            if head and tail and found and found.bias is None:  # a bias in need of a copy goes to the second
                return Halves(head, tail, between)
    return None


def is_split_by_default(halves: Halves) -> bool:
    """Whether the two halves are known to take less time than one kernel of cuDNN's."""
    modes = {operation.mode for operation in halves.rest.operations if isinstance(operation, Pointwise)}
    between = halves.between
    (product,) = (each for each in halves.first.operations if isinstance(each, MatMul))
    rows_of = halves.first.tensor(product.a).dims[-1]
    is_large = between.spec.nbytes >= _LEAST_BYTES and rows_of <= _LONGEST_ROWS
    is_small = between.spec.size in _SMALL and rows_of >= _SHORTEST_ROWS
    pays = between.dtype.is_half and (is_large or is_small)
    return not modes.isdisjoint(SLOW_EPILOGUES | _COSTLY if pays else SLOW_EPILOGUES)


def _chain(graph: OperationGraph, product: Node) -> list[Node]:
    """A product, and the operations behind it, as long as each is the only reader of the one before it."""
    chain = [product]
    while True:
        readers = [each for each in graph.operations if chain[-1].writes[0] in each.reads]
        if len(readers) != 1:
            return chain
        chain += readers


def _part(graph: OperationGraph, operations: Sequence[Node], between: GraphTensor) -> OperationGraph | None:
    """Some operations as a graph; None if they read results of the other operations, besides `between`."""
    read = {uid for each in operations for uid in each.reads}
    written = {uid for each in operations for uid in each.writes}
    tensors = [between if uid == between.uid else graph.tensor(uid) for uid in sorted(read | written)]
    if any(tensor.role is TensorRole.VIRTUAL and tensor.uid not in written for tensor in tensors):
        return None
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
    nbytes = align(halves.between.spec.nbytes)
    sources = bound_sources(graph) | {halves.between.uid: Scratch(0, nbytes)}
    steps: list[Step] = []
    plans = [
        (halves.first, compile_product(halves.first, product, handle, limit, choice)),
        (halves.rest, compile_split(halves.rest, handle, limit)),
    ]
    for part, plan in plans:
        steps += place_part(graph, part, plan, sources, nbytes)
    return finish(graph, steps, [], nbytes + max(plan.recipe.scratch for _, plan in plans), limit)
