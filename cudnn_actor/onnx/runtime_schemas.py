"""The schemas of ONNX Runtime's own operators, which its optimiser and quantiser write.

https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import onnx
from onnx import defs

__all__ = ["MICROSOFT", "SCHEMAS"]

MICROSOFT = "com.microsoft"
_TYPES = {
    "T": ("float", "float16", "bfloat16", "double"),
    "F": ("float",),
    "I": ("int32", "int64"),
    "L": ("int64",),
    "B": ("uint8", "int8"),
    "Z": ("uint8", "float", "float16", "bfloat16", "double"),
    "A": ("float", "float16", "bfloat16", "double", "int8", "uint8", "int16", "uint16", "int32"),
}
"""Kinds of types: a number behind one tells those apart that may differ."""
_Row = tuple[str, str, dict[str, Any]]
_CONV = {"auto_pad": "NOTSET", "group": 1, "kernel_shape": [], "strides": [], "dilations": [], "pads": []}
_POOL = {"auto_pad": "NOTSET", "ceil_mode": 0, "kernel_shape": [], "strides": [], "pads": []}
_GEMM: dict[str, Any] = {"alpha": 1.0, "beta": 1.0, "transA": 0, "transB": 0}
_PRODUCT: dict[str, Any] = {"alpha": 1.0, "transA": 0, "transB": 0, "transBatchA": 0, "transBatchB": 0}
_HEADS: dict[str, Any] = {"num_heads": 0, "scale": 0.0, "mask_filter_value": -10000.0, "unidirectional": 0}
_ONE = "X:B X_scale:F X_zero_point:B? Y_scale:F Y_zero_point:B?"
_TWO = "A:B A_scale:F A_zero_point:B? B:B B_scale:F B_zero_point:B? C_scale:F C_zero_point:B?"
_LSTM = {
    "activations": [""],
    "activation_alpha": [0.0],
    "activation_beta": [0.0],
    "clip": 0.0,
    "direction": "forward",
    "hidden_size": 0,
    "input_forget": 0,
}
_NORM = {"epsilon": 1e-12}

_ROWS: dict[str, _Row] = {
    "Attention": (
        "input weights bias? mask_index:I? past? attention_bias? past_sequence_length:I?",
        "output present?",
        {**_HEADS, "qkv_hidden_sizes": [], "do_rotary": 0, "past_present_share_buffer": 0},
    ),
    "BiasAdd": ("X bias skip", "Y", {}),
    "BiasGelu": ("A B", "C", {}),
    "DequantizeLinear": ("x:A x_scale:T x_zero_point:A?", "y:T", {"axis": 1}),
    "DynamicQuantizeLSTM": (
        "X:F W:B R:B B:F? sequence_lens:I? initial_h:F? initial_c:F? P:F? W_scale:F W_zero_point:B R_scale:F "
        "R_zero_point:B",
        "Y:F? Y_h:F? Y_c:F?",
        _LSTM,
    ),
    "DynamicQuantizeMatMul": ("A:F B:B b_scale:F b_zero_point:B? bias:F?", "Y:F", {}),
    "EmbedLayerNormalization": (
        "input_ids:I segment_ids:I? word_embedding position_embedding segment_embedding? gamma beta mask:I? "
        "position_ids:I?",
        "output mask_index:I? embedding_sum?",
        {**_NORM, "mask_index_type": 1},
    ),
    "FastGelu": ("X bias?", "Y", {}),
    "FusedConv": ("X W B? Z?", "Y", {**_CONV, "activation": "", "activation_params": [0.0]}),
    "FusedGemm": (
        "A B C?",
        "Y",
        {**_GEMM, "activation": "", "activation_alpha": 0.0, "activation_beta": 0.0, "activation_gamma": 0.0},
    ),
    "FusedMatMul": ("A B", "Y", _PRODUCT),
    "Gelu": ("X", "Y", {}),
    "MatMulIntegerToFloat": (
        "A:B1 B:B2 a_scale:F b_scale:F a_zero_point:B1? b_zero_point:B2? bias:F?",
        "Y:F",
        {},
    ),
    "MatMulNBits": (
        "A B:B scales zero_points:Z? g_idx:I? bias?",
        "Y",
        {"K": 0, "N": 0, "bits": 4, "block_size": 0, "accuracy_level": 0, "weight_prepacked": 0},
    ),
    "MultiHeadAttention": (
        "query key? value? bias? key_padding_mask:I? attention_bias? past_key? past_value? "
        "past_sequence_length:I? cache_indirection:I?",
        "output present_key? present_value? qk?",
        _HEADS,
    ),
    "NhwcMaxPool": ("x:B", "y:B", {**_POOL, "dilations": []}),
    "QAttention": (
        "input:B1 weight:B2 bias:F input_scale:F weight_scale:F mask_index:I? input_zero_point:B1? "
        "weight_zero_point:B2? past:F?",
        "output:F present:F?",
        {**_HEADS, "do_rotary": 0, "past_present_share_buffer": 0},
    ),
    "QGemm": (
        "A:B1 a_scale:F a_zero_point:B1 B:B2 b_scale:F b_zero_point:B2 C:I? y_scale:F? y_zero_point:B3?",
        "Y:A",
        {"alpha": 1.0, "transA": 0, "transB": 0},
    ),
    "QLinearAdd": (_TWO, "C:B", {}),
    "QLinearAveragePool": (_ONE, "Y:B", {**_POOL, "channels_last": 0, "count_include_pad": 0}),
    "QLinearConcat": ("Y_scale:F Y_zero_point:B inputs:A*", "Y:B", {"axis": 0}),
    "QLinearConv": (
        "x:B1 x_scale:F x_zero_point:B1 w:B2 w_scale:F w_zero_point:B2 y_scale:F y_zero_point:B3 B:I?",
        "y:B3",
        {**_CONV, "channels_last": 0},
    ),
    "QLinearGlobalAveragePool": (_ONE, "Y:B", {"channels_last": 0}),
    "QLinearLeakyRelu": (_ONE, "Y:B", {"alpha": 0.01}),
    "QLinearMul": (_TWO, "C:B", {}),
    "QLinearSigmoid": (_ONE, "Y:B", {}),
    "QLinearSoftmax": (_ONE, "Y:B", {"axis": -1, "opset": 13}),
    "QuantizeLinear": ("x:T y_scale:T y_zero_point:A?", "y:A", {"axis": 1}),
    "QuickGelu": ("X", "Y", {"alpha": 1.702}),
    "SkipLayerNormalization": (
        "input skip gamma beta? bias?",
        "output mean:F? inv_std_var:F? input_skip_bias_sum?",
        _NORM,
    ),
    "SkipSimplifiedLayerNormalization": (
        "input skip gamma bias?",
        "output mean:F? inv_std_var:F? input_skip_bias_sum?",
        _NORM,
    ),
    "TransposeMatMul": ("A B", "Y", _PRODUCT),
    "Trilu": ("X:A k:L?", "Y:A", {"upper": 1}),
}
"""Operators → inputs, outputs, attributes with their defaults, or of lists the type of their elements.

`?`: may be left out; `*`: several.
"""


def _formals(text: str) -> Iterator[tuple[defs.OpSchema.FormalParameter, str]]:
    options = defs.OpSchema.FormalParameterOption
    for each in text.split():
        name, _, kind = each.rstrip("?*").partition(":")
        kind = kind or "T"
        option = {"?": options.Optional, "*": options.Variadic}.get(each[-1], options.Single)
        yield (
            defs.OpSchema.FormalParameter(name, kind, param_option=option, is_homogeneous=kind != "A"),
            kind,
        )


def _attribute(name: str, value: Any) -> defs.OpSchema.Attribute:
    if not isinstance(value, list):
        return defs.OpSchema.Attribute(name, onnx.helper.make_attribute(name, value))
    of = defs.OpSchema.AttrType
    kind = {float: of.FLOATS, str: of.STRINGS}.get(type(value[0]), of.INTS) if value else of.INTS
    return defs.OpSchema.Attribute(name, kind, required=False)


def _schema(name: str, row: _Row, domain: str = MICROSOFT) -> Any:
    inputs, outputs, attributes = row
    given, made = list(_formals(inputs)), list(_formals(outputs))
    kinds = {kind for _, kind in (*given, *made)}
    return defs.OpSchema(
        name,
        domain,
        1,
        inputs=[each for each, _ in given],
        outputs=[each for each, _ in made],
        type_constraints=[(kind, [f"tensor({each})" for each in _TYPES[kind[0]]], "") for kind in kinds],
        attributes=[_attribute(key, value) for key, value in attributes.items()],
    )


SCHEMAS: dict[tuple[str, str], Any] = {(MICROSOFT, name): _schema(name, row) for name, row in _ROWS.items()}
"""Domain and operator → schema. ONNX Runtime has the last one in ONNX's own domain."""
SCHEMAS["", "SimplifiedLayerNormalization"] = _schema(
    "SimplifiedLayerNormalization",
    ("X scale:T1", "Y:T1 inv_std_var:F?", {"axis": -1, "epsilon": 1e-5, "stash_type": 1}),
    "",
)
