"""Lowering: from a message to the operation graph that computes it.

`lower` is pure and checks everything that depends on shapes alone, so callers
cache its result by `signature`. Requests that differ only in their buffers
have the same signature, whatever alpha and beta are; only whether alpha is 1
and whether beta is 0 counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from cudnn_actor.protocol.errors import InvalidRequest, Words
from cudnn_actor.protocol.graphs.named_graph import Graph
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.messages import composites
from cudnn_actor.protocol.messages.messages import Compute, RunGraph, RunLoop
from cudnn_actor.protocol.messages.run_loop import SCRATCH, Loop
from cudnn_actor.protocol.operations import Operation
from cudnn_actor.protocol.operations.base import tensor_of
from cudnn_actor.protocol.operations.field_checks import check_operation
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.checks import require_awaited, require_type
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.numerics import Numerics
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["LoopRun", "Lowered", "Signature", "lower", "signature"]

Signature = tuple[object, ...]


class LoopRun(NamedTuple):
    """A loop, and the most turns that it may take."""

    loop: Loop
    turns: int


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
    loop
        How many times the graph runs, and on what; None for once. Then `buffers` are the loop's: its body's
        ports in order, and the scratch buffer.
    """

    graph: OperationGraph
    buffers: tuple[str, ...]
    scalars: tuple[str, ...]
    views: tuple[tuple[int, TensorSpec], ...]
    outputs: tuple[str, ...]
    loop: LoopRun | None = None


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
    if isinstance(message, RunLoop):
        loop, turns = message.loop, message.turns
        how = (tuple(loop.carried.items()), loop.scanned, loop.condition, type(turns), turns)
        specs = tuple(ref.spec for ref in (*message.buffers, message.scratch))
        return (RunLoop, message.graph.identity, how, specs)
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
        case RunLoop():
            return _loop(message)
        case Operation():
            graph, names, views = _assemble(message)
        case RunGraph():
            graph, names, views = _bind(message)
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


def _bind(message: RunGraph) -> composites.Assembled:
    """The graph of a `RunGraph`, whose buffers must have the specs of its ports."""
    graph: Any = message.graph
    if not isinstance(graph, Graph):
        raise InvalidRequest(
            field="graph",
            value=Words(type(graph).__name__),
            problem="is no graph",
            fix="pass what GraphBuilder.build gave",
        )
    for port, ref in zip(graph.ports, _require_one_each(message), strict=True):
        _check_buffer(port.name, ref)
        _check_spec(port.name, ref.spec, port.spec)
    return composites.Assembled(graph.body, graph.names_of, {})


def _check_buffer(name: str, ref: Any) -> None:
    if not isinstance(ref, BufferRef):
        require_awaited(name, ref)
        raise InvalidRequest(
            field=name,
            value=ref,
            problem="is no buffer",
            fix="upload arrays first: await gpu.upload(array)",
        )


def _check_spec(name: str, spec: TensorSpec, wanted: TensorSpec) -> None:
    """Raise `InvalidRequest` unless a buffer has the spec of its port."""
    if spec == wanted:  # to make another spec takes longer
        return
    if msgspec.structs.replace(spec, alignment=wanted.alignment) != wanted:
        raise InvalidRequest(
            field=name,
            value=Words(spec),
            problem="is not what the graph was built for",
            fix=f"give it a buffer of {wanted}",
        )
    if spec.alignment < wanted.alignment:
        raise InvalidRequest(
            field=name,
            value=spec.alignment,
            problem="is a smaller alignment than the graph was built for",
            fix=f"give it a buffer aligned to {wanted.alignment} bytes",
        )


def _loop(message: RunLoop) -> Lowered:
    """The graph of a `RunLoop`, whose buffers must be those of `Loop.specs`, and of `Loop.scratch`."""
    loop: Any = message.loop
    require_type("loop", loop, Loop, f"make one: {Loop.example}")
    wanted, buffers = loop.specs(message.turns), _require_one_each(message)
    for (name, spec), ref in zip(wanted.items(), buffers, strict=True):
        _check_buffer(name, ref)
        if name in loop.scanned or name in loop.stacked:
            _check_rows(name, ref.spec, spec)
        else:
            _check_spec(name, ref.spec, spec)
    _check_buffer(SCRATCH, message.scratch)
    _check_scratch(message.scratch.spec, loop.scratch)
    outputs = (*(port.name for port in loop.body.outputs), SCRATCH)
    run = LoopRun(loop, int(message.turns))
    return Lowered(loop.body.body, (*wanted, SCRATCH), (), (), outputs, run)


def _require_one_each(message: RunGraph | RunLoop) -> Sequence[Any]:
    """The buffers of a message. Raises `InvalidRequest` unless there is one for each port of its graph."""
    buffers: Any = message.buffers
    what = type(message).__name__
    if not isinstance(buffers, tuple | list):
        raise InvalidRequest(
            field="buffers",
            value=buffers,
            problem="is not a tuple of buffers",
            fix=f"make the message with {what}.bind(graph, x=..., y=...)",
        )
    if len(buffers) != len(message.graph.ports):
        raise InvalidRequest(
            field="buffers",
            value=Words(f"{len(buffers)} buffers"),
            problem=f"are not one for each of the {len(message.graph.ports)} ports of the graph",
            fix=f"make it with {what}.bind(graph, x=..., y=...)",
        )
    return buffers


def _check_rows(name: str, spec: TensorSpec, wanted: TensorSpec) -> None:
    """Raise `InvalidRequest` unless a buffer has a row for each turn. Its strides may be any."""
    if (spec.dims, spec.dtype) != (wanted.dims, wanted.dtype):
        raise InvalidRequest(
            field=name,
            value=Words(spec),
            problem=f"is not one row for each of {wanted.dims[0]} turns",
            fix=f"give it a buffer of dims {wanted.dims} and {wanted.dtype}",
        )


def _check_scratch(spec: TensorSpec, wanted: TensorSpec) -> None:
    if spec.dtype is not DType.UINT8 or spec.rank != 1 or spec.nbytes < wanted.nbytes or spec.strides != (1,):
        raise InvalidRequest(
            field=SCRATCH,
            value=Words(spec),
            problem="does not hold what the loop works in",
            fix=f'allocate it: scratch=await gpu.empty(({wanted.nbytes},), dtype="uint8")',
        )
