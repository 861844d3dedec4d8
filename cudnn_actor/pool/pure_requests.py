"""Requests that any member may run: checks of their arguments, and their kinds, which take about as long as
each other."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping
from typing import Any

from cudnn_actor.pool.replicas import PoolBuffer, PoolModel
from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.graphs.named_graph import Graph
from cudnn_actor.protocol.operations import OPERATIONS
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.service.client import CudnnRef
from cudnn_actor.service.computing import updated_inputs

__all__ = [
    "kind_of_compute",
    "kind_of_run",
    "operand_fields",
    "overwritten_inputs",
    "parts_of",
    "references",
    "require_arrays",
    "with_copies",
]


def require_arrays(given: Mapping[str, Any], members: Mapping[str, CudnnRef | None]) -> None:
    """Raise `InvalidRequest` for a reference, since only one member has its buffer. The error names the
    member."""
    for field, ref in references(given):
        held_by = [name for name, gpu in members.items() if gpu and gpu._state.memory.is_live(ref)]
        owner = held_by[0] if held_by else "one service"
        raise InvalidRequest(
            field=field,
            value=ref,
            problem=f"is a buffer of {owner}, and any member may run this",
            fix="pass an array or what pool.upload gave, or send it there: pool.on(number)",
        )


def references(given: Mapping[str, Any]) -> Iterator[tuple[str, BufferRef]]:
    """The references among arguments, each with its field."""
    for field, value in given.items():
        for each in parts_of(value):
            if isinstance(each, BufferRef):
                yield field, each


def operand_fields(operation: Any) -> dict[str, Any]:
    """The given operands of an operation, by field. Any other object has none, and is refused later."""
    if type(operation) not in OPERATIONS:
        return {}
    values = {name: getattr(operation, name) for name in (*operation.inputs, *operation.outputs)}
    return {name: value for name, value in values.items() if value is not None}


def with_copies(what: Any, given: Mapping[str, Any], member: int | None) -> dict[str, Any]:
    """The arguments, with a member's own buffers in place of the pool's. With None as the member, they are
    only checked.

    Raises `InvalidRequest` if a buffer of the pool was freed, or would be overwritten.
    """
    overwritten = overwritten_inputs(what)
    for name, value in given.items():
        for each in parts_of(value):
            if isinstance(each, PoolBuffer):
                _check(name, each, overwritten)
    return {name: value if member is None else _own(value, member) for name, value in given.items()}


def _check(name: str, buffer: PoolBuffer, overwritten: Collection[str]) -> None:
    if name in overwritten:
        raise InvalidRequest(
            field=name,
            value=buffer,
            problem="would be overwritten on one member alone",
            fix="pass an array, which is copied",
        )
    if buffer.closed:
        raise InvalidRequest(field=name, value=buffer, problem="was freed", fix="upload it again")


def parts_of(value: Any) -> Iterator[Any]:
    """The parts of an argument that is a sequence; else the argument itself."""
    if isinstance(value, tuple | list):
        yield from value
    else:
        yield value


def _own(value: Any, member: int) -> Any:
    if isinstance(value, PoolBuffer):
        return value.of(member)
    if isinstance(value, tuple | list):
        return tuple(_own(each, member) for each in value)
    return value


def overwritten_inputs(what: Any) -> Collection[str]:
    """The names of the arguments to which a graph, or an operation of this class, writes."""
    if isinstance(what, Graph):
        return updated_inputs(what)
    return what.outputs if isinstance(what, type) and what in OPERATIONS else ()


def kind_of_compute(what: Any, given: Mapping[str, Any]) -> Hashable:
    """The kind of a request: its graph or class, and its dims. Requests of one kind take about as long as
    each other."""
    named = what.identity if isinstance(what, Graph) else getattr(what, "__name__", None)
    return named, _shapes(given)


def kind_of_run(model: PoolModel, given: Mapping[str, Any]) -> Hashable:
    """The kind of a run: its model, and its dims. Runs of one kind take about as long as each other."""
    return model.name, id(model), _shapes(given)


def _shapes(given: Mapping[str, Any]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    return tuple((name, tuple(getattr(value, "shape", ()))) for name, value in sorted(given.items()))
