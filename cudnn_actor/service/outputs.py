"""The outputs of `apply`: the specs of those that it allocates first, and the references that its caller
gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from cudnn_actor.models.model import Model
from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.graphs.graph_builder import GraphBuilder
from cudnn_actor.protocol.graphs.named_graph import Graph
from cudnn_actor.protocol.graphs.named_outputs import named_outputs
from cudnn_actor.protocol.messages.message_checks import kind_of
from cudnn_actor.protocol.messages.messages import ConvBwdData, ConvBwdFilter, ConvFwd, RunGraph, RunLoop
from cudnn_actor.protocol.messages.operands import operand
from cudnn_actor.protocol.messages.run_loop import Loop
from cudnn_actor.protocol.operations import OPERATIONS, Operation
from cudnn_actor.protocol.operations.field_checks import check_inputs
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.checks import require_awaited, require_names
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["INSTEAD", "missing_outputs", "missing_ports", "outputs_of"]

INSTEAD: dict[type, str] = {
    ConvFwd: "use `await gpu.conv_fwd(x, w, conv=...)`",
    ConvBwdData: "use `await gpu.conv_bwd_data(dy, w, conv=...)`",
    GraphBuilder: "build the graph: graph = g.build(y=y)",
    Model: "run it: await gpu.run(model, inputs)",
    RunGraph: "send it, `await gpu.ask(message)`, or apply its graph",
    RunLoop: "send it, `await gpu.ask(message)`, or run its loop: await gpu.loop(loop, turns=100)",
    Loop: "run it: await gpu.loop(loop, turns=100, x=x)",
    ConvBwdFilter: "use `await gpu.conv_bwd_filter(x, dy, conv=..., dims=...)`",
}
"""The fix that an error names for an object that `apply` does not take, or that is no message."""


def missing_ports(
    graph: Graph, given: Mapping[str, BufferRef], specs: Mapping[str, TensorSpec] | None = None
) -> dict[str, TensorSpec]:
    """The specs of a graph's outputs that are not given. Raises `InvalidRequest` if an input is not given.

    `specs`: the specs of the graph's tensors, if they differ from the ports'.
    """
    for port in graph.inputs:
        if port.name not in given:
            raise InvalidRequest(
                field=port.name,
                value=None,
                problem="is an input of the graph and has no buffer",
                fix=f"upload it: {port.name}=await gpu.upload(array)",
            )
    specs = {port.name: port.spec for port in graph.outputs} if specs is None else specs
    return {port.name: specs[port.name] for port in graph.outputs if port.name not in given}


def missing_outputs(
    operation: Operation[BufferRef], also: Sequence[str], named: Mapping[str, object]
) -> dict[str, TensorSpec]:
    """The specs of the outputs that are to be allocated for an operation: those that it leaves out and that
    are wanted. `named` must be empty.

    Raises `InvalidRequest` if a field has the wrong type, the inputs do not fit together, `also` names no
    optional output, or an output's dims do not follow from the inputs.
    """
    _require_operation(operation)
    for name, value in named.items():
        raise InvalidRequest(
            field=name,
            value=value,
            problem="is for graphs: an operation's buffers are its fields",
            fix=f"leave it out, or make it a field: {type(operation).__name__}(x=x)",
        )
    require_names("also", also, operation.outputs, type(operation).__name__)
    inferred = check_inputs(operation).infer(
        {name: ref.spec for name, ref in operation.named(operation.inputs)}
    )
    wanted = [
        name
        for name in operation.outputs
        if getattr(operation, name) is None and (name not in operation.optional or name in also)
    ]
    for name in wanted:
        if name not in inferred:
            optional = name in operation.optional
            raise InvalidRequest(
                field=name,
                value=None,
                problem="is left out, and its dims do not follow from the inputs",
                fix=f"take it out of `also`, or give {type(operation).__name__} the input it belongs to"
                if optional
                else f"allocate it: {name}=await gpu.empty(dims)",
            )
    return {name: inferred[name] for name in wanted}


def _require_operation(given: object) -> None:
    if type(given) in OPERATIONS:
        return
    require_awaited("operation", given)
    raise InvalidRequest(
        field="operation",
        value=kind_of(given),
        problem="is not an operation that `apply` takes",
        fix=INSTEAD.get(type(given), "pass one, as in MaxPool(x=x, window=window)"),
    )


def outputs_of(message: Operation[BufferRef] | RunGraph | RunLoop) -> BufferRef | tuple[BufferRef, ...]:
    """The output of an operation, a graph or a loop, or a named tuple of several."""
    if isinstance(message, RunGraph | RunLoop):
        outputs: dict[str, BufferRef] = {
            port.name: operand(message, port.name) for port in message.graph.outputs
        }
    else:
        outputs = dict(message.named(message.outputs))
    if len(outputs) == 1:
        return next(iter(outputs.values()))
    made: tuple[BufferRef, ...] = named_outputs(f"{type(message).__name__}Outputs", outputs)
    return made
