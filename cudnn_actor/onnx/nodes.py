"""One node of a model, as its handler sees it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from cudnn_actor.models.source import Origin
from cudnn_actor.onnx.axes import MAY_BE_FOR_ALL, axes_from_front, axes_of, counted_input
from cudnn_actor.onnx.budget import Budget
from cudnn_actor.onnx.choices import check_choice, choices_of
from cudnn_actor.onnx.counts import check_least, counts_of
from cudnn_actor.onnx.folding import fold
from cudnn_actor.onnx.schemas import Schema
from cudnn_actor.onnx.unrolling import Unrolling
from cudnn_actor.onnx.values import Contradiction, Declined, Refused, Unfit, Value
from cudnn_actor.protocol.graphs.graph_builder import GraphBuilder, Tensor
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import Layout

__all__ = ["MOST_NUMBERS", "Node", "Result"]

MOST_NUMBERS = 1 << 16
"""The most elements of a list that decides over the graph, and of an array that is made here although the
service could make it."""

_STEPS = 20
"""Steps for each element of such an array."""
Result = Any
"""A handler's result for each output: a tensor, an array, a value or None. A tuple, or a single result by
itself."""


class Node:
    """A node of the model: its attributes, with the schema's defaults, and its inputs.

    Parameters
    ----------
    proto
        The node.
    schema
        Its operator's schema.
    inputs
        Its inputs in order; None for those left out.
    attributes
        The node's own attributes.
    opsets
        The versions of the domains.
    g
        The builder of the graph.
    weight
        A function from an array to a tensor of the graph.
    budget
        The remaining budget for arrays that are made now.
    random_state
        A function that returns the state for a number of random numbers, with the node's seed if it has one.
    most_operations
        How many operations the graph may have.
    """

    def __init__(
        self,
        proto: onnx.NodeProto,
        schema: Schema,
        inputs: Sequence[Value | None],
        attributes: Mapping[str, onnx.AttributeProto],
        *,
        opsets: Mapping[str, int],
        g: GraphBuilder,
        weight: Callable[..., Tensor],
        budget: Budget,
        random_state: Callable[[float | None, int], Tensor],
        most_operations: int,
    ) -> None:
        self._opsets, self._budget, self._op = opsets, budget, proto.op_type
        self.proto, self.schema, self.g, self.weight = proto, schema, g, weight
        self.inputs = list(inputs)
        self._most_operations = most_operations
        self._attributes = attributes
        self._random_state, self.drew = random_state, False
        """Whether the node draws random numbers."""
        self.looked = False
        """Whether values of an input of the model were read."""

    @property
    def op(self) -> str:
        """The operator."""
        return self._op

    @property
    def version(self) -> int:
        """The version of the domain since which the operator is as it is here."""
        return int(self.schema.since_version)

    def of(self, inputs: Sequence[Value | None], op: str = "") -> Node:
        """This node with other inputs, perhaps as another operator."""
        other = copy.copy(self)
        other.inputs, other._op = list(inputs), op or self._op
        return other

    def wants(self, number: int) -> bool:
        """Whether the node has this output."""
        return number < len(self.proto.output) and bool(self.proto.output[number])

    # Attributes.

    def attribute(self, name: str, default: Any = None) -> Any:
        """An attribute's value, else the schema's default, else `default`. Strings are text."""
        given = self._attributes.get(name)
        if given is None:
            declared = self.schema.attributes.get(name)
            given = None if declared is None else declared.default_value
            if given is None or given.type == onnx.AttributeProto.UNDEFINED:
                return default
        value = onnx.helper.get_attribute_value(given)
        if isinstance(value, bytes):
            return value.decode("utf-8", "replace")
        if given.type == onnx.AttributeProto.STRINGS:
            return tuple(each.decode("utf-8", "replace") for each in value)
        if given.type in (onnx.AttributeProto.INTS, onnx.AttributeProto.FLOATS):
            return tuple(value)
        return value

    def has_attribute(self, name: str) -> bool:
        """Whether the node has an attribute that is not its default."""
        return name in self._attributes

    # Axes.

    def axes(self, name: str = "axes") -> tuple[int, ...] | None:
        """The axes in an attribute or an input, counted from the front; None if they were left out.

        Raises `Contradiction` if there is no such axis, or `Refused` if the axis comes from an input of the
        model.
        """
        number = axes_of(self.schema).get(name)
        if number is None:
            given = self.attribute(name)
            found = None if given is None else given if isinstance(given, tuple) else (given,)
        else:
            found = self.ints(number) if self.has(number) else None
        if found is None:
            return None
        try:
            return axes_from_front(self.op, found, self.rank(counted_input(self.op)))
        except Contradiction as error:
            raise self.wrong(str(error), number) from error

    def axis(self, name: str = "axis") -> int:
        """One axis, counted from the front. Raises as `axes`."""
        found = self.axes(name)
        if found is None or len(found) != 1:
            raise Contradiction(f"has no {name}" if found is None else f"has {len(found)} numbers as {name}")
        return found[0]

    def check(self) -> None:
        """Raise `Contradiction` for an axis or a name that does not exist, and for a count that is not valid.

        Values of inputs of the model are checked where they are read.
        """
        for name, takes in choices_of(self.schema).items():
            if self.has_attribute(name):
                check_choice(name, self.attribute(name), takes)
        for name, number in counts_of(self.schema).items():
            if number is None and self.has_attribute(name):
                value = self.attribute(name)
                check_least(self.op, name, value if isinstance(value, tuple) else (value,))
            elif number is not None and self._is_fixed(number):
                self._numbers(number)
        if self.op in MAY_BE_FOR_ALL and self.has(1) and self.value(1).size == 1 >= self.value(1).rank:
            return
        for name, number in axes_of(self.schema).items():
            if self.inputs and (number is None or self._is_fixed(number)):
                self.axes(name)

    def _is_fixed(self, number: int) -> bool:
        return self.has(number) and self.value(number).fixed

    def wrong(self, problem: str, number: int | None = None) -> Exception:
        """The error to raise for an attribute, or an input, that is not valid."""
        of_file = number is None or self.value(number).fixed
        return Contradiction(problem) if of_file else Refused(f"{problem}, which an input of the model says")

    # Inputs.

    def has(self, number: int) -> bool:
        """Whether an input is there."""
        return number < len(self.inputs) and self.inputs[number] is not None

    def value(self, number: int) -> Value:
        """An input. Raises `Declined` if it was left out."""
        value = self.inputs[number] if number < len(self.inputs) else None
        if value is None:
            raise Declined(f"input {number} is missing")
        return value

    def dims(self, number: int) -> tuple[int, ...]:
        """An input's dims."""
        return self.value(number).dims

    def require(self, number: int, *wanted: int | None) -> None:
        """Raise `Unfit` unless an input has these dims, or was left out. None stands for any size."""
        if not self.has(number):
            return
        dims = self.dims(number)
        if len(dims) != len(wanted) or any(w not in (None, d) for w, d in zip(wanted, dims, strict=True)):
            shown = ", ".join("?" if size is None else str(size) for size in wanted)
            raise Unfit(f"has input {number} of dims {dims}, where the others make it [{shown}]")

    def rank(self, number: int) -> int:
        """How many dims an input has."""
        return len(self.dims(number))

    def dtype(self, number: int) -> DType:
        """An input's dtype. Raises `Declined` for one that tensors cannot have."""
        value = self.value(number)
        if value.known_dtype is None:
            raise Declined(f"input {number} is of {'text' if value.dtype.hasobject else value.dtype}")
        return value.known_dtype

    def tensor(self, number: int, layout: Layout | None = None) -> Tensor:
        """An input as a tensor of the graph, with that layout if one is given."""
        value = self.value(number)
        return value.tensor if layout is None else value.laid_out(self.g, layout)

    def tensor_or_none(self, number: int) -> Tensor | None:
        """An input as a tensor of the graph; None if it was left out."""
        return self.tensor(number) if self.has(number) else None

    def tensors(self) -> list[Tensor]:
        """All inputs as tensors."""
        return [self.tensor(number) for number in range(len(self.inputs))]

    def constant(self, number: int) -> np.ndarray:
        """The elements of an input that decides over shapes, axes or attributes.

        If it is not a constant of the model, the model is imported again with the values of the inputs that
        it derives from.
        """
        value = self.value(number)
        array = value.array
        self.looked |= not value.fixed
        return array

    def constant_or_none(self, number: int) -> np.ndarray | None:
        """The elements of an input as `constant` gives them; None if the input was left out."""
        return self.constant(number) if self.has(number) else None

    def fold(self) -> tuple[np.ndarray | None, ...]:
        """The results, computed now; each input decides."""
        given = [self.constant_or_none(n) for n in range(len(self.inputs))]
        return fold(self.proto, given, self._opsets, self._budget)

    def rearranged_weight(
        self, number: int, how: str, rearrange: Callable[[np.ndarray], np.ndarray]
    ) -> Tensor:
        """A constant input as a weight with rearranged elements, with the same dims and dtype.

        `how`: a text that identifies what `rearrange` does.
        """
        value = self.value(number)
        origin, key = value.origin, f"{value.key}, {how}" if value.key else ""
        if origin is not None:
            of = origin
            key = f"{of.key}, {how}"
            origin = Origin(
                key=key, names=of.names, compute=lambda *given: rearrange(of.derive(*given)), parts=(of,)
            )

        def weight() -> Tensor:
            return self.weight(made, key, origin=origin)

        made = Value(value.dims, value.dtype, weight, lambda: rearrange(value.elements), fixed=True)
        return weight()

    def reserve(self, *dims: int, itemsize: int = 8, passing: int = 3) -> None:
        """Count an array that the handler is about to make. Raises `TooMuch` if it would be too large.

        `passing`: how many temporary arrays of the same size there are. A dim of 0 counts as 1, since
        temporary arrays along the other dims may be made.
        """
        count = math.prod(max(1, dim) for dim in dims)
        self._budget.check((1 + passing) * count * itemsize, _STEPS * count)
        self._budget.keep(count * itemsize)

    def numbers(self, count: int) -> Tensor:
        """0, 1, 2 and so on, int64: a weight, or computed by the service where they are many."""
        return self.weight(np.arange(count)) if count <= MOST_NUMBERS else self.g.arange(count)

    def count(self, number: int) -> int:
        """An input that decides, as one whole number, also if it is of floats. Raises as `ints`."""
        (count,) = self._numbers(number)
        return count

    def ints(self, number: int) -> tuple[int, ...]:
        """The elements of an input that decides over the graph, as whole numbers.

        Raises `Contradiction` for a count that is not valid, or `Refused` if it comes from an input of the
        model.
        """
        if self.value(number).dtype.kind not in "iub":
            raise Declined(f"input {number} is of {self.value(number).dtype}, not of integers")
        return self._numbers(number)

    def _numbers(self, number: int) -> tuple[int, ...]:
        if self.value(number).size > MOST_NUMBERS:
            raise Declined(f"input {number} is a list of {self.value(number).size:,} numbers")
        found = tuple(int(each) for each in self.constant(number).reshape(-1))
        if number < len(self.schema.inputs):
            try:
                check_least(self.op, self.schema.inputs[number].name, found)
            except Contradiction as error:
                raise self.wrong(str(error), number) from error
        return found

    def operand(self, number: int) -> Tensor | float | int:
        """An input of a pointwise operation: a number if it is a constant of one element, else a tensor."""
        value = self.value(number)
        others = [each for each in self.inputs if each is not None and each is not value and not each.fixed]
        if not value.fixed or value.size != 1 or not any(each.rank >= value.rank for each in others):
            return value.tensor
        if value.origin is not None and value.rank:  # a weight, such as a bias of one channel, is no factor
            return value.tensor
        one = value.array.reshape(())
        return int(one) if value.dtype.kind in "iub" else float(one.astype(np.float64))

    def operands(self) -> list[Any]:
        """All inputs of a pointwise operation."""
        return [self.operand(number) for number in range(len(self.inputs))]

    def unrolling(self, turns: int | None, stacked: int, *, parts: int = 1, behind: int = 0) -> Unrolling:
        """The object that watches the turns of a recurrence or a loop: see `Unrolling`."""
        return Unrolling(
            self.g, self._budget, self._most_operations, turns, stacked, parts=parts, behind=behind
        )

    def random_state(self, dims: Sequence[int]) -> Tensor:
        """The state from which it draws numbers of these dims. Raises `Refused` if there is no seed."""
        self.drew = True
        return self._random_state(self.attribute("seed"), math.prod(dims))

    # Conversions.

    def cast(self, x: Tensor, dtype: DType) -> Tensor:
        """x in a dtype that holds its values."""
        return x if x.dtype is dtype else self.g.astype(x, dtype)
