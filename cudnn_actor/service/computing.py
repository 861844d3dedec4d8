"""`CudnnRef.compute`, which takes and returns arrays. A scope owns its buffers, and frees them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_origin

import msgspec

from cudnn_actor.actors import Deadline
from cudnn_actor.protocol.errors import InvalidRequest, Words
from cudnn_actor.protocol.graphs.named_graph import Graph
from cudnn_actor.protocol.graphs.named_outputs import named_outputs
from cudnn_actor.protocol.messages.message_checks import kind_of
from cudnn_actor.protocol.messages.messages import Allocate, ConvBwdData, ConvBwdFilter, ConvFwd
from cudnn_actor.protocol.messages.run_graph import bound_names
from cudnn_actor.protocol.operations import OPERATIONS, Operation
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.service.scopes import Scope

__all__ = ["Computable", "compute", "updated_inputs"]

Computable = Graph | type[Operation[Any]] | type[ConvFwd] | type[ConvBwdData] | type[ConvBwdFilter]
_CONVOLUTIONS: dict[object, tuple[str, tuple[str, ...]]] = {
    ConvFwd: ("conv_fwd", ("x", "w", "bias")),
    ConvBwdData: ("conv_bwd_data", ("dy", "w")),
    ConvBwdFilter: ("conv_bwd_filter", ("x", "dy")),
}
"""For each convolution: its method, and the arguments of the method that are arrays."""
_OF_ARRAYS = frozenset({"array", "data", "dims", "dtype", "strides"})
"""The fields that an error about an uploaded array may name."""


async def compute(
    scope: Scope, what: Any, arrays: Mapping[str, Any], also: Sequence[str], deadline: Deadline
) -> Any:
    """Compute the results of a graph, an operation or a convolution. `scope` owns the buffers that are
    allocated."""
    if isinstance(what, Graph):
        buffers = await _ports(scope, what, arrays, deadline)
        given = await scope.apply(what, buffers, also=also, timeout=deadline.left_s)
        outputs = [given] if isinstance(given, BufferRef) else given
        found = dict(zip([port.name for port in what.outputs], outputs, strict=True))
        found |= {
            name: buffers[name] for name in updated_inputs(what) if not isinstance(arrays[name], BufferRef)
        }
    elif isinstance(what, type) and what in _CONVOLUTIONS:
        _refuse_also(also)
        method, operands = _CONVOLUTIONS[what]
        fields = await _upload(scope, what, arrays, operands, deadline)
        found = {"": await getattr(scope, method)(**fields, timeout=deadline.left_s)}
    elif isinstance(what, type) and what in OPERATIONS:
        operands = (*what.inputs, *what.outputs)
        fields = await _upload(scope, what, arrays, operands, deadline)
        given = await scope.apply(what(**fields), also=also, timeout=deadline.left_s)
        found = {"": given} if isinstance(given, BufferRef) else given._asdict()
    else:
        raise InvalidRequest(
            field="what",
            value=Words(what.__name__) if isinstance(what, type) else kind_of(what),
            problem="is neither a graph nor the class of an operation or a convolution",
            fix="pass the class and its fields apart: await gpu.compute(MaxPool, x=array, window=window)",
        )
    values = {name: await scope.download(ref, timeout=deadline.left_s) for name, ref in found.items()}
    if len(values) == 1:
        return next(iter(values.values()))
    return named_outputs("Outputs" if isinstance(what, Graph) else f"{what.__name__}Outputs", values)


def updated_inputs(graph: Graph) -> list[str]:
    """The inputs that a graph overwrites."""
    overwritten = {tensor.overwrites for tensor in graph.body.tensors}
    return [port.name for port in graph.inputs if port.uid in overwritten and port.uid is not None]


async def _ports(
    scope: Scope, graph: Graph, arrays: Mapping[str, Any], deadline: Deadline
) -> dict[str, BufferRef]:
    """Upload each array into a buffer with the dtype and layout of its port. References stay as they are."""
    specs = {port.name: port.spec for port in (*graph.inputs, *graph.outputs)}

    async def buffer(name: str, array: Any) -> BufferRef:
        if isinstance(array, BufferRef):
            return array
        with _about(name):
            message = Allocate(spec=specs[name], data=scope._service.values(array))
            return await scope.ask(message, timeout=deadline.left_s)

    given: Mapping[str, Any] = bound_names(graph, arrays, {})
    return {name: await buffer(name, array) for name, array in given.items()}


async def _upload(
    scope: Scope, kind: type, fields: Mapping[str, Any], operands: Sequence[str], deadline: Deadline
) -> dict[str, Any]:
    """Upload the arrays among a message's operands. Returns its fields with references in place of these
    arrays."""

    async def buffer(name: str, array: Any) -> BufferRef:
        if isinstance(array, BufferRef):
            return array
        with _about(name):
            return await scope.upload(array, timeout=deadline.left_s)

    made: dict[str, Any] = {}
    for name, value in fields.items():
        if name not in operands or value is None:
            made[name] = value
        elif name in _tuples(kind):
            made[name] = tuple([await buffer(name, each) for each in value])
        else:
            made[name] = await buffer(name, value)
    return made


@functools.cache
def _tuples(kind: type) -> frozenset[str]:
    """The names of a message's fields that are tuples of operands or of numbers."""
    fields = msgspec.structs.fields(kind)
    return frozenset(each.name for each in fields if get_origin(each.type) is tuple)


@contextlib.contextmanager
def _about(name: str) -> Iterator[None]:
    """Let errors about an array name the argument `name`."""
    try:
        yield
    except InvalidRequest as error:
        raise (error.about(name) if error.field in _OF_ARRAYS else error) from None


def _refuse_also(also: Sequence[str]) -> None:
    if also:
        raise InvalidRequest(
            field="also",
            value=also,
            problem="is for operations: a convolution has one output",
            fix="leave it out",
        )
