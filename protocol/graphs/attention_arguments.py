"""The arguments of the functions for attention: the operation that they describe, and its window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.graphs.expressions import Tensor
from cudnn_actor.protocol.operations import Attention
from cudnn_actor.protocol.operations.attention import alibi_slopes
from cudnn_actor.protocol.types.spatial import are_several

__all__ = ["attention_operation", "window_of", "window_without_shift"]


def attention_operation(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    window: object,
    alibi: Any = False,
    **others: Any,
) -> Attention[Any]:
    """Attention with a window and slopes as functions of the builder take them."""
    left, right = _pair(window)
    return Attention(q=q, k=k, v=v, window_left=left, window_right=right, slopes=_slopes(alibi, q), **others)


def window_of(attention: Attention[Any]) -> tuple[int | None, int | None]:
    """How many keys before and behind its own a position sees; None for all."""
    return attention.window_left, 0 if attention.causal else attention.window_right


def window_without_shift(
    attention: Attention[Any], shift: int | Tensor, front: int
) -> tuple[int | None, int | None] | None:
    """The window of an operation without `shift`, with `front` keys before the others, that shows the same.

    None if no window does.
    """
    if isinstance(shift, Tensor):
        return None
    (left, right), moved = window_of(attention), shift + front
    if left is not None and (front or left < moved):
        return None
    if (right is not None and right + shift < 0) or (moved and attention.slopes is not None):
        return None
    return None if left is None else left - moved, None if right is None else right + moved


def _pair(window: object) -> tuple[Any, Any]:
    """The two bounds of a window, None twice if there is none. Raises `InvalidRequest` for anything else."""
    if window is None:
        return None, None
    if not isinstance(window, Sequence) or len(window) != 2:
        raise InvalidRequest(
            field="window",
            value=window,
            problem="is not a pair",
            fix="give how many positions before and after its own each sees, as in (4, 0), or None for all",
        )
    return window[0], window[1]


def _slopes(alibi: Any, q: Tensor) -> tuple[float, ...] | None:
    """The slope of each head of q, or None."""
    if isinstance(alibi, bool):
        return alibi_slopes(q.dims[1]) if alibi and q.rank > 1 else None
    if alibi is None:
        return None
    return tuple(alibi) if are_several(alibi) else (alibi,)
