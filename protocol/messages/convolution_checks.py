"""Checks of a convolution's message before it is lowered: types, scalars, dtypes, bias."""

from __future__ import annotations

import math
from typing import Any

from cudnn_actor.protocol.errors import InvalidRequest, Words
from cudnn_actor.protocol.messages.messages import ConvBwdData, ConvBwdFilter, ConvFwd
from cudnn_actor.protocol.operations.convolution import Convolution
from cudnn_actor.protocol.operations.field_checks import require_field
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.checks import is_finite
from cudnn_actor.protocol.types.conv import ConvSpec
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.epilogue import Epilogue
from cudnn_actor.protocol.types.numerics import Numerics
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["check_bias", "check_dtypes", "check_scalars", "check_types"]

_FIELD_TYPES: dict[str, type] = {
    "conv": ConvSpec,
    "epilogue": Epilogue,
    "numerics": Numerics,
}
_RESULT_DTYPES = {
    DType.FLOAT64: (DType.FLOAT64,),
    DType.FLOAT32: (DType.FLOAT32,),
    DType.FLOAT16: (DType.FLOAT16, DType.FLOAT32),
    DType.BFLOAT16: (DType.BFLOAT16, DType.FLOAT32),
    DType.INT8: (DType.INT32, DType.INT8, DType.FLOAT32),
    DType.UINT8: (DType.INT32, DType.UINT8, DType.FLOAT32),
}
"""The dtype of a convolution's operands → the dtypes that its results may have."""


def check_types(message: ConvFwd | ConvBwdData | ConvBwdFilter) -> None:
    """Raise `InvalidRequest` unless every field of a message has its declared type."""
    for name in message.__struct_fields__:
        value = getattr(message, name)
        expected = _FIELD_TYPES.get(name, BufferRef)
        if name in ("alpha", "beta") or (name == "bias" and value is None):
            continue
        require_field(message, name, value, expected)


def check_scalars(message: ConvFwd | ConvBwdData | ConvBwdFilter) -> None:
    """Raise `InvalidRequest` unless alpha and beta are finite: `signature` does not cover their values."""
    for name in ("alpha", "beta"):
        value = getattr(message, name)
        if type(value) is float and math.isfinite(value):
            continue  # the common case, checked first for speed
        if not is_finite(value):
            fix = f"pass a float, as in {name}=1.0"
            raise InvalidRequest(field=name, value=value, problem="must be a finite number", fix=fix)


def check_dtypes(specs: dict[str, TensorSpec], operation: type[Convolution[Any]]) -> None:
    """Raise `InvalidRequest` unless both operands have one dtype, which a convolution takes, and the result's
    dtype is allowed for it.

    Integers that only the forward one takes are refused by the others with their graph, as the engine does.
    """
    (first, a), (second, b), (result, out) = specs.items()
    if a.dtype is not b.dtype:
        raise InvalidRequest(
            field=second,
            value=Words(b.dtype),
            problem=f"differs from the dtype of {first}, {a.dtype.value}",
            fix="convert one of them when you upload: upload(array, dtype=...)",
        )
    allowed = _RESULT_DTYPES.get(a.dtype)
    if allowed is None:
        raise InvalidRequest(
            field=first,
            value=Words(a.dtype),
            problem=f"is not a dtype that {operation.kind} takes",
            fix=f"convert both operands to one of {', '.join(operation.dtypes)}, "
            'as in upload(array, dtype="float32")',
        )
    if out.dtype not in allowed:
        raise InvalidRequest(
            field=result,
            value=Words(out.dtype),
            problem=f"cannot hold the result of {a.dtype.value} operands",
            fix=f"use {' or '.join(allowed)}",
        )


def check_bias(spec: TensorSpec, broadcast: tuple[int, ...], dtypes: tuple[DType, ...]) -> None:
    """Raise `InvalidRequest` unless a bias has one value per filter, of one of `dtypes`."""
    filters = broadcast[1]
    if spec.dims not in ((filters,), broadcast):
        raise InvalidRequest(
            field="bias",
            value=spec.dims,
            problem=f"must have one value for each of the {filters} filters",
            fix=f"give it dims {(filters,)} or {broadcast}",
        )
    if spec.dtype not in dtypes:
        raise InvalidRequest(
            field="bias",
            value=Words(spec.dtype),
            problem=f"cannot be added to {dtypes[0]}",
            fix=f"use {' or '.join(dict.fromkeys(dtypes))}",
        )
