"""What the masks of attention say, as far as it is known when a model is imported.

Exporters write masks that hide nothing, and causal ones, as constants, and have a graph combine them with
those of the inputs. cuDNN's attention takes longer with a bias than without.
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
    """What hides keys from queries: `rest`, which the graph computes, if anything, and whether it is causal.

    `hidden`: what is added to scores where `rest` has truth values that hide a key. `hides`: whether these
    are the true ones.
    """

    rest: Value | None
    causal: bool = False
    hidden: float = -math.inf
    hides: bool = False


_HIDDEN = -1e30
"""Scores to which this is added, or less, have no weight beside others."""
_LEAST = 1e38
"""What is added to scores is not below minus this, so that kernels can multiply it by log2(e)."""


def read_mask(mask: Value, rows: int, columns: int) -> Mask:
    """What a mask of attention says, of truth values or of what is added to scores."""
    seen, hidden = _choice(mask)
    return _mask_of_truth(seen, hidden, rows, columns) or Mask(mask)


def read_fill(fill: Node, rows: int, columns: int, dtype: DType) -> tuple[Value, Mask] | None:
    """The scores of which a choice hides some, and what it says as a mask of a dtype; None if it is none."""
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
    """What truth values say; None if they are not there for each key."""
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
    """The truth values that a mask is made of, and what is added to scores where they are false."""
    made = mask.made_by
    if mask.known is not DType.BOOL and made is not None and made.op == "Where":
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
    """What a constant says of each key: see `_what_is_seen`."""
    if not part.fixed or part.origin is not None:
        return ""
    if part.says is None:
        part.says = _what_is_seen(part)  # once: many layers may read it
    is_square = part.dims[-2:] == (rows, columns) and rows == columns
    return part.says if part.says in ("all", "none") or is_square else ""


def _what_is_seen(mask: Value) -> str:
    """What a constant says: "all" or "none" is seen, or it is "causal", or true of "later" keys."""
    array = mask.elements
    if array.dtype != np.bool_:
        wide = array.astype(np.float32) if mask.is_half else array
        if mask.known is None or not ((wide == 0) | (wide <= _HIDDEN)).all():
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
    """What a mask adds to scores of a dtype, one for all nodes that read it; None if that is nothing."""
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
