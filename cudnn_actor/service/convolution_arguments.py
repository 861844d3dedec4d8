"""Checks of the arguments of `conv_fwd` and its siblings, before dims are computed from them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.checks import require_awaited
from cudnn_actor.protocol.types.conv import ConvSpec
from cudnn_actor.protocol.types.spatial import spatial_dims_of

__all__ = ["convolution_of", "require_operands"]


def require_operands(**fields: object) -> None:
    """Check the types of references before dims are computed from them. The messages check everything
    else."""
    for name, value in fields.items():
        if not isinstance(value, BufferRef):
            require_awaited(name, value)
            raise InvalidRequest(
                field=name,
                value=value,
                problem=f"is of type {type(value).__name__}, but must be a BufferRef",
                fix="upload arrays first: await gpu.upload(array)",
            )


def convolution_of(name: str, dims: Sequence[int], conv: object, **numbers: Any) -> ConvSpec:
    """A convolution's parameters, from `conv` or from the numbers that `ConvSpec.spread` takes.

    `name` and `dims` are those of an operand. Raises `InvalidRequest` if parameters are given both ways, or
    if the operand does not have 1 to 3 spatial dims.
    """
    if conv is None:
        return ConvSpec.spread(spatial_dims_of(name, dims), **numbers)
    if not isinstance(conv, ConvSpec):
        raise InvalidRequest(
            field="conv",
            value=conv,
            problem=f"is of type {type(conv).__name__}, but must be a ConvSpec",
            fix="pass one, as in ConvSpec.symmetric(2), or give pad, stride, dilation and groups",
        )
    for field, value in numbers.items():
        if value != (0 if field == "pad" else 1):
            raise InvalidRequest(
                field=field, value=value, problem="is given, and so is conv", fix="make it a part of conv"
            )
    return conv
