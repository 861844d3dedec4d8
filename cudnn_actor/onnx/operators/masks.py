"""The meaning of attention's masks, as far as it is known when a model is imported.

Exporters write causal masks, and masks that hide nothing, as constants, and graphs that combine these with
masks from inputs. cuDNN's attention takes longer with a bias than without.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from cudnn_actor.models.rounding import largest
from cudnn_actor.onnx.nodes import Node
from cudnn_actor.onnx.operators.sources import MOST_STEPS, number_of
from cudnn_actor.onnx.values import Value
from cudnn_actor.protocol.graphs.graph_builder import GraphBuilder, Tensor
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["Mask", "bias_of", "read_fill", "read_mask"]


class Mask(NamedTuple):
    """A mask that hides keys from queries: whether it is causal, and `rest`, the part that the graph
    computes, or None.

    `hidden`: the number that is added to the score of a hidden key, if `rest` has truth values. `hides`:
    whether True hides a key.
    """

    rest: Value | None
    causal: bool = False
    hidden: float = -math.inf
    hides: bool = False


_HIDDEN = -1e30
"""A score to which this or less is added has no weight."""
_LEAST = 1e38
"""No number that is added to a score is below minus this, so that kernels can multiply it by log2(e)."""


def read_mask(mask: Value, rows: int, columns: int) -> Mask:
    """The meaning of a mask of attention, which has truth values or numbers that are added to scores."""
    seen, hidden = _choice(mask)
    return _mask_of_truth(seen, hidden, rows, columns) or Mask(mask)


def read_fill(fill: Node, rows: int, columns: int, dtype: DType) -> tuple[Value, Mask] | None:
    """If a value is a choice that hides scores: the scores, and the choice as a mask of a dtype; else
    None."""
    chosen, yes, no = (fill.value(number) for number in range(3))
    for scores, low, hides in ((yes, no, False), (no, yes, True)):
        hidden = number_of(low)
        if hidden is None or hidden > _HIDDEN:
            continue
        if math.isfinite(hidden) and largest(dtype) < -_HIDDEN:
            return None  # in a row that sees nothing, all keys weigh alike: a sum would keep their scores
        if not hides:
            mask = _mask_of_truth(chosen, hidden, rows, columns)
        elif (turned := chosen.made_by) is not None and turned.op == "Not":
            mask = _mask_of_truth(turned.value(0), hidden, rows, columns)
        else:
            says = _what_constant_says(chosen, rows, columns)
            known = {"none": Mask(None), "later": Mask(None, causal=True)}
            mask = known.get(says, Mask(chosen, hidden=hidden, hides=True))
        return None if mask is None else (scores, mask)
    return None


def _mask_of_truth(seen: Value, hidden: float, rows: int, columns: int) -> Mask | None:
    """The mask of truth values; None if there is not one for each key."""
    parts, causal, left = _parts(seen), False, list[Value]()
    for part in parts:
        match _what_constant_says(part, rows, columns):
            case "causal":
                causal = True
            case "all":
                pass
            case _:
                left.append(part)
    if not left:
        return Mask(None, causal)
    whole = len(left) > 1 or left[0].dims[-1:] != (columns,)
    if whole or (causal and math.isfinite(hidden)):
        left, causal = [seen], False  # a row that sees nothing weighs all keys alike, later ones too
    return Mask(left[0], causal, hidden) if left[0].dims[-1:] == (columns,) else None


def _choice(mask: Value) -> tuple[Value, float]:
    """The truth values from which a mask is made, and the number that is added to scores where they are
    false."""
    made = mask.made_by
    if mask.known_dtype is not DType.BOOL and made is not None and made.op == "Where":
        seen, hidden = number_of(made.value(1)), number_of(made.value(2))
        if seen == 0 and hidden is not None and hidden <= _HIDDEN:
            return made.value(0), hidden
    return mask, -math.inf


def _parts(mask: Value) -> list[Value]:
    """The masks of truth values whose conjunction it is."""
    parts, waiting = list[Value](), [mask]
    for _ in range(MOST_STEPS):
        if not waiting:
            break
        part = waiting.pop()
        made = part.made_by
        if part.fixed or made is None or made.op not in ("And", "Expand"):
            parts.append(part)
        else:
            waiting += [made.value(number) for number in range(1 + (made.op == "And"))]
    return parts + waiting


def _what_constant_says(part: Value, rows: int, columns: int) -> str:
    """The word for the keys that a constant shows: see `_what_is_seen`."""
    if not part.fixed or part.origin is not None:
        return ""
    if part.says is None:
        part.says = _what_is_seen(part)  # once: many layers may read it
    is_square = part.dims[-2:] == (rows, columns) and rows == columns
    return part.says if part.says in ("all", "none") or is_square else ""


def _what_is_seen(mask: Value) -> str:
    """The word for the keys that a constant shows: "all", "none", "causal", or "later" if it is true for
    later keys."""
    array = mask.elements
    if array.dtype != np.bool_:
        wide = array.astype(np.float32) if mask.is_half else array
        if mask.known_dtype is None or not ((wide == 0) | (wide <= _HIDDEN)).all():
            return ""
        array = array == 0
    if array.all():
        return "all"
    if not array.any():
        return "none"
    if array.ndim < 2 or array.shape[-2] != array.shape[-1]:
        return ""
    is_causal = array == np.tri(array.shape[-1], dtype=bool)
    return "causal" if is_causal.all() else "" if is_causal.any() else "later"


def bias_of(mask: Mask, g: GraphBuilder, dtype: DType) -> Tensor | None:
    """The tensor that a mask adds to scores of a dtype, the same for all nodes that read the mask; None for
    nothing."""
    of, hidden, hides = mask.rest, mask.hidden, mask.hides
    if of is None:
        return None
    key = dtype, hidden, hides
    if key not in of.biases:
        bias = of.tensor
        if bias.dtype is DType.BOOL:
            least = hidden if math.isinf(hidden) else max(hidden, -min(largest(dtype), _LEAST))
            bias = g.where(bias, least, 0.0) if hides else g.where(bias, 0.0, least)
            bias = g.astype(bias, dtype)
        if bias.dtype is not dtype:
            bias = g.astype(bias, dtype)
        of.biases[key] = g.reshape(bias, (*[1] * (4 - bias.rank), *bias.dims))
    return of.biases[key]
