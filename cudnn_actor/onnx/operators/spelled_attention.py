"""Attention that a model spells out in a half type, softmax(scale * q @ k^T + bias) @ v, as one operation.

For versions of ONNX without an operator for attention, PyTorch's exporter scales queries and keys by the root
of the scale, transposes keys between two reshapes, gives rows without visible keys 0 instead of NaN, and
copies heads of keys and values for all heads of queries that share them. None of that is computed here.
"""

from __future__ import annotations

import math

from cudnn_actor.onnx.nodes import Node
from cudnn_actor.onnx.operators.masks import Mask, bias_of, read_fill, read_mask
from cudnn_actor.onnx.operators.sources import MOST_STEPS, made_by, number_of, softmax_of
from cudnn_actor.onnx.values import Value
from cudnn_actor.protocol.graphs.graph_builder import GraphBuilder, Tensor
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["shared_heads", "spelled_out_attention"]


def spelled_out_attention(node: Node, g: GraphBuilder) -> Tensor | None:
    """A product of weights and values, as attention; None if it is not the last step of that."""
    weights, v = node.value(0), node.value(1)
    softmax, dtype = softmax_of(weights), v.known_dtype
    if (
        softmax is None
        or dtype is None
        or not dtype.is_half
        or not weights.rank == v.rank == 4
        or softmax.axis() != 3
    ):
        return None
    masked = _without_mask(softmax.value(0), dtype)
    if masked is None:
        return None
    scores, mask = masked
    scores, scale = _scale_and_value(scores)
    of_keys = made_by(scores, "MatMul")
    if of_keys is None:
        return None
    (q, of_q), (k, of_k) = (_scale_and_value(of_keys.value(number)) for number in (0, 1))
    scale *= of_q * of_k
    if not (
        q.rank == k.rank == 4
        and q.known_dtype is k.known_dtype is dtype
        and q.dims[:2] == k.dims[:2] == v.dims[:2]
        and math.isfinite(scale)
    ):
        return None
    keys, values = _keys_and_values(k, v, g)
    rest = bias_of(mask, g, q.tensor.dtype)
    return g.attention(q.tensor, keys, values, bias=rest, scale=scale, causal=mask.causal)


def _without_mask(masked: Value, dtype: DType) -> tuple[Value, Mask] | None:
    """The scores to which a mask of that dtype is added, or of which a choice hides some; and the mask.

    None if the other operand is no mask of these scores.
    """
    dims = masked.dims
    if (added := made_by(masked, "Add")) is not None:
        sides = [added.value(0), added.value(1)]
        place = 0 if any(made_by(sides[0], op) is not None for op in ("MatMul", "Mul", "Div")) else 1
        scores, bias = sides[place], sides[1 - place]
        is_mask = scores.dims == dims and bias.dims[-1:] == dims[3:] and bias.known_dtype is dtype
        return (scores, read_mask(bias, *dims[2:])) if is_mask else None
    if (filled := made_by(masked, "Where")) is not None:
        found = read_fill(filled, dims[2], dims[3], dtype)
        is_mask = filled.value(0).dims[-1:] == dims[3:]
        return found if is_mask and found is not None and found[0].dims == dims else None
    return masked, Mask(None)


def shared_heads(value: Value, g: GraphBuilder) -> Tensor:
    """Keys or values, without the copies that a model makes of heads that several heads of queries share."""
    made = value.made_by
    if made is None or made.op != "Reshape" or value.rank != 4:
        return value.tensor
    copies = made.value(0)
    expand = copies.made_by
    if expand is None or expand.op != "Expand":
        return value.tensor
    once, (batch, heads, *rest) = expand.value(0), value.dims
    groups = once.dims[1] if once.rank == 5 else 1
    if once.dims != (batch, groups, 1, *rest) or copies.dims != (batch, groups, heads // groups, *rest):
        return value.tensor
    return g.reshape(once.tensor, (batch, groups, *rest))


def _scale_and_value(value: Value) -> tuple[Value, float]:
    """The value of which a value is a multiple, and the factor."""
    scale = 1.0
    for _ in range(MOST_STEPS):
        if (scaled := _constant_factor_and_value(value)) is None:
            break
        value, scale = scaled[0], scale * scaled[1]
    return value, scale


def _constant_factor_and_value(value: Value) -> tuple[Value, float] | None:
    """The value of which a value is a multiple by a constant, and the constant; None if it is no such
    multiple."""
    for op, place in (("Mul", 1), ("Mul", 0), ("Div", 1)):
        made = made_by(value, op)
        factor = None if made is None else number_of(made.value(place))
        if made is not None and factor is not None and (factor or op == "Mul"):
            return made.value(1 - place), factor if op == "Mul" else 1 / factor
    return None


def _keys_and_values(k: Value, v: Value, g: GraphBuilder) -> tuple[Tensor, Tensor]:
    """Keys (B, H, S, D) of their transpose, and values, of as few heads as there are."""
    of = _transposed_value(k)
    if of is not None and of.known_dtype is k.known_dtype:
        keys, values = shared_heads(of, g), shared_heads(v, g)
        if keys.dims[1] == values.dims[1]:
            return keys, values
        return of.tensor, v.tensor
    return g.transpose(k.tensor, (0, 1, 3, 2)), v.tensor


def _transposed_value(k: Value) -> Value | None:
    """The value whose transpose, in its last two dims, a value is; perhaps with the dims before them as one.
    None if there is none."""
    made = k.made_by
    if made is None:
        return None
    if made.op == "Transpose":
        return made.value(0) if tuple(made.attribute("perm", ())) == (0, 1, 3, 2) else None
    turn = made.value(0).made_by if made.op == "Reshape" else None
    if turn is None or turn.op != "Transpose" or tuple(turn.attribute("perm", ())) != (0, 2, 1):
        return None
    before = turn.value(0).made_by
    if before is None or before.op != "Reshape":
        return None
    of = before.value(0)
    *batch, columns, rows = k.dims
    is_same = of.dims == (*batch, rows, columns) and turn.dims(0) == (math.prod(batch), rows, columns)
    return of if is_same else None
