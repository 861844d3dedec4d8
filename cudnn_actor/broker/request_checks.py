"""Checks of messages that need the service's state: its buffers, and the limits of its graphs.

A message is checked twice by the same functions: by its sender, who gets the error at once, and when it
starts, because a buffer may have been freed since. What the sender computed is kept in the envelope
(`Envelope.found`) and in the cache entry of the message, so the second check costs a comparison of epochs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from cudnn_actor.actors import Envelope
from cudnn_actor.broker.deployments import ModelRun
from cudnn_actor.broker.message_cache import Bound, CachedMessage
from cudnn_actor.broker.service_state import Export, Import, ServiceState
from cudnn_actor.memory import Buffers, Slot
from cudnn_actor.protocol.errors import InvalidRequest, StaleBufferError, Words
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.messages.lowering import Lowered
from cudnn_actor.protocol.messages.message_checks import (
    check_fill,
    check_values,
    check_warm,
    not_a_message,
)
from cudnn_actor.protocol.messages.messages import (
    COMPUTE,
    Allocate,
    ClearPlans,
    Compute,
    Copy,
    DeployModel,
    Download,
    Drain,
    Explain,
    Fill,
    Free,
    GetStatistics,
    LendStaging,
    Message,
    Ping,
    RunModel,
    UnloadModel,
    Upload,
    View,
    Warm,
    WarmModel,
    WriteWeights,
)
from cudnn_actor.protocol.messages.model_messages import ModelRef
from cudnn_actor.protocol.messages.operands import operand, operands_named
from cudnn_actor.protocol.types.checks import require_flag, require_type
from cudnn_actor.protocol.types.tensor import TensorSpec
from cudnn_actor.protocol.types.tune import require_tune

__all__ = [
    "bind_message",
    "check_allocate",
    "check_explain",
    "check_message",
    "check_unload",
    "require_asker",
    "slots_of",
]


def check_message(
    state: ServiceState, message: Message, instead: Mapping[type, str]
) -> CachedMessage | ModelRun | None:
    """Check a message before it is sent: its fields and shapes, that no reference is stale already, and that
    no output is another operand's buffer. `instead` says what to do with objects that are no messages.

    Returns the record of a message that runs a plan or a model, for `Envelope.found`; None for any other
    message.

    Raises `InvalidRequest`, `StaleBufferError`, `NotDeployed`, `ActorStopped`. Never blocks: it takes under a
    millisecond for the first message of a shape, and some microseconds for later ones.
    """
    state.mailbox.check_open()
    kind = type(message)
    try:
        if kind is RunModel:
            run = state.models.run_of(message)  # type: ignore[arg-type]
            state.models.slots(run)
            return run
        if kind in COMPUTE:
            cached = state.messages.of(message)  # type: ignore[arg-type]
            bind_message(cached, state.memory)
            return cached
        if kind not in _CHECKS:
            raise not_a_message(message, instead.get(kind))
        if (check := _CHECKS[kind]) is not None:
            check(state, message)
    except StaleBufferError:
        # A service that ends closes its mailbox, then frees its buffers: report the end, not the freed
        # buffer.
        state.mailbox.check_open()
        raise
    return None


def bind_message(cached: CachedMessage, memory: Buffers) -> Bound:
    """A message's slots and scalars: the cached ones, unless a buffer has ended since they were found.

    Raises `StaleBufferError`, and `InvalidRequest` if an output is another operand's buffer.
    """
    known = cached.bound
    if known is not None and known.epoch == memory.epoch:
        return known
    epoch, message, lowered = memory.epoch, cached.message, cached.lowered
    slots = list(map(memory.resolve, operands_named(message, lowered.buffers), lowered.buffers))
    _check_no_overlap(message, lowered, slots)
    cached.bound = known = Bound(epoch, slots, [float(getattr(message, name)) for name in lowered.scalars])
    return known


def slots_of(memory: Buffers, message: Any) -> tuple[Slot, ...]:
    """Check a message about buffers, and return the slots that it works on.

    Only the references' specs are read, never the slots'. `resolve` has found them to be the same. But a
    sender holds no slot, so another thread's `Free` and `Allocate` may meanwhile give it to another buffer.

    Raises `StaleBufferError`, `InvalidRequest`.
    """
    names = _REFERENCES[type(message)]
    slots = tuple(memory.resolve(getattr(message, name), name) for name in names)
    match message:
        case Upload():
            check_values(message.data, message.dst.spec, memory.device)
        case Copy():
            _check_copy(message, *slots)
        case Fill():
            check_fill(message.value, message.dst.spec)
    return slots


_REFERENCES: dict[type, tuple[str, ...]] = {
    Upload: ("dst",),
    Download: ("src",),
    Copy: ("src", "dst"),
    View: ("buffer",),
    Fill: ("dst",),
    Free: ("buffer",),
    Export: ("buffer",),
}
"""The fields of the messages about buffers that refer to buffers."""


def check_allocate(memory: Buffers, message: Allocate) -> None:
    """Raise `InvalidRequest` unless `spec` describes a buffer, and the buffer can hold the data, if any."""
    require_type("spec", message.spec, TensorSpec)
    if message.data is not None:
        check_values(message.data, message.spec, memory.device)


def check_explain(message: Explain) -> None:
    """Raise `InvalidRequest` unless the message is about an operation graph, and places of its buffers."""
    require_type("graph", message.graph, OperationGraph)
    require_flag("measure", message.measure)
    require_flag("candidates", message.candidates)
    buffers = len(message.graph.bound)
    require_type("weights", message.weights, tuple)
    for place in message.weights:
        require_type("weights", place, int)
    if not set(message.weights) <= {*range(buffers)}:
        raise InvalidRequest(
            field="weights",
            value=message.weights,
            problem="has others than the places of the graph's buffers",
            fix=f"pass indices in graph.bound, below {buffers}",
        )


def _check_warm(state: ServiceState, message: Warm) -> None:
    check_warm(message)
    for graph in message.graphs:
        state.check_graph(graph)


def _check_warm_model(state: ServiceState, message: WarmModel) -> None:
    require_type("model", message.model, ModelRef, "pass `model.ref`")
    require_tune("tune", message.tune)
    state.models.require(message.model)
    state.models.check(message.graphs)


def check_unload(message: UnloadModel) -> None:
    """Raise `InvalidRequest` unless the message names a model, and graphs by text."""
    require_type("model", message.model, ModelRef, "pass `model.ref`")
    if message.graphs is not None:
        require_type("graphs", message.graphs, tuple)
        for name in message.graphs:
            require_type("graphs", name, str)


def _check_upload(state: ServiceState, message: Upload) -> None:
    """What `slots_of` checks, in fewer steps."""
    memory, data = state.memory, message.data
    memory.resolve(message.dst, "dst")
    if type(data) is not np.ndarray:
        check_values(data, message.dst.spec, memory.device)


_CHECKS: dict[type, Callable[[ServiceState, Any], object] | None] = {
    **dict.fromkeys(_REFERENCES, lambda state, message: slots_of(state.memory, message)),
    Upload: _check_upload,
    **dict.fromkeys((ClearPlans, Ping, GetStatistics, Drain)),  # they have no fields
    Allocate: lambda state, message: check_allocate(state.memory, message),
    LendStaging: lambda _, message: require_type("spec", message.spec, TensorSpec),
    Import: lambda _, message: require_type("spec", message.spec, TensorSpec),
    Warm: _check_warm,
    Explain: lambda _, message: check_explain(message),
    DeployModel: lambda state, message: state.models.check(message.graphs),
    WarmModel: _check_warm_model,
    UnloadModel: lambda _, message: check_unload(message),
    WriteWeights: lambda state, message: state.models.written_by(message),
}
"""The checks of messages that run no plan, by their class; None for no check."""


def require_asker(envelope: Envelope, what: str) -> None:
    """Raise `InvalidRequest` for a message that was sent by tell but only makes sense with a reply."""
    if not envelope.wants_reply:
        raise InvalidRequest(
            field="message",
            value=Words(type(envelope.message).__name__),
            problem=f"is sent by tell, so nobody would receive the {what}",
            fix="ask it",
        )


def _check_no_overlap(message: Compute, lowered: Lowered, slots: list[Slot]) -> None:
    """Raise `InvalidRequest` if an output is the same buffer as another operand."""
    if len(set(map(id, slots))) == len(slots):
        return
    slot_of = dict(zip(lowered.buffers, slots, strict=True))
    names: dict[int, list[str]] = {}
    for name, slot in slot_of.items():
        names.setdefault(id(slot), []).append(name)
    for output in lowered.outputs:
        for shared in names[id(slot_of[output])]:
            if shared != output:
                raise InvalidRequest(
                    field=output,
                    value=Words(operand(message, output)),
                    problem=f"is also {shared}, and the operation cannot work in place",
                    fix=f"give {output} a buffer of its own",
                )


def _check_copy(message: Copy, src: Slot, dst: Slot) -> None:
    """Raise `InvalidRequest` unless a copy names two different buffers of the same dims and dtype."""
    if src is dst:
        raise InvalidRequest(
            field="dst", value=Words(message.dst), problem="is also src", fix="copy to another buffer"
        )
    given, wanted = message.dst.spec, message.src.spec
    if given.dims != wanted.dims or given.dtype is not wanted.dtype:
        raise InvalidRequest(
            field="dst",
            value=Words(given),
            problem=f"has other dims or another dtype than src, {wanted}",
            fix="allocate one with the dims and dtype of src; only the layout may differ",
        )
