"""Checks of single messages that need more than their shapes: types of fields, and who overlaps whom."""

from __future__ import annotations

from cudnn_actor.memory import Slot
from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.lowering import Lowered
from cudnn_actor.protocol.messages import COMPUTE, Copy, Warm

__all__ = ["check_copy", "check_fits_float", "check_no_overlap", "check_warm", "require_type"]


def require_type(field: str, value: object, kind: type) -> None:
    """Raise `InvalidRequest` unless a message's field is of its type; a bool is no number."""
    if not isinstance(value, kind) or isinstance(value, bool):
        raise InvalidRequest(
            field=field,
            value=value,
            problem=f"is {type(value).__name__} where a {kind.__name__} belongs",
            fix=f"pass a {kind.__name__}",
        )


def check_fits_float(value: float) -> None:
    """Raise `InvalidRequest` for a whole number past the largest float."""
    try:
        float(value)
    except OverflowError:
        raise InvalidRequest(
            field="value", value=value, problem="is past the largest float", fix="use a smaller number"
        ) from None


def check_no_overlap(lowered: Lowered, slots: list[Slot]) -> None:
    """Raise `InvalidRequest` where an input is the output's own buffer."""
    output = slots[-1]
    if slots.count(output) == lowered.output_uses:
        return
    inputs = zip(lowered.buffers, slots, strict=True)
    shared = next(name for name, slot in inputs if slot is output and name != lowered.output)
    raise InvalidRequest(
        field=lowered.output,
        value=f"buffer {output.index}",
        problem=f"is also {shared}, and no convolution can work in place",
        fix=f"give {lowered.output} a buffer of its own (accumulating with beta is allowed)",
    )


def check_copy(message: Copy, src: Slot, dst: Slot) -> None:
    """Raise `InvalidRequest` unless the buffers of a copy are two, of the same dims and dtype."""
    if src is dst:
        raise InvalidRequest(
            field="dst", value=str(message.dst), problem="is also src", fix="copy to another buffer"
        )
    if src.spec.dims != dst.spec.dims or src.spec.dtype is not dst.spec.dtype:
        raise InvalidRequest(
            field="dst",
            value=str(dst.spec),
            problem=f"has other dims or another dtype than src, {src.spec}",
            fix="allocate one with the dims and dtype of src; only the layout may differ",
        )


def check_warm(message: Warm) -> None:
    """Raise `InvalidRequest` unless all that a `Warm` holds are requests that run a plan."""
    given: object = message.messages
    wrong = [r for r in given if type(r) not in COMPUTE] if isinstance(given, tuple) else [given]
    if wrong:
        raise InvalidRequest(
            field="messages",
            value=type(wrong[0]).__name__,
            problem="has no plan that could be built",
            fix="give a sequence of ConvFwd, ConvBwdData or ConvBwdFilter",
        )
