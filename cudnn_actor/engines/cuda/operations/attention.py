"""Attention on CUDA: cuDNN's fused attention, and the operands and options that it is given.

cuDNN's attention takes half types, and heads of a multiple of 8 features. Its own
dropout draws other numbers than our definition, so a kernel of ours writes a tensor
of 0 and 1 for the weights first. `flash_attention` runs everything else.
https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/Attention.html
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cudnn_actor.engines.cuda.cudnn.frontend_graph import FrontendGraph, Refused, data_type
from cudnn_actor.engines.cuda.kernels.expressions import Constant, Expression, Leaf, Value
from cudnn_actor.engines.cuda.operations.flash_attention import attention_launches, attention_workspace
from cudnn_actor.engines.cuda.operations.implementation import Computed, implement, kernels
from cudnn_actor.protocol.operations import (
    Attention,
    AttentionBackward,
    GraphTensor,
    PointwiseMode,
    RandomBernoulli,
)
from cudnn_actor.protocol.operations.attention import alibi_slopes
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["FEW_KEYS", "attention_masks", "attention_operands", "lower_attention"]

AnyAttention = Attention[int] | AttentionBackward[int]

_LENGTHS = ("lengths_q", "lengths_kv")
FEW_KEYS = 32
"""The most keys for which a kernel of ours comes first: it does not round the weights."""
_TILE = 128
"""cuDNN's backward pass can give NaN if the number of keys is no multiple of this, unless it gets lengths."""


def lower_attention(graph: FrontendGraph, operation: AnyAttention) -> None:
    """Add attention to a graph of cuDNN's frontend. Raises `Refused`."""
    q, k = graph.spec(operation.q), graph.spec(operation.k)
    if isinstance(operation, Attention) and k.dims[2] <= FEW_KEYS:
        raise Refused("cuDNN's attention rounds weights to a half type, which gains nothing for so few keys")
    common = {name: graph.tensor(uid) for name, uid in operation.named(("q", "k", "v", "bias"))}
    common |= {"attn_scale": operation.effective_scale(q.dims[3]), **attention_masks(operation, q, k)}
    lengths = dict(operation.named(_LENGTHS))
    if len(lengths) == 1:
        raise Refused("cuDNN takes lengths of queries and keys only together")
    if lengths:
        of_batch, ones = [q.dims[0], 1, 1, 1], [1, 1, 1, 1]
        q_lengths, kv_lengths = (graph.tensor(uid, of_batch, ones) for uid in lengths.values())
        common |= {"use_padding_mask": True, "seq_len_q": q_lengths, "seq_len_kv": kv_lengths}
    if operation.state is not None:
        if not isinstance(operation, Attention):
            raise Refused("cuDNN's gradient of attention with a mask for dropout is wrong (9.19)")
        common["dropout"] = graph.tensor(operation.state), graph.number(1 / (1 - operation.dropout))
    if isinstance(operation, Attention):
        found = graph.pygraph.sdpa(generate_stats=operation.statistics is not None, **common)
    else:
        if operation.dbias is not None:
            spec = graph.spec(operation.dbias)
            common["dBias"] = graph.pygraph.tensor(
                dim=list(spec.dims), stride=list(spec.strides), data_type=data_type(spec.dtype)
            )
        read = {"o": operation.y, "dO": operation.dy, "stats": operation.statistics}
        gradients = graph.pygraph.sdpa_backward(
            **{name: graph.tensor(uid) for name, uid in read.items()},
            use_deterministic_algorithm=graph.numerics.deterministic,
            **common,
        )
        found = (*gradients, common.get("dBias"))
    graph.write_all(operation, found)


def attention_masks(operation: AnyAttention, q: GraphTensor, k: GraphTensor) -> dict[str, Any]:
    """cuDNN's options for the keys that each position sees, and for ALiBi. Raises `Refused`."""
    (_, heads, rows, _), columns = q.dims, k.dims[2]
    left, right = operation.bounds(rows, columns)
    if operation.causal and rows == 1:
        raise Refused("cuDNN's causal mask is wrong for a single query")
    masks: dict[str, Any] = {"use_causal_mask": operation.causal}
    if left is not None:
        masks["diagonal_band_left_bound"] = left + 1  # it counts the position itself
    if right is not None and not operation.causal:
        masks["diagonal_band_right_bound"] = right
    if operation.slopes is not None:
        if operation.slopes != alibi_slopes(heads):
            raise Refused("cuDNN takes no other slopes than the paper's")
        if right != 0:
            raise Refused("cuDNN's ALiBi is causal")
        masks["use_alibi_mask"] = True
    return masks


def attention_operands(operation: AnyAttention, tensors: Mapping[str, GraphTensor]) -> dict[str, Computed]:
    """The operands that cuDNN must get instead of the given ones, by name. Raises `Refused`.

    cuDNN must get both lengths or none, none beyond the tensors, and at least one key: without keys it
    computes NaN, even where there are no queries, and if their number is too large, it takes the memory
    behind the keys for keys. Where there are no keys, the number of queries becomes 0 instead.

    In the place of dropout's state, cuDNN gets a tensor that says which weights are kept.
    """
    q, k = tensors["q"], tensors["k"]
    left, _ = operation.bounds(q.dims[2], k.dims[2])
    if left is not None and ("lengths_kv" in tensors or q.dims[2] > k.dims[2]):
        raise Refused("it is not documented what cuDNN gives to a query whose window has no key")
    found = _lengths(operation, tensors)
    if "state" in tensors:
        dims = (*q.dims[:3], k.dims[2])
        kept: RandomBernoulli[str] = RandomBernoulli(
            state="state", y="y", dims=dims, dtype=q.dtype, probability=1 - operation.dropout
        )
        found["state"] = Computed(kept, ("state",), dims, q.dtype)
    return found


def _lengths(operation: AnyAttention, tensors: Mapping[str, GraphTensor]) -> dict[str, Computed]:
    q, k = tensors["q"], tensors["k"]
    given = [name for name in _LENGTHS if name in tensors]
    uneven = k.dims[2] % _TILE != 0 or q.dims[2] == 1
    if not given and not (isinstance(operation, AttentionBackward) and uneven):
        return {}
    first, second = Leaf(0, DType.INT32), Leaf(1, DType.INT32)
    of_q: Value = _clip(first, 0, q.dims[2]) if "lengths_q" in given else Constant(q.dims[2])
    of_kv: Value = Constant(k.dims[2])
    if "lengths_kv" in given:
        of_kv = _clip(first, 1, k.dims[2])
        some = _clip(second if "lengths_q" in given else first, 0, 1)
        of_q = Expression(PointwiseMode.MUL, (of_q, some), compute=DType.INT64)
    dims, of_keys = (q.dims[0],), tuple(name for name in given if name == "lengths_kv")
    return {
        "lengths_q": Computed(of_q, tuple(given), dims, DType.INT32),
        "lengths_kv": Computed(of_kv, of_keys, dims, DType.INT32),
    }


def _clip(value: Value, least: int, most: int) -> Value:
    return Expression(PointwiseMode.CLIP, (value,), (least, most), DType.INT64)


implement(
    Attention,
    AttentionBackward,
    lower=lower_attention,
    computed=attention_operands,
    launchers=kernels(attention_launches, attention_workspace),
)
