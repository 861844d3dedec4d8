"""Checks on the caller's side, before a message is sent."""

from __future__ import annotations

from collections.abc import Sequence

from cudnn_actor.broker.request_checks import check_device_array, check_warm, not_a_message
from cudnn_actor.broker.service_state import ServiceState
from cudnn_actor.protocol.buffers import BufferRef
from cudnn_actor.protocol.conv import ConvSpec
from cudnn_actor.protocol.errors import InvalidRequest, StaleBufferError
from cudnn_actor.protocol.messages import (
    COMPUTE,
    Allocate,
    Copy,
    Download,
    Drain,
    Fill,
    Free,
    GetStatistics,
    Message,
    Ping,
    Upload,
    View,
    Warm,
)
from cudnn_actor.protocol.operands import operand

__all__ = ["check_message", "require_operands"]

_REFERENCES: dict[type, tuple[str, ...]] = {
    Upload: ("dst",),
    Download: ("src",),
    Copy: ("src", "dst"),
    View: ("buffer",),
    Fill: ("dst",),
    Free: ("buffer",),
}
_OTHERS = frozenset({Ping, GetStatistics, Drain})


def check_message(state: ServiceState, message: Message) -> None:
    """Check shapes, and that no reference is stale already; the actor checks again.

    Raises `InvalidRequest`, `StaleBufferError`, `ActorStopped`. Never blocks: it takes under a millisecond
    for the first message of a shape, and some microseconds for later ones.
    """
    state.mailbox.check_open()
    kind = type(message)
    if kind in COMPUTE:
        cached, epoch = state.cached(message), state.memory.epoch  # type: ignore[arg-type]
        if cached.live_at != epoch:
            _resolve(state, message, cached.lowered.buffers)
            cached.live_at = epoch
    elif kind in _REFERENCES:
        _resolve(state, message, _REFERENCES[kind])
        if isinstance(message, Upload):
            check_device_array(message.data, message.dst.spec, state.memory.device)
    elif isinstance(message, Allocate):
        check_device_array(message.data, message.spec, state.memory.device)
    elif isinstance(message, Warm):
        check_warm(message)
    elif kind not in _OTHERS:
        raise not_a_message(message)


def _resolve(state: ServiceState, message: Message, fields: Sequence[str]) -> None:
    try:
        for name in fields:
            state.memory.resolve(operand(message, name), name)
    except StaleBufferError:
        # A service that ends closes its mailbox, then frees its buffers: report the end, not the freed
        # buffer.
        state.mailbox.check_open()
        raise


def require_operands(**fields: object) -> None:
    """Check the types of references and of a `ConvSpec` before dims are computed from them.

    The messages check everything else.
    """
    for name, value in fields.items():
        wanted: type = ConvSpec if name == "conv" else BufferRef
        if not isinstance(value, wanted):
            raise InvalidRequest(
                field=name,
                value=value,
                problem=f"is of type {type(value).__name__}, but must be a {wanted.__name__}",
                fix="upload arrays first: await gpu.upload(array)"
                if wanted is BufferRef
                else "pass one, as in ConvSpec.symmetric(2)",
            )
