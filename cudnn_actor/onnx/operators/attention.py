"""Attention: one operation where that computes what ONNX defines, else the function that defines it."""

from __future__ import annotations

from typing import Any

from cudnn_actor.onnx.nodes import Node, Result
from cudnn_actor.onnx.operator_table import operator
from cudnn_actor.onnx.operators.masks import Mask, bias_of, read_mask
from cudnn_actor.onnx.operators.spelled_attention import shared_heads
from cudnn_actor.onnx.values import Declined
from cudnn_actor.protocol.graphs.graph_builder import GraphBuilder, Tensor

__all__: list[str] = []


def _heads(g: GraphBuilder, x: Tensor, heads: int | None) -> Tensor:
    """x of dims (B, H, S, D)."""
    if x.rank == 4:
        return x
    if not heads or x.dims[-1] % heads:
        raise Declined(f"{heads} heads of dims {x.dims}")
    split = g.reshape(x, (*x.dims[:2], heads, x.dims[2] // heads))
    return g.transpose(split, (0, 2, 1, 3))


def _mask(node: Node, q: Tensor, k: Tensor) -> Mask:
    if not node.has(3):
        return Mask(None)
    mask = node.value(3)
    if mask.dims[-1] != k.dims[2]:
        raise Declined(f"a mask of dims {mask.dims} for {k.dims[2]} keys")
    return read_mask(mask, q.dims[2], k.dims[2])


@operator("Attention", since=23)
def attention(node: Node, g: GraphBuilder) -> Result:
    if node.attribute("softcap", 0.0) or node.wants(3) or node.has(6) or node.has(7):
        raise Declined("has a part that no operation here has")
    known = {"is_causal", "kv_num_heads", "q_num_heads", "scale", "softmax_precision", "softcap"}
    for name in node.schema.attributes:
        if name not in known and node.has_attribute(name) and node.attribute(name) not in (0, 0.0, -1):
            raise Declined(f"has {name}")
    x = node.tensor(0)
    q = _heads(g, x, node.attribute("q_num_heads"))
    k, v = (_heads(g, node.tensor(number), node.attribute("kv_num_heads")) for number in (1, 2))
    if not node.has(4) and not node.wants(1) and not node.wants(2):
        one, other = (shared_heads(node.value(number), g) for number in (1, 2))
        if one.dims[1] == other.dims[1]:
            k, v = (one, other) if x.rank == 4 else (k, v)
    causal = bool(node.attribute("is_causal", 0))
    if node.has(4):
        if causal:
            raise Declined("is causal, and has keys from before")
        k, v = g.concatenate([node.tensor(4), k], 2), g.concatenate([node.tensor(5), v], 2)
    mask = _mask(node, q, k)
    bias, causal = bias_of(mask, g, q.dtype), causal or mask.causal
    y: Any = g.attention(q, k, v, bias=bias, scale=node.attribute("scale"), causal=causal)
    if x.rank == 3:
        b, h, s, d = y.dims
        y = g.reshape(g.transpose(y, (0, 2, 1, 3)), (b, s, h * d))
    return y, k if node.wants(1) else None, v if node.wants(2) else None
