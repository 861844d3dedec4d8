"""The values of a model's names while the model is imported: constants, or tensors of the graph."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from cudnn_actor.models.rounding import largest
from cudnn_actor.models.source import Origin
from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.graphs.graph_builder import GraphBuilder, Tensor
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import Layout

__all__ = [
    "Contradiction",
    "Declined",
    "Empty",
    "OfLoop",
    "Pending",
    "Refused",
    "Undecided",
    "Unfit",
    "Value",
    "broadcast_dims",
    "fitting",
]


class Contradiction(Exception):
    """Raised for a node that contradicts ONNX's definition of its operator. The text says how, for people."""


class Declined(Exception):
    """Raised by a handler that cannot run a node. Its text is the reason, for people."""


class Refused(Declined):
    """Raised by a handler for a node that the function which defines its operator must not run, either."""


class OfLoop(Refused):
    """Raised for a node that needs, at the import, values which a loop computes when the model runs."""


class Unfit(Refused):
    """Raised for a node whose inputs have dims that its operator does not take. The text says why."""


_MOST_BROADCAST = 32
"""The most dims of arrays that NumPy broadcasts. An array may have more."""


def broadcast_dims(*dims: Sequence[int]) -> tuple[int, ...]:
    """The dims of values of these dims that are broadcast. Raises `ValueError` if they cannot be, `Unfit` if
    there are too many."""
    most = max(map(len, dims))
    if most > _MOST_BROADCAST:
        raise Unfit(f"has an operand of {most} dims, and operands of {_MOST_BROADCAST} at most are broadcast")
    return np.broadcast_shapes(*map(tuple, dims))


@contextlib.contextmanager
def fitting(field: str) -> Iterator[None]:
    """Raise `Unfit` in place of a graph's error that the argument `field` does not fit the other ones."""
    try:
        yield
    except InvalidRequest as error:
        if error.field != field:
            raise
        raise Unfit(f"has {error.field} {error.value}, which {error.problem}") from error


class Empty(Exception):
    """Raised when a tensor without elements would have to be in the graph."""


class Undecided(Exception):
    """Raised when a value decides over shapes, and derives from inputs whose values are not known yet."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__(", ".join(sorted(names)))
        self.names = names


@dataclass(frozen=True, eq=False)
class Pending:
    """Elements that are computed when they are first needed.

    `sources`: the values whose elements are needed for that. `compute`: a function that returns the elements.
    """

    sources: Sequence[Value | None]
    compute: Callable[[], np.ndarray]


class Value:
    """A value of the model: its dims and dtype are known, and perhaps its elements.

    Parameters
    ----------
    dims
        The dims.
    dtype
        NumPy's dtype of the elements.
    tensor
        A function that returns the value as a tensor of the graph, or raises `Declined`.
    weight
        A function that returns the value as a weight with a layout, and in a dtype if one is given, if the
        elements are known.
    array
        The elements, or how they are found; the `Undecided` of an input whose values are not known yet.
    fixed
        Whether the elements do not depend on any input: the value is a constant of the model.

    Attributes
    ----------
    made_by
        The `Node` whose result it is; None if it is an input, a constant or the result of a function.
    standing
        Why the value stays float32 in a model that is computed in another dtype: see `precision`.
    turned_from
        The constant of rank 2 whose transpose the value is; None if there is none.
    key
        A key that is equal for equal elements in every import of the file; empty if the elements have to be
        compared.
    digest
        A digest that identifies the elements if there is no key; empty until `origins` has computed it.
    origin
        The value's origin, if it follows from initialisers that may be overwritten; else None.
    biases
        The tensors that it adds to scores as a mask of attention, by the scores' dtype, the truth value that
        hides a key, and the number that is added.
    says
        The word for its meaning as a mask of attention, if that is known at the import; None before it is
        determined.
    looked_at
        The import's set of the initialisers that `array` has shown. Their values are part of the graph.
    """

    __slots__ = (
        "_array",
        "_laid_out",
        "_tensor",
        "_weight",
        "biases",
        "digest",
        "dims",
        "dtype",
        "fixed",
        "key",
        "looked_at",
        "made_by",
        "origin",
        "says",
        "standing",
        "turned_from",
    )

    def __init__(
        self,
        dims: tuple[int, ...],
        dtype: np.dtype[Any],
        tensor: Callable[[], Tensor] | Tensor,
        array: Callable[[], np.ndarray] | Pending | Undecided | np.ndarray,
        *,
        fixed: bool = False,
        weight: Callable[..., Tensor] | None = None,
    ) -> None:
        self.dims, self.dtype, self.fixed = dims, dtype, fixed
        self._tensor, self._array, self._weight = tensor, array, weight
        self._laid_out: dict[Layout, Tensor] = {}
        self.made_by: Any = None
        self.standing: Any = None
        self.turned_from: Value | None = None
        self.key = self.digest = ""
        self.origin: Origin | None = None
        self.biases: dict[tuple[DType, float, bool], Tensor] = {}
        self.says: str | None = None
        self.looked_at: set[str] = set()

    def stored_as(self, dtype: DType) -> Value:
        """A constant of floats that is a weight of another floating-point dtype.

        If its elements are read here, they are within that dtype's limits, but not rounded.
        """
        assert self._weight is not None, "constants are weights"
        weight = functools.partial(self._weight, dtype=dtype)

        def bounded_elements() -> np.ndarray:
            return _within_limits(self.elements, dtype)

        made = Value(self.dims, dtype.numpy, weight, bounded_elements, fixed=True, weight=weight)
        if (origin := self.origin) is not None:
            key = f"{origin.key} within {dtype}"
            made.origin = Origin(
                key=key,
                names=origin.names,
                compute=lambda *given: _within_limits(origin.derive(*given), dtype),
                parts=(origin,),
            )
            made.looked_at = self.looked_at
        return made

    @property
    def is_in_graph(self) -> bool:
        """Whether the value is a tensor of the graph already."""
        return isinstance(self._tensor, Tensor)

    @property
    def tensor(self) -> Tensor:
        """The value as a tensor of the graph."""
        if not isinstance(self._tensor, Tensor):
            self._tensor = self._tensor()
        return self._tensor

    def laid_out(self, g: GraphBuilder, layout: Layout) -> Tensor:
        """The value as a tensor with that layout. A weight is uploaded in it; a computed value is copied,
        once."""
        if layout not in self._laid_out:
            weight = self._weight
            self._laid_out[layout] = weight(layout) if weight else g.to_layout(self.tensor, layout)
        return self._laid_out[layout]

    @property
    def array(self) -> np.ndarray:
        """The elements, for decisions over the graph: they count as part of it. Raises as `elements`."""
        if self.origin is not None:
            self.looked_at |= self.origin.names
        return self.elements

    @property
    def elements(self) -> np.ndarray:
        """The elements. Raises `Undecided` with all inputs whose values are needed for them."""
        if isinstance(self._array, np.ndarray):
            return self._array
        needed = self._sources_in_order()
        arrays = [value._array for value in needed]
        undecided = [array.names for array in arrays if isinstance(array, Undecided)]
        if undecided:
            raise Undecided(frozenset().union(*undecided))
        for value in needed:
            found = value._array  # read once: another thread, with a weight of the same source, may set it
            if isinstance(found, Pending):
                value._array = found.compute()
            elif callable(found):
                value._array = found()
        elements = needed[-1]._array
        assert isinstance(elements, np.ndarray), "this value is the last of the needed ones"
        return elements

    def _sources_in_order(self) -> list[Value]:
        """This value, and all values from which its elements are computed, as far as their elements are not
        computed yet. This value is last.

        Each value comes after those from which it is computed. A chain of many nodes would be too deep for
        recursion.
        """
        order: dict[int, Value] = {}
        entered: set[int] = set()
        waiting: list[Value] = [self]
        while waiting:
            value = waiting[-1]
            if id(value) in entered:
                order[id(value)] = waiting.pop()
                continue
            entered.add(id(value))
            found = value._array
            sources = found.sources if isinstance(found, Pending) else ()
            waiting += [
                each
                for each in sources
                if each is not None and id(each) not in entered and not isinstance(each._array, np.ndarray)
            ]
        return list(order.values())

    @property
    def is_constant(self) -> bool:
        """Whether it is known without the graph, which does not compute it."""
        return isinstance(self._array, np.ndarray) and (self.fixed or not isinstance(self._tensor, Tensor))

    @property
    def rank(self) -> int:
        """How many dims the value has."""
        return len(self.dims)

    @property
    def size(self) -> int:
        """How many elements the value has."""
        return int(np.prod(self.dims, dtype=np.int64))

    @property
    def known_dtype(self) -> DType | None:
        """The dtype as a `DType` of tensors; None if no tensor can have it."""
        return DType.of(self.dtype)

    @property
    def type(self) -> onnx.TypeProto:
        """The value's type in ONNX, with its dims."""
        code = onnx.helper.np_dtype_to_tensor_dtype(self.dtype)
        return onnx.helper.make_tensor_type_proto(code, self.dims)

    @property
    def is_half(self) -> bool:
        """Whether the dtype is a floating-point type of 16 bits."""
        return self.known_dtype is not None and self.known_dtype.is_half


def _within_limits(array: np.ndarray, dtype: DType) -> np.ndarray:
    """An array whose finite elements are within a dtype's limits."""
    limit = largest(dtype)
    beyond = np.isfinite(array) & (np.abs(array) > limit)
    return np.where(beyond, np.sign(array) * limit, array) if beyond.any() else array
