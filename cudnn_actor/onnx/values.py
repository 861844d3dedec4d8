"""What a name of a model stands for while the model is imported: a constant, or a tensor of the graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

from cudnn_actor.protocol.dtypes import DType
from cudnn_actor.protocol.graph_builder import GraphBuilder, Tensor
from cudnn_actor.protocol.tensor import Layout

__all__ = ["Contradiction", "Declined", "Empty", "Pending", "Refused", "Undecided", "Value"]

_NOTHING: frozenset[str] = frozenset()


class Contradiction(Exception):
    """Raised for a node that contradicts what ONNX says of its operator. Its text says how, for people."""


class Declined(Exception):
    """Raised by a handler that cannot run a node. Its text is the reason, for people."""


class Refused(Declined):
    """Raised by a handler for a node that the function which defines its operator must not run, either."""


class Empty(Exception):
    """Raised when a tensor without elements would have to be in the graph."""


class Undecided(Exception):
    """Raised when a value decides over shapes, and derives from inputs whose values are not known yet."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__(", ".join(sorted(names)))
        self.names = names


@dataclass(frozen=True, eq=False)
class Pending:
    """Elements that are computed once somebody asks for them.

    `check`: raises `Undecided` if they derive from inputs whose values are not known. `sources`: the values
    that have to be there before. `compute`: gives them.
    """

    check: Callable[[], None]
    sources: Sequence[Value | None]
    compute: Callable[[], np.ndarray]


class Value:
    """A value of the model: its dims and dtype are known, and perhaps its elements.

    Parameters
    ----------
    dims
        Its dims.
    dtype
        NumPy's dtype of its elements.
    tensor
        Gives it as a tensor of the graph, or raises `Declined`.
    weight
        Gives it as a weight with that layout, if its elements are known.
    array
        Its elements, or how they are found; a function raises `Undecided` where they are not known.
    fixed
        Whether the elements do not depend on any input: the value is a constant of the model.
    origins
        The inputs that it derives from.

    Attributes
    ----------
    made_by
        The `Node` whose result it is; None if it is an input, a constant or the result of a function.
    """

    __slots__ = ("_array", "_laid_out", "_tensor", "_weight", "dims", "dtype", "fixed", "made_by", "origins")

    def __init__(
        self,
        dims: tuple[int, ...],
        dtype: np.dtype[Any],
        tensor: Callable[[], Tensor] | Tensor,
        array: Callable[[], np.ndarray] | Pending | np.ndarray,
        *,
        fixed: bool = False,
        origins: frozenset[str] = _NOTHING,
        weight: Callable[[Layout], Tensor] | None = None,
    ) -> None:
        self.dims, self.dtype, self.fixed, self.origins = dims, dtype, fixed, origins
        self._tensor, self._array, self._weight = tensor, array, weight
        self._laid_out: dict[Layout, Tensor] = {}
        self.made_by: Any = None

    @property
    def tensor(self) -> Tensor:
        """It as a tensor of the graph."""
        if not isinstance(self._tensor, Tensor):
            self._tensor = self._tensor()
        return self._tensor

    def laid_out(self, g: GraphBuilder, layout: Layout) -> Tensor:
        """It as a tensor with that layout. A weight is uploaded so; what is computed is copied, once."""
        if layout not in self._laid_out:
            weight = self._weight
            self._laid_out[layout] = weight(layout) if weight else g.to_layout(self.tensor, layout)
        return self._laid_out[layout]

    @property
    def array(self) -> np.ndarray:
        """Its elements."""
        if isinstance(self._array, np.ndarray):
            return self._array
        if not isinstance(self._array, Pending):
            return self._array()
        self._array.check()
        waiting = [self]  # a chain of many nodes would be too deep for a call in a call
        while waiting:
            value = waiting[-1]
            before = [] if not isinstance(value._array, Pending) else value._array.sources
            if missing := [each for each in before if each is not None and isinstance(each._array, Pending)]:
                waiting += missing
                continue
            if isinstance(value._array, Pending):
                value._array = value._array.compute()
            waiting.pop()
        return self.array

    @property
    def is_constant(self) -> bool:
        """Whether it is known without the graph, which does not compute it."""
        return isinstance(self._array, np.ndarray) and (self.fixed or not isinstance(self._tensor, Tensor))

    @property
    def rank(self) -> int:
        """How many dims it has."""
        return len(self.dims)

    @property
    def size(self) -> int:
        """How many elements it has."""
        return int(np.prod(self.dims, dtype=np.int64))

    @property
    def known(self) -> DType | None:
        """The dtype as tensors have it; None if none can have it."""
        return DType.of(self.dtype)

    @property
    def type(self) -> onnx.TypeProto:
        """Its type, with its dims."""
        code = onnx.helper.np_dtype_to_tensor_dtype(self.dtype)
        return onnx.helper.make_tensor_type_proto(code, self.dims)

    @property
    def is_half(self) -> bool:
        """Whether it is of a floating-point type of 16 bits."""
        return self.known is not None and self.known.is_half
