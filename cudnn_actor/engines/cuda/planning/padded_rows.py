"""Runs a large product of half types on copies with padded rows, where rows begin at no multiple of 16 bytes.

cuBLASLt's kernels for tensor cores read and write vectors of 16 bytes. Without, GPT-2's logits, of 50,257
columns, ran at 12 % of what the device can do (H100). So the product writes rows of whole sectors into the
workspace, and a copy packs them; operands are copied to such rows before. Sizes stay as they are: nothing
reads what lies between rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec

from cudnn_actor.engines.cuda.planning.products import GraphProduct, compile_product, product_of
from cudnn_actor.engines.cuda.planning.splitting import copy_kernel
from cudnn_actor.engines.cuda.planning.steps import bound_sources, finish, placed
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.engines.cuda.running.recipe import KernelStep, Scratch, Step, aligned
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.operations import GraphTensor, MatMul

__all__ = ["Padded", "compile_padded", "padded", "pays", "plan_of_padded", "with_padded_rows"]

_VECTOR_BYTES, _ROW_BYTES = 16, 128
_LEAST_WORK = 2 << 30
"""Floating-point operations. At a tenth of what the device can do, these take 20 us."""
_WORK_PER_BYTE = 150
"""Floating-point operations for each byte that is copied.

A copy reads and writes a byte in 0.7 ps, at 2.8 TB/s. At 12 % instead of 60 % of 990 TFLOP/s, 106
operations take 0.7 ps longer.
"""


class Padded(NamedTuple):
    """A graph on tensors with padded rows, and the forms of those that are copied, by uid."""

    graph: OperationGraph
    product: GraphProduct
    forms: dict[int, GraphTensor]


def padded(graph: OperationGraph, *, every: bool = False) -> Padded | None:
    """The graph with padded rows where its product's operands or result have others; None if it has none.

    None, too, where the copies are expected to take longer than they save, unless `every` is set.
    """
    operation = graph.operations[0] if graph.operations else None
    if not isinstance(operation, MatMul) or not graph.tensor(operation.a).dtype.is_half:
        return None
    if product_of(graph) is None:
        return None
    (result,) = graph.results
    dims = graph.tensor(result).dims
    matrices = {operation.a, operation.b, *(uid for uid in graph.bound if graph.tensor(uid).dims == dims)}
    forms = {uid: with_padded_rows(graph.tensor(uid)) for uid in sorted(matrices)}
    forms = {uid: form for uid, form in forms.items() if form != graph.tensor(uid)}
    if not forms or not (every or pays(graph, forms.values())):
        return None
    if result in forms:
        forms[result] = msgspec.structs.replace(forms[result], overwrites=None)
    changed = OperationGraph(
        tensors=tuple(forms.get(tensor.uid, tensor) for tensor in graph.tensors),
        operations=graph.operations,
        numerics=graph.numerics,
    )
    product = product_of(changed)
    return None if product is None else Padded(changed, product, forms)


def pays(graph: OperationGraph, copied: Iterable[GraphTensor]) -> bool:
    """Whether the product that a graph begins with gains more by aligned rows than these copies take."""
    a, y = (graph.tensor(uid) for uid in (graph.operations[0].reads[0], graph.operations[0].writes[0]))
    nbytes = sum(math.prod(form.dims) * form.dtype.itemsize for form in copied)
    return 2 * math.prod(y.dims) * a.dims[-1] >= max(_LEAST_WORK, _WORK_PER_BYTE * nbytes)


def with_padded_rows(tensor: GraphTensor) -> GraphTensor:
    """A matrix, or several, with rows or columns that begin at multiples of 128 bytes.

    It is the tensor itself if they begin at multiples of 16 bytes already.
    """
    itemsize, rank = tensor.dtype.itemsize, len(tensor.dims)
    minor = rank - 1 if tensor.strides[-1] == 1 else rank - 2
    others = [axis for axis in range(rank) if axis != minor and tensor.dims[axis] > 1]
    starts = [tensor.alignment, *(tensor.strides[axis] * itemsize for axis in others)]
    if tensor.dims[minor] == 1 or not any(start % _VECTOR_BYTES for start in starts):
        return tensor
    step = -(-tensor.dims[minor] * itemsize // _ROW_BYTES) * _ROW_BYTES // itemsize
    strides = [1] * rank
    for axis in sorted(
        (axis for axis in range(rank) if axis != minor), key=lambda n: (tensor.strides[n], -n)
    ):
        strides[axis] = step
        step *= tensor.dims[axis]
    return msgspec.structs.replace(tensor, strides=tuple(strides), alignment=_VECTOR_BYTES)


def compile_padded(
    graph: OperationGraph, of: Padded, handle: Any, limit: int | None, choice: int = 0
) -> CudaPlan:
    """Returns a graph as copies and a step of cuBLASLt's, with the algorithm of that index.

    Raises `Refused`.
    """
    return plan_of_padded(graph, of, compile_product(of.graph, of.product, handle, limit, choice), limit)


def plan_of_padded(graph: OperationGraph, of: Padded, plan: CudaPlan, limit: int | None) -> CudaPlan:
    """The plan that copies operands, runs a plan of the graph on padded rows, and packs the result.

    Raises `Refused` if it needs more workspace than the limit.
    """
    sources, scratch = bound_sources(graph), 0
    before, after = list[Step](), list[Step]()
    for uid, form in of.forms.items():
        given, tensor, place = sources[uid], graph.tensor(uid), Scratch(scratch)
        scratch += aligned(form.spec.nbytes)
        sources[uid] = place
        if uid in graph.written:
            after.append(KernelStep(copy_kernel(form, tensor), (given, place)))
        else:
            before.append(KernelStep(copy_kernel(tensor, form), (place, given)))
    buffers, numbers = [sources[uid] for uid in of.graph.bound], range(len(graph.scalars))
    steps = [*before, *(placed(step, buffers, numbers, scratch) for step in plan.recipe.steps), *after]
    return finish(graph, steps, plan.graphs, scratch + plan.recipe.scratch, limit)
