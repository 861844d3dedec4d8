"""Conversions between dtypes, by ONNX's rules.

https://onnx.ai/onnx/operators/onnx__Cast.html
"""

from __future__ import annotations

import numpy as np

from cudnn_actor.onnx.nodes import Node, Result
from cudnn_actor.onnx.operator_table import operator
from cudnn_actor.onnx.tensors import dtype_name, numpy_dtype
from cudnn_actor.onnx.values import Declined
from cudnn_actor.protocol.graphs.graph_builder import GraphBuilder, Tensor
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["convert", "dtype_of", "wanted_dtype", "wrap"]


def dtype_of(code: int) -> DType:
    """One of ONNX's dtypes. Raises `Declined` for one that tensors cannot have."""
    found = DType.of(numpy_dtype(code))
    if found is None:
        raise Declined(f"no tensor here is of {dtype_name(code)}")
    return found


def wanted_dtype(node: Node, otherwise: DType) -> DType:
    """The one that the attribute `dtype` says. Raises as `dtype_of`."""
    code = node.attribute("dtype")
    return otherwise if code is None else dtype_of(code)


def wrap(g: GraphBuilder, x: Tensor, dtype: DType) -> Tensor:
    """Integers in another integer dtype, which keeps their lowest bits."""
    return x if dtype is x.dtype else g.wrap(x, dtype)


def convert(g: GraphBuilder, x: Tensor, dtype: DType) -> Tensor:
    """x as `Cast` gives it: floats lose their fractions on the way to integers, which keep their low bits."""
    if dtype is x.dtype:
        return x
    if dtype is DType.BOOL:
        return g.not_equal(x, 0)
    if dtype.is_floating or x.dtype is DType.BOOL:
        return g.astype(x, dtype)
    if x.dtype.is_floating:
        return g.astype(g.trunc(x), dtype)
    if np.can_cast(x.dtype.numpy, dtype.numpy):
        return g.astype(x, dtype)
    return wrap(g, x, dtype)


@operator("Cast", since=6)
def cast(node: Node, g: GraphBuilder) -> Result:
    wanted = dtype_of(node.attribute("to"))
    node.dtype(0)
    return convert(g, node.tensor(0), wanted)


@operator("BitCast", since=26)
def bit_cast(node: Node, g: GraphBuilder) -> Result:
    return g.bit_cast(node.tensor(0), dtype_of(node.attribute("to")))


@operator("CastLike", since=15)
def cast_like(node: Node, g: GraphBuilder) -> Result:
    wanted = node.dtype(1)
    node.dtype(0)
    if node.value(0).fixed and wanted.is_floating:  # a constant, as the other input only says the dtype
        node.reserve(node.value(0).size, itemsize=wanted.numpy.itemsize, passing=0)
        return node.value(0).array.astype(wanted.numpy)
    return convert(g, node.tensor(0), wanted)
