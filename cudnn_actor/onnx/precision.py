"""The dtypes of values in a model that is loaded with a dtype, as by `load(dtype="bfloat16")`.

Floating-point values have that dtype in the graph. Some stay float32:

- `EXACT`: values that are given or counted, and values that follow from these alone by elementwise
  operations: inputs of the model, integers as floats, positions, angles. They are rounded where they are
  combined with an activation, are an operand of a matrix product, or are filtered. So 1,023 is no 1,024, and
  pictures are scaled before they are rounded.
- `STATISTIC`: sums and means, and what follows from them alone: variances, their roots, norms of vectors.
  An operation of such a value and another one is computed in float32, and the result is rounded.

Constants keep the file's dtype until a node that is added to the graph reads them. So values that decide over
shapes are computed as in the file. Norms and softmax compute in float32 by themselves.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np
import onnx

from cudnn_actor.models.rounding import largest, round_to
from cudnn_actor.models.source import Feature
from cudnn_actor.onnx import operators
from cudnn_actor.onnx.dtypes import formal
from cudnn_actor.onnx.lists import Listed
from cudnn_actor.onnx.schemas import Schema, domain_of
from cudnn_actor.onnx.tensors import numpy_dtype
from cudnn_actor.onnx.values import Pending, Value
from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.graphs.graph_builder import GraphBuilder, Tensor
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["Precision", "Standing", "checked_precision"]

_WIDE = DType.FLOAT32
_CHOICES = (DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32)
_PASSING = frozenset({"generators", "indexing", "movement", "pointwise", "reduction", "spectra"})
"""Families of operators whose results stay exact if their inputs are, such as elementwise operators."""
_OF_WIDE = frozenset({"quantised", "runtime_quantised", "spectra"})
"""Families of operators that read float32: those to integers, which round as the file says, and spectra."""
_SUMS = frozenset(
    {
        "ReduceL1",
        "ReduceL2",
        "ReduceLogSum",
        "ReduceLogSumExp",
        "ReduceMean",
        "ReduceProd",
        "ReduceSum",
        "ReduceSumSquare",
    }
)
_WIDE_INPUTS = {"BatchNormalization": range(1, 5), "GridSample": range(1, 2), "RoiAlign": range(1, 2)}
"""Operators → the inputs that stay float32: statistics, and places in a picture."""
_Inputs: TypeAlias = Sequence[Value | None]


class Standing(enum.Enum):
    """Why a value stays float32."""

    EXACT = enum.auto()
    STATISTIC = enum.auto()


def checked_precision(dtype: object) -> DType | None:
    """The dtype that a model is to be computed in; None for the file's own. Raises `InvalidRequest`."""
    found = DType.of(dtype)
    if dtype is not None and found not in _CHOICES:
        raise InvalidRequest(
            field="dtype",
            value=dtype,
            problem="is no dtype that a model can be computed in",
            fix="give bfloat16, float16 or float32, or leave it out for the dtypes of the file",
        )
    return found


class Precision:
    """Converts the values of one import, as they enter and leave nodes.

    Parameters
    ----------
    dtype
        The dtype of weights and activations.
    g
        The builder of the graph.
    nodes
        The nodes of the model.
    """

    def __init__(self, dtype: DType, g: GraphBuilder, nodes: Iterable[onnx.NodeProto]) -> None:
        self._dtype, self._g = dtype, g
        self._summed = frozenset(name for node in nodes if node.op_type in _SUMS for name in node.input)
        """The names of values that are summed: their squares may exceed float16's limits."""
        self._made: dict[tuple[int, DType], tuple[Value, Value]] = {}
        """Converted values, with their originals, so that no other object gets the id of an original."""
        self._sources: dict[int, tuple[Value, Value]] = {}
        """Rounded results, by their ids, with the values before the rounding."""

    def of_input(self, value: Value) -> Value:
        """An input of the model."""
        if not _is_floating(value) or value.fixed:
            return value
        value.standing = Standing.EXACT
        found = self._as(value, _WIDE)
        found.standing = Standing.EXACT
        return found

    def input_of_conversion(self, node: onnx.NodeProto, inputs: _Inputs) -> Value | None:
        """The result of a node that only converts between floats: its input. None if it does more.

        So a model that declares its activations as float32 or float16 is computed in the given dtype all the
        same.
        """
        if domain_of(node) or node.op_type not in ("Cast", "CastLike") or not inputs:
            return None
        x = inputs[0]
        if x is None or x.fixed or not _is_floating(x):
            return None
        if node.op_type == "CastLike":
            return x if len(inputs) > 1 and inputs[1] is not None and _is_floating(inputs[1]) else None
        to = DType.of(numpy_dtype(next((each.i for each in node.attribute if each.name == "to"), 0)))
        return x if to is not None and to.is_floating else None

    def inputs(
        self, node: onnx.NodeProto, schema: Schema, values: _Inputs
    ) -> tuple[list[Value | None], Standing | None]:
        """The inputs of a node in the dtypes that it computes them in, and the standing of its results."""
        floats = [value for value in values if value is not None and _is_floating(value)]
        moving = [value for value in floats if not value.fixed]
        family, op = _family_of(node, schema), node.op_type
        if family == "casts":
            return self._wide(values, since=1), Standing.EXACT
        if op in _SUMS:
            return self._wide([self._source(value) for value in values]), Standing.STATISTIC
        if op == "Range":
            return list(values), Standing.EXACT
        standings = {value.standing for value in moving}
        if (family in _PASSING or _is_outer(node, values)) and standings and None not in standings:
            found = Standing.STATISTIC if Standing.STATISTIC in standings else Standing.EXACT
            return self._wide(values), found
        of_statistics = Standing.STATISTIC in standings or not self._summed.isdisjoint(node.output)
        if family in _OF_WIDE or (family == "pointwise" and of_statistics):
            return self._wide(values), None
        return [self._input_in_dtype(schema, number, value) for number, value in enumerate(values)], None

    def result(self, value: Value | None, standing: Standing | None) -> Value | None:
        """A result of a node."""
        if value is None or value.fixed or not _is_floating(value):
            return value
        found = self._as(value, self._dtype if standing is None else _WIDE)
        if found is not value and value.known_dtype is _WIDE:
            self._sources[id(found)] = found, value
        found.standing = standing
        return found

    def wide(self, value: Value) -> Value:
        """A value that a loop takes, hands on from turn to turn, or returns: floats are float32 there."""
        return self._as(value, _WIDE) if _is_floating(value) else value

    def dtype_in_loops(self, value: Value) -> DType | None:
        """The dtype that such a value has there; None if no tensor has it."""
        return _WIDE if _is_floating(value) else value.known_dtype

    def output(self, tensor: Tensor, feature: Feature) -> Tensor:
        """An output in the dtype that the model says."""
        dtype = _floating_or_none(feature.dtype)
        return tensor if dtype is None or not tensor.dtype.is_floating else self._g.astype(tensor, dtype)

    def constant(self, array: np.ndarray, feature: Feature) -> np.ndarray:
        """An output that is a constant, with the dtype of the model's output."""
        dtype = _floating_or_none(feature.dtype)
        own = _floating_or_none(DType.of(array.dtype))
        return array if dtype is None or own is None else round_to(array, dtype)

    def _source(self, value: Value | None) -> Value | None:
        """The value of a result before it was rounded; the value itself if it was not."""
        return self._sources[id(value)][1] if id(value) in self._sources else value

    def _wide(self, values: _Inputs, since: int = 0) -> list[Value | None]:
        return [
            value if value is None or number < since or not _is_floating(value) else self._as(value, _WIDE)
            for number, value in enumerate(values)
        ]

    def _input_in_dtype(self, schema: Schema, number: int, value: Value | None) -> Value | None:
        """An input in the dtype, or in float32 where the operator takes no other."""
        of = formal(schema, number)
        if value is None or of is None or of.dtypes is None or not _is_floating(value):
            return value
        for dtype in (_WIDE,) if number in _WIDE_INPUTS.get(schema.name, ()) else (self._dtype, _WIDE):
            if onnx.helper.np_dtype_to_tensor_dtype(dtype.numpy) in of.dtypes:
                return self._as(value, dtype)
        return value

    def _as(self, value: Value, dtype: DType) -> Value:
        """A value in a floating-point dtype. Its elements, where they are asked for, are the file's."""
        if value.known_dtype is dtype:
            return value
        key = id(value), dtype
        if key not in self._made:
            made = value.stored_as(dtype) if value.fixed else self._cast(value, dtype)
            made.turned_from = value.turned_from and self._as(value.turned_from, dtype)
            self._made[key] = value, made
        return self._made[key][1]

    def _cast(self, value: Value, dtype: DType) -> Value:
        def tensor() -> Tensor:
            exact = value.standing is Standing.EXACT and largest(dtype) < largest(value.tensor.dtype)
            return (
                _within_limits(self._g, value.tensor, dtype) if exact else self._g.astype(value.tensor, dtype)
            )

        made = Value(value.dims, dtype.numpy, tensor, Pending([value], lambda: value.array))
        made.made_by = value.made_by
        return made


def _within_limits(g: GraphBuilder, x: Tensor, dtype: DType) -> Tensor:
    """x in another dtype. Finite numbers stay within the dtype's limits: see `round_to`."""
    limit = largest(dtype)
    return g.astype(g.where(g.isinf(x), x, g.clip(x, -limit, limit)), dtype)


def _floating_or_none(dtype: DType | None) -> DType | None:
    return dtype if dtype is not None and dtype.is_floating else None


def _is_floating(value: Value) -> bool:
    """Whether a value is a tensor of floats, and has some."""
    of_floats = (
        not isinstance(value, Listed) and value.known_dtype is not None and value.known_dtype.is_floating
    )
    return of_floats and 0 not in value.dims


def _family_of(node: onnx.NodeProto, schema: Schema) -> str:
    """The family of an operator: the name of the file that its handler is in."""
    handler = operators.handler_of(domain_of(node), node.op_type, schema.since_version)
    return "" if handler is None else handler.__module__.rpartition(".")[-1]


def _is_outer(node: onnx.NodeProto, values: _Inputs) -> bool:
    """Whether a node is a product of matrices that sums nothing: of positions and frequencies, say."""
    if node.op_type != "MatMul" or len(values) != 2:
        return False
    return all(value is not None and value.rank > 1 for value in values) and values[0].dims[-1] == 1  # type: ignore[union-attr]
