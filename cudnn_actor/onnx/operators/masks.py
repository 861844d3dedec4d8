"""What the masks of attention say, as far as it is known when a model is imported.

Exporters write masks that hide nothing, and causal ones, as constants, and have a graph combine them with
those of the inputs. cuDNN's attention takes longer with a bias than without.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from cudnn_actor.onnx.operators.sources import MOST_STEPS
from cudnn_actor.onnx.values import Value
from cudnn_actor.protocol.graphs.graph_builder import GraphBuilder, Tensor
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["Mask", "bias_of", "read_mask"]


class Mask(NamedTuple):
    """What hides keys from queries: what the graph computes, if that is anything, and what comes later."""

    rest: Value | None
    causal: bool = False


def read_mask(mask: Value, rows: int, columns: int) -> Mask:
    """What a mask of attention says, of truth values or of what is added to scores."""
    parts, causal, left = _parts(mask), False, list[Value]()
    for part in parts:
        match _known(part, rows, columns):
            case "causal":
                causal = True
            case "all":
                pass
            case _:
                left.append(part)
    if not left:
        return Mask(None, causal)
    if len(left) == len(parts) or len(left) > 1 or left[0].dims[-1:] != (columns,):
        return Mask(mask)
    return Mask(left[0], causal)


def _parts(mask: Value) -> list[Value]:
    """The masks of truth values whose conjunction it is."""
    parts = [mask]
    for _ in range(MOST_STEPS):
        made = parts[-1].made_by
        if made is None or made.op != "And":
            break
        constants = sorted((made.value(0), made.value(1)), key=lambda value: not value.fixed)
        parts[-1:] = constants
    return parts


def _known(part: Value, rows: int, columns: int) -> str:
    """What a constant says: "all" is seen, or it is "causal"; nothing of others."""
    if not part.fixed or part.origin is not None:
        return ""
    array = part.elements
    if array.dtype != np.bool_ and part.known is None:
        return ""
    seen, hidden = (True, False) if array.dtype == np.bool_ else (0, -math.inf)
    if (array == seen).all():
        return "all"
    if part.dims[-2:] != (rows, columns) or rows != columns:
        return ""
    return "causal" if (array == np.where(np.tri(rows, dtype=bool), seen, hidden)).all() else ""


def bias_of(mask: Value, g: GraphBuilder, dtype: DType) -> Tensor:
    """A mask as what is added to scores of a dtype: one for all nodes that read it."""
    if dtype not in mask.biases:
        bias = mask.tensor
        if bias.dtype is DType.BOOL:
            bias = g.astype(g.where(bias, 0.0, -math.inf), dtype)
        if bias.dtype is not dtype:
            bias = g.astype(bias, dtype)
        mask.biases[dtype] = g.reshape(bias, (*[1] * (4 - bias.rank), *bias.dims))
    return mask.biases[dtype]
