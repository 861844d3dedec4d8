"""GELU after products of half types, as a node of its own or spelled out, and the rounding before it.

ONNX rounds the result of each node. Here, the elementwise operations after a product of a half type are
computed together and rounded once, which is more accurate. GELU by erf is an exception: the product's result
is rounded before it, as in ONNX, so that engines may store it in the half type. GELU by tanh is computed with
the product.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from cudnn_actor.onnx.nodes import Node
from cudnn_actor.onnx.operators.sources import is_half_product, made_by, number_of
from cudnn_actor.onnx.values import Value, broadcast_dims
from cudnn_actor.protocol.graphs.graph_builder import GraphBuilder, Tensor
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["gelu_of", "spelled_out_gelu"]

_MOST_FACTORS = 8
_CUBE, _SCALE = 0.044715, math.sqrt(2 / math.pi)


def gelu_of(g: GraphBuilder, x: Value, *, approximate: bool) -> Tensor:
    """GELU of a value. If the value is a product of a half type, and the GELU is by erf, the value is rounded
    first."""
    reshaped = made_by(x, "Reshape")
    rounds = not approximate and is_half_product(x if reshaped is None else reshaped.value(0))
    return g.gelu(g.astype(x.tensor, x.tensor.dtype) if rounds else x.tensor, approximate=approximate)


def spelled_out_gelu(node: Node, g: GraphBuilder) -> Tensor | None:
    """A product of elements of a half type as GELU; None if it is not the last step of a GELU that is spelled
    out.

    GELU is x * 0.5 * (1 + f), in any order, where f is erf(x / sqrt(2)) or tanh(sqrt(2 / pi) (x + 0.044715
    x**3)).
    """
    if not (node.value(0).is_half and node.value(1).is_half):
        return None
    found = _factors([node.value(0), node.value(1)])
    if found is None or not _is_near(found.number, 0.5, found.values[0]) or len(found.values) != 2:
        return None
    dims = broadcast_dims(node.dims(0), node.dims(1))
    for x, other in (found.values, found.values[::-1]):
        for op, is_argument in (("Erf", _is_of_erf), ("Tanh", _is_of_tanh)):
            of = _function_plus_1(other, op)
            if of is not None and x.dims == dims and is_argument(of, x):
                return gelu_of(g, x, approximate=op == "Tanh")
    return None


class _Factors(NamedTuple):
    """The factors of a product: a number, and values."""

    number: float
    values: list[Value]


def _factors(values: list[Value]) -> _Factors | None:
    """The factors of a product of values, where factors that are products are taken apart, too; None if there
    are many."""
    number, found, waiting = 1.0, list[Value](), values
    for _ in range(_MOST_FACTORS):
        if not waiting:
            return _Factors(number, found) if found else None
        value, *waiting = waiting
        product, quotient = made_by(value, "Mul"), made_by(value, "Div")
        if (constant := number_of(value)) is not None:
            number *= constant
        elif product is not None:
            waiting = [product.value(0), product.value(1), *waiting]
        elif quotient is not None and (constant := number_of(quotient.value(1))):
            number, waiting = number / constant, [quotient.value(0), *waiting]
        else:
            found.append(value)
    return None


def _is_near(number: float, wanted: float, value: Value) -> bool:
    """Whether a number is the wanted one, as far as the precision of a value's half type allows."""
    unit = 2**-8 if value.known_dtype is DType.BFLOAT16 else 2**-10
    return abs(number - wanted) <= unit * abs(wanted)


def _function_plus_1(value: Value, op: str) -> Value | None:
    """The x of a value that is op(x) + 1; None if it has another form."""
    for term, other in _terms(value):
        made = made_by(term, op)
        if made is not None and number_of(other) == 1:
            return made.value(0)
    return None


def _terms(value: Value) -> Iterator[tuple[Value, Value]]:
    """The terms of a sum in both orders; nothing for any other value."""
    added = made_by(value, "Add")
    if added is not None:
        yield added.value(0), added.value(1)
        yield added.value(1), added.value(0)


def _is_of_erf(value: Value, x: Value) -> bool:
    """Whether a value is x / sqrt(2)."""
    found = _factors([value])
    return found is not None and found.values == [x] and _is_near(found.number, math.sqrt(0.5), x)


def _is_of_tanh(value: Value, x: Value) -> bool:
    """Whether a value is sqrt(2 / pi) (x + 0.044715 x**3), or that with x in front."""
    found = _factors([value])
    if found is None or not _is_near(found.number, _SCALE, x):
        return False
    *others, last = sorted(found.values, key=lambda each: each is not x)
    if others not in ([], [x]):
        return False
    power = 2 if others else 3
    firsts = _terms(last)
    return any((number_of(a) == 1 if others else a is x) and _is_cubic(b, x, power) for a, b in firsts)


def _is_cubic(value: Value, x: Value, power: int) -> bool:
    """Whether a value is 0.044715 times that power of x."""
    found = _factors([value])
    if found is None or not _is_near(found.number, _CUBE, x):
        return False
    if found.values == [x] * power:
        return True
    made = made_by(found.values[0], "Pow")
    return (
        len(found.values) == 1
        and made is not None
        and made.value(0) is x
        and number_of(made.value(1)) == power
    )
