"""ONNX Runtime's own operators of floats. Its optimiser replaces several of ONNX's operators by one of these.

https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from cudnn_actor.onnx.nodes import Node, Result
from cudnn_actor.onnx.operator_table import operator
from cudnn_actor.onnx.operators.convolution import conv
from cudnn_actor.onnx.operators.gelu import gelu_of
from cudnn_actor.onnx.operators.generators import trilu
from cudnn_actor.onnx.operators.matmul import gemm
from cudnn_actor.onnx.operators.norms import rms_norm
from cudnn_actor.onnx.runtime_schemas import MICROSOFT
from cudnn_actor.onnx.values import Declined
from cudnn_actor.protocol.graphs.graph_builder import GraphBuilder, Tensor
from cudnn_actor.protocol.operations.matmul import transpose_last
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["attend_with_packed_past", "microsoft"]

microsoft = functools.partial(operator, domain=MICROSOFT)
microsoft("Trilu")(trilu)


@microsoft("Gelu", "BiasGelu", "FastGelu")
def gelu(node: Node, g: GraphBuilder) -> Result:
    approximate = node.op == "FastGelu"
    if node.has(1):
        return g.gelu(_plus(node, g, node.tensor(0), 1), approximate=approximate)
    return gelu_of(g, node.value(0), approximate=approximate)


@microsoft("QuickGelu")
def quick_gelu(node: Node, g: GraphBuilder) -> Result:
    return g.swish(node.tensor(0), node.attribute("alpha"))


def _plus(node: Node, g: GraphBuilder, x: Tensor, number: int) -> Tensor:
    """x plus an input, if that is there."""
    return g.add(x, node.tensor(number)) if node.has(number) else x


@microsoft("BiasAdd")
def bias_add(node: Node, g: GraphBuilder) -> Result:
    return g.add(g.add(node.tensor(0), node.tensor(1)), node.tensor(2))


# Products and convolutions with later operations.


def _activate(node: Node, g: GraphBuilder, x: Tensor, parameters: tuple[float, ...]) -> Tensor:
    name, (a, b, *_) = node.attribute("activation"), (*parameters, 0.0, 0.0)
    if name == "Clip":
        return g.clip(x, a, b)
    if name == "HardSigmoid":
        return g.clip(x * a + b, 0.0, 1.0)
    if name == "LeakyRelu":
        return g.leaky_relu(x, a)
    known = {"": lambda y: y, "Relu": g.relu, "Sigmoid": g.sigmoid, "Tanh": g.tanh}
    if name not in known:
        raise Declined(f"the activation {name}")
    return known[name](x)  # type: ignore[no-any-return]


@microsoft("FusedConv")
def fused_conv(node: Node, g: GraphBuilder) -> Result:
    y = _plus(node, g, conv(node, g), 3)
    return _activate(node, g, y, node.attribute("activation_params") or ())


@microsoft("FusedGemm")
def fused_gemm(node: Node, g: GraphBuilder) -> Result:
    parameters = (node.attribute("activation_alpha"), node.attribute("activation_beta"))
    return _activate(node, g, gemm(node, g), parameters)


@microsoft("FusedMatMul", "TransposeMatMul")
def fused_mat_mul(node: Node, g: GraphBuilder) -> Result:
    a, b = (_operand_of_product(node, g, number, side) for number, side in enumerate("AB"))
    return g.matmul(a, b) * node.attribute("alpha")


def _operand_of_product(node: Node, g: GraphBuilder, number: int, side: str) -> Tensor:
    """An operand, whose first dim may be one of its matrices', and whose matrices may be turned."""
    x = node.tensor(number)
    if node.attribute(f"transBatch{side}") and x.rank > 2:
        x = g.transpose(x, (*range(1, x.rank - 1), 0, x.rank - 1))
    return transpose_last(g, x) if node.attribute(f"trans{side}") and x.rank > 1 else x


@microsoft("MatMulNBits")
def mat_mul_n_bits(node: Node, g: GraphBuilder) -> Result:
    """A product by weights of 2, 4 or 8 bits, which are packed into bytes, the lowest bits first. Each block
    of a row has a scale."""
    a, packed, scales = node.tensor(0), node.tensor(1), node.tensor(2)
    bits, size, k, n = (node.attribute(name) for name in ("bits", "block_size", "K", "N"))
    if bits not in (2, 4, 8) or node.has(4) or node.attribute("weight_prepacked"):
        raise Declined(f"filters of {bits} bits" if bits not in (2, 4, 8) else "filters in another order")
    blocks = -(-k // size)
    codes = _unpack_bits(g, packed, bits, (n, blocks, size), scales.dtype)
    zero: Any = float(1 << (bits - 1))
    if node.has(3):
        points = node.tensor(3)
        wide = (
            points if points.dtype.is_floating else _unpack_bits(g, points, bits, (n, blocks), scales.dtype)
        )
        zero = g.reshape(wide, (n, blocks, 1))
    w = g.multiply(g.subtract(codes, zero), g.reshape(scales, (n, blocks, 1)))
    rows = g.reshape(w, (n, blocks * size))
    y = g.matmul(a, transpose_last(g, rows[:, :k] if blocks * size > k else rows))
    return _plus(node, g, y, 5)


def _unpack_bits(g: GraphBuilder, x: Tensor, bits: int, dims: tuple[int, ...], dtype: DType) -> Tensor:
    """Unpack numbers of `bits` bits from bytes, as floats. Each row begins in a new byte."""
    rows = g.reshape(x, (dims[0], -1))
    parts = [g.bitwise_and(g.right_shift(rows, place), (1 << bits) - 1) for place in range(0, 8, bits)]
    each = g.astype(g.reshape(g.stack(parts, 2), (dims[0], -1)), dtype)
    count = int(np.prod(dims[1:], dtype=np.int64))
    return g.reshape(each[:, :count] if each.dims[1] > count else each, dims)


# Norms of sums.


@operator("SimplifiedLayerNormalization", since=1)
def simplified_norm(node: Node, g: GraphBuilder) -> Result:
    return rms_norm(node, g), *_no_statistics(node, 1)


@microsoft("SkipLayerNormalization")
def skip_norm(node: Node, g: GraphBuilder) -> Result:
    total = _plus(node, g, g.add(node.tensor(0), node.tensor(1)), 4)
    y = g.layer_norm(total, node.tensor(2), node.tensor_or_none(3), epsilon=node.attribute("epsilon"))
    return y, *_no_statistics(node, 2), total


@microsoft("SkipSimplifiedLayerNormalization")
def skip_simplified_norm(node: Node, g: GraphBuilder) -> Result:
    total = _plus(node, g, g.add(node.tensor(0), node.tensor(1)), 3)
    y = g.rms_norm(total, node.tensor(2), epsilon=node.attribute("epsilon"))
    return y, *_no_statistics(node, 2), total


def _no_statistics(node: Node, count: int) -> list[None]:
    if any(node.wants(number) for number in range(1, 1 + count)):
        raise Declined("gives the mean or the deviation of each row")
    return [None] * count


@microsoft("EmbedLayerNormalization")
def embed_norm(node: Node, g: GraphBuilder) -> Result:
    ids = node.tensor(0)
    batch, length = ids.dims
    total = g.take(node.tensor(2), ids, 0)
    if node.has(8):
        total = g.add(total, g.take(node.tensor(3), node.tensor(8), 0))
    else:
        total = g.add(total, node.tensor(3)[:length])
    if node.has(1) and node.has(4):
        total = g.add(total, g.take(node.tensor(4), node.tensor(1), 0))
    y = g.layer_norm(total, node.tensor(5), node.tensor(6), epsilon=node.attribute("epsilon"))
    node.reserve(batch, itemsize=4)
    mask: Any = np.zeros(batch, np.int32)
    if node.has(7):
        mask = g.astype(g.sum(node.tensor(7), 1), DType.INT32)
    return y, mask if node.wants(1) else None, total if node.wants(2) else None


# Attention.


@microsoft("Attention")
def attention(node: Node, g: GraphBuilder) -> Result:
    if node.has(6) or node.attribute("do_rotary") or node.attribute("past_present_share_buffer"):
        raise Declined("has a cache that it changes, or rotates positions")
    sizes = node.attribute("qkv_hidden_sizes")
    joined = _plus(node, g, g.matmul(node.tensor(0), node.tensor(1)), 2)
    sizes = sizes or (joined.dims[2] // 3,) * 3
    ends = np.cumsum(sizes)
    q, k, v = (joined[..., int(end - size) : int(end)] for end, size in zip(ends, sizes, strict=True))
    return attend_with_packed_past(node, g, (q, k, v), mask=3, past=4, added=5)


@microsoft("MultiHeadAttention")
def multi_head_attention(node: Node, g: GraphBuilder) -> Result:
    if not (node.has(1) and node.has(2)) or any(node.has(number) for number in (8, 9)) or node.wants(3):
        raise Declined("has its operands in one tensor, or a cache that it changes")
    q, k, v = (node.tensor(number) for number in range(3))
    if not q.rank == k.rank == v.rank == 3:
        raise Declined("has operands that are not of rank 3")
    if node.has(3):
        ends = np.cumsum([each.dims[2] for each in (q, k, v)])
        bias = node.tensor(3)
        q, k, v = (
            g.add(each, bias[int(end) - each.dims[2] : int(end)])
            for each, end in zip((q, k, v), ends, strict=True)
        )
    past = (node.tensor(6), node.tensor(7)) if node.has(6) else None
    y, keys, values = _attend(node, g, (q, k, v), past, mask=4, added=5)
    return y, keys if node.wants(1) else None, values if node.wants(2) else None


def attend_with_packed_past(
    node: Node, g: GraphBuilder, operands: tuple[Tensor, Tensor, Tensor], *, mask: int, past: int, added: int
) -> Result:
    """Attention of operands of dims (B, S, heads * size), with the earlier keys and values in one tensor."""
    before = (node.tensor(past)[0], node.tensor(past)[1]) if node.has(past) else None
    y, keys, values = _attend(node, g, operands, before, mask=mask, added=added)
    return y, g.stack([keys, values]) if node.wants(1) else None


def _attend(
    node: Node,
    g: GraphBuilder,
    operands: tuple[Tensor, Tensor, Tensor],
    past: tuple[Tensor, Tensor] | None,
    *,
    mask: int,
    added: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, and the keys and values of all positions."""
    heads = node.attribute("num_heads")
    q, k, v = (
        g.transpose(g.reshape(x, (*x.dims[:2], heads, x.dims[2] // heads)), (0, 2, 1, 3)) for x in operands
    )
    if past is not None:
        k, v = g.concatenate([past[0], k], 2), g.concatenate([past[1], v], 2)
    batch, length, total = q.dims[0], q.dims[2], k.dims[2]
    bias = _bias(node, g, node.tensor(mask), q.dtype, total) if node.has(mask) else None
    if node.has(added):
        more = node.tensor(added)
        bias = more if bias is None else g.add(bias, more)
    causal = bool(node.attribute("unidirectional"))
    if causal and past is not None:  # the last query sees all keys
        node.reserve(length, total, itemsize=4, passing=1)
        later = np.triu(np.ones((length, total), bool), total - length + 1)
        hidden = np.where(later, np.float32(np.finfo(np.float32).min / 2), np.float32(0))
        of = g.astype(node.weight(hidden[None, None]), q.dtype)
        bias, causal = of if bias is None else g.add(bias, of), False
    if bias is not None:
        bias = g.broadcast_to(bias, (bias.dims[0], bias.dims[1], length, total))
    scale = node.attribute("scale") or None
    y: Any = g.attention(q, k, v, bias=bias, scale=scale, causal=causal)
    y = g.reshape(g.transpose(y, (0, 2, 1, 3)), (batch, length, heads * v.dims[3]))
    return y, k, v


def _bias(node: Node, g: GraphBuilder, x: Tensor, dtype: DType, total: int) -> Tensor:
    """The numbers that a mask adds to scores. A mask of dims (B,) says how many keys count; one of (B, T) or
    (B, S, T), which ones."""
    if x.rank == 1 and x.dims[0] == node.dims(0)[0]:
        ends = g.reshape(g.astype(x, DType.INT64), (-1, 1))
        node.reserve(total)
        x = g.less(node.weight(np.arange(total, dtype=np.int64)), ends)
    elif x.rank in (2, 3):
        x = g.not_equal(x, 0)
    else:
        raise Declined(f"a mask of dims {x.dims}")
    x = g.reshape(x, (x.dims[0], 1, *x.dims[1:]) if x.rank == 3 else (x.dims[0], 1, 1, x.dims[1]))
    return g.astype(g.where(x, 0.0, node.attribute("mask_filter_value")), dtype)
