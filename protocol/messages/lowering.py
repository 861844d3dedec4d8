"""Lowering: from a message to the operation graph that computes it.

`lower` is pure and checks everything that depends on shapes alone, so callers
cache its result by `signature`. Requests that differ only in their buffers
have the same signature, whatever alpha and beta are; only whether alpha is 1
and whether beta is 0 counts.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from cudnn_actor.protocol.errors import InvalidRequest, Words
from cudnn_actor.protocol.graphs.named_graph import Graph
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.messages import composites
from cudnn_actor.protocol.messages.messages import Compute, RunGraph
from cudnn_actor.protocol.operations import Operation
from cudnn_actor.protocol.operations.base import tensor_of
from cudnn_actor.protocol.operations.field_checks import check_operation
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.checks import require_awaited
from cudnn_actor.protocol.types.numerics import Numerics
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["Lowered", "Signature", "lower", "signature"]

Signature = tuple[object, ...]


class Lowered(NamedTuple):
    """A message's graph and how the message's fields bind to it.

    Parameters
    ----------
    graph
        The graph to run.
    buffers
        Names of operands (see `operands`), one for each of `graph.bound`, in that order; an output that is
        also read occurs twice.
    scalars
        Field names, one for each of `graph.scalars`, in that order.
    views
        (index in `buffers`, spec) of each buffer that the graph uses with other dims than the buffer's own:
        a bias of dims (K,) as (1, K, 1, ...).
    outputs
        Names of the operands that are written, each once.
    """

    graph: OperationGraph
    buffers: tuple[str, ...]
    scalars: tuple[str, ...]
    views: tuple[tuple[int, TensorSpec], ...]
    outputs: tuple[str, ...]


def signature(message: Compute) -> Signature:
    """A hashable key: equal for messages that lower to the same graph with the same bindings.

    Raises `AttributeError` or `TypeError` if a field has the wrong type; `lower` then reports which.
    """
    if isinstance(message, Operation):
        specs = tuple(ref.spec for ref in (*message.reads, *message.writes))
        # 1, 1.0 and True are equal, and only one of them is valid
        types = tuple(type(getattr(message, name)) for name in message.__struct_fields__)
        return (message.attributes(), types, specs, message.numerics)
    if isinstance(message, RunGraph):
        return (RunGraph, message.graph.identity, tuple(ref.spec for ref in message.buffers))
    return composites.signature(message)


def lower(message: Compute) -> Lowered:
    """Check everything that depends on shapes, and return the message's graph.

    Raises
    ------
    InvalidRequest
        A field has the wrong type, or shapes, ranks or dtypes do not match; the text names the field, its
        value and the fix.
    """
    match message:
        case Operation():
            graph, names, views = _assemble(message)
        case RunGraph():
            graph, names, views = _bound(message)
        case _:
            graph, names, views = composites.assemble(message)
    buffers = tuple(names[uid] for uid in graph.bound)
    return Lowered(
        graph=graph,
        buffers=buffers,
        scalars=tuple(names[uid] for uid in graph.scalars),
        views=tuple((buffers.index(name), spec) for name, spec in views.items()),
        outputs=tuple(names[uid] for uid in graph.results),
    )


def _assemble(message: Operation[BufferRef]) -> composites.Assembled:
    """A graph of this one operation."""
    checked = check_operation(message)
    refs = dict(message.named())
    names = dict(enumerate(refs))
    uids = {name: uid for uid, name in names.items()}
    graph = OperationGraph(
        tensors=tuple(tensor_of(uids[name], ref.spec, name=name) for name, ref in refs.items()),
        operations=(checked.with_operands(uids.__getitem__),),
        numerics=message.numerics or Numerics(),
    )
    return composites.Assembled(graph, names, {})


def _bound(message: RunGraph) -> composites.Assembled:
    """The graph of a `RunGraph`, whose buffers must have the specs of its ports."""
    graph: Any = message.graph
    if not isinstance(graph, Graph):
        raise InvalidRequest(
            field="graph",
            value=Words(type(graph).__name__),
            problem="is no graph",
            fix="pass what GraphBuilder.build gave",
        )
    buffers: Any = message.buffers
    if not isinstance(buffers, tuple | list):
        raise InvalidRequest(
            field="buffers",
            value=buffers,
            problem="is not a tuple of buffers",
            fix="make the message with RunGraph.bind(graph, x=..., y=...)",
        )
    if len(buffers) != len(graph.ports):
        raise InvalidRequest(
            field="buffers",
            value=Words(f"{len(buffers)} buffers"),
            problem=f"are not one for each of the {len(graph.ports)} ports of the graph",
            fix="make it with RunGraph.bind(graph, x=..., y=...)",
        )
    for port, ref in zip(graph.ports, buffers, strict=True):
        if not isinstance(ref, BufferRef):
            require_awaited(port.name, ref)
            raise InvalidRequest(
                field=port.name,
                value=ref,
                problem="is no buffer",
                fix="upload arrays first: await gpu.upload(array)",
            )
        spec = ref.spec
        if msgspec.structs.replace(spec, alignment=port.spec.alignment) != port.spec:
            raise InvalidRequest(
                field=port.name,
                value=Words(spec),
                problem="is not what the graph was built for",
                fix=f"give it a buffer of {port.spec}",
            )
        if spec.alignment < port.spec.alignment:
            raise InvalidRequest(
                field=port.name,
                value=spec.alignment,
                problem="is a smaller alignment than the graph was built for",
                fix=f"give it a buffer aligned to {port.spec.alignment} bytes",
            )
    return composites.Assembled(graph.body, graph.names_of, {})
