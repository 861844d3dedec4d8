"""The tensors of a graph that is being built, with NumPy's operators and methods."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from cudnn_actor.protocol.errors import NoValues
from cudnn_actor.protocol.operations import TensorRole
from cudnn_actor.protocol.types.dtypes import DType, DTypeLike
from cudnn_actor.protocol.types.other_names import no_attribute
from cudnn_actor.protocol.types.short_repr import one_line
from cudnn_actor.protocol.types.spelling import check_spelling
from cudnn_actor.protocol.types.tensor import TensorSpec

if TYPE_CHECKING:
    from cudnn_actor.protocol.graphs.graph_builder import GraphBuilder

__all__ = ["Axes", "Made", "Number", "Tensor"]

_LONGEST_LABEL = 60
"""The most characters of a label in a tensor's repr."""

Number = float | int
Axes = int | Sequence[int] | None
"""One dim, several, or None for all."""


class Made(NamedTuple):
    """The record of a tensor while the graph is built.

    `spec` has the dtype that it has where it is stored. `role`: bound for an input. `label`: for people.
    `kept`: it has that dtype wherever it is read, since the user asked for it.
    """

    spec: TensorSpec
    role: TensorRole
    label: str
    value: Number | None = None
    kept: bool = False


def _operator(name: str) -> Callable[[Tensor, Any], Tensor]:
    """The builder's function of that name as an operator."""

    def apply(self: Tensor, other: Any) -> Tensor:
        made: Tensor = getattr(self.builder, name)(self, other)
        return made

    return apply


def _reflect(name: str) -> Callable[[Tensor, Any], Tensor]:
    """A function of the builder as an operator whose tensor is on the right."""

    def apply(self: Tensor, other: Any) -> Tensor:
        made: Tensor = getattr(self.builder, name)(other, self)
        return made

    return apply


class Tensor:
    """A tensor of a graph that is being built. Made by a `GraphBuilder`; holds no values.

    Arithmetic, comparisons, indexing and the methods below add operations to the graph.
    """

    __slots__ = ("builder", "number")

    def __init__(self, builder: GraphBuilder, number: int) -> None:
        self.builder = builder
        self.number = number

    @property
    def _entry(self) -> Made:
        return self.builder._tensors[self.number]

    @property
    def dims(self) -> tuple[int, ...]:
        """The tensor's dims."""
        return self._entry.spec.dims

    @property
    def shape(self) -> tuple[int, ...]:
        """The tensor's dims, under NumPy's name."""
        return self.dims

    @property
    def dtype(self) -> DType:
        """The element type that it has where it is stored."""
        return self._entry.spec.dtype

    @property
    def rank(self) -> int:
        """How many dims it has."""
        return len(self.dims)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise AttributeError(no_attribute("Tensor", name, dir(type(self.builder)), dir(type(self))))

    def __repr__(self) -> str:
        return f"<{one_line(self._entry.label or 'tensor', _LONGEST_LABEL)}: {self.dtype} {self.dims}>"

    def __hash__(self) -> int:
        return id(self)

    def __iter__(self) -> Iterator[Tensor]:
        if not self.dims:
            raise TypeError("a tensor without dims cannot be iterated")
        return (self[place] for place in range(self.dims[0]))

    def __len__(self) -> int:
        if not self.dims:
            raise TypeError("a tensor without dims has no len()")
        return self.dims[0]

    def __array__(self, *_: Any, **__: Any) -> NoReturn:  # else NumPy would read element after element
        raise NoValues(what=repr(self), fix="build the graph, run it, and download its output")

    def __array_ufunc__(self, function: Any, method: str, *operands: Any, **options: Any) -> Tensor:
        """Take part in operators of NumPy's numbers, `np.float32(2) * x`; functions of NumPy raise."""
        name = {"remainder": "mod"}.get(function.__name__, function.__name__)
        own = getattr(type(self.builder), name, None)
        if method != "__call__" or options or own is None or function.nin == 1:
            raise self._unreadable(f"numpy.{function.__name__}", "" if own is None else name)
        # NumPy has made arrays without dims of its numbers.
        numbers = [one[()] if isinstance(one, np.ndarray) and not one.shape else one for one in operands]
        return own(self.builder, *numbers)  # type: ignore[no-any-return]

    def __array_function__(self, function: Any, *_: Any) -> NoReturn:
        name = function.__name__
        raise self._unreadable(f"numpy.{name}", name if hasattr(type(self.builder), name) else "")

    def _unreadable(self, function: str, own: str) -> NoValues:
        instead = f"use g.{own}, of the builder, in the place of {function}"
        return NoValues(
            what=repr(self), fix=instead if own else f"a graph has no {function}: help(GraphBuilder)"
        )

    def __bool__(self) -> bool:
        raise TypeError("a tensor of a graph has no truth value while the graph is built; use g.where")

    # Operators.

    __add__, __radd__ = _operator("add"), _reflect("add")
    __sub__, __rsub__ = _operator("subtract"), _reflect("subtract")
    __mul__, __rmul__ = _operator("multiply"), _reflect("multiply")
    __truediv__, __rtruediv__ = _operator("divide"), _reflect("divide")
    __floordiv__, __rfloordiv__ = _operator("floor_divide"), _reflect("floor_divide")
    __mod__, __rmod__ = _operator("mod"), _reflect("mod")
    __pow__, __rpow__ = _operator("power"), _reflect("power")
    __and__, __rand__ = _operator("bitwise_and"), _reflect("bitwise_and")
    __or__, __ror__ = _operator("bitwise_or"), _reflect("bitwise_or")
    __xor__, __rxor__ = _operator("bitwise_xor"), _reflect("bitwise_xor")
    __lshift__, __rlshift__ = _operator("left_shift"), _reflect("left_shift")
    __rshift__, __rrshift__ = _operator("right_shift"), _reflect("right_shift")
    __matmul__, __rmatmul__ = _operator("matmul"), _reflect("matmul")
    __eq__, __ne__ = _operator("equal"), _operator("not_equal")  # type: ignore[assignment]
    __lt__, __le__ = _operator("less"), _operator("less_equal")
    __gt__, __ge__ = _operator("greater"), _operator("greater_equal")

    def __neg__(self) -> Tensor:
        return self.builder.negative(self)

    def __abs__(self) -> Tensor:
        return self.builder.abs(self)

    def __invert__(self) -> Tensor:
        return self.builder.bitwise_not(self)

    def __getitem__(self, index: Any) -> Tensor:
        return self.builder.slice(self, index)

    @check_spelling
    def astype(self, dtype: DTypeLike) -> Tensor:
        """Rounded to another type: integers saturate, and NaN becomes 0."""
        return self.builder.astype(self, dtype)

    # Movement.

    @check_spelling
    def reshape(self, *dims: int | Sequence[int]) -> Tensor:
        """The tensor with other dims, as by NumPy's `reshape`; one of them may be -1."""
        return self.builder.reshape(self, _flat(dims))

    @check_spelling
    def transpose(self, *axes: int | Sequence[int]) -> Tensor:
        """The tensor with its axes in another order, or reversed if none is given, as by NumPy's
        `transpose`."""
        return self.builder.transpose(self, _flat(axes) or None)

    # Reductions.

    @check_spelling
    def sum(
        self, axis: Axes = None, *, keepdims: bool = False, compute_dtype: DTypeLike | None = None
    ) -> Tensor:
        """The sum of the elements along these dims. `compute_dtype`: as in `GraphBuilder.reduce`."""
        return self.builder.sum(self, axis, keepdims=keepdims, compute_dtype=compute_dtype)

    @check_spelling
    def mean(
        self, axis: Axes = None, *, keepdims: bool = False, compute_dtype: DTypeLike | None = None
    ) -> Tensor:
        """The mean of the elements along these dims. `compute_dtype`: as in `GraphBuilder.reduce`."""
        return self.builder.mean(self, axis, keepdims=keepdims, compute_dtype=compute_dtype)

    @check_spelling
    def max(self, axis: Axes = None, *, keepdims: bool = False) -> Tensor:
        """The largest element along these dims."""
        return self.builder.max(self, axis, keepdims=keepdims)

    @check_spelling
    def min(self, axis: Axes = None, *, keepdims: bool = False) -> Tensor:
        """The smallest element along these dims."""
        return self.builder.min(self, axis, keepdims=keepdims)

    @check_spelling
    def all(self, axis: Axes = None, *, keepdims: bool = False) -> Tensor:
        """Whether all elements along these dims are true, or not 0."""
        return self.builder.all(self, axis, keepdims=keepdims)

    @check_spelling
    def any(self, axis: Axes = None, *, keepdims: bool = False) -> Tensor:
        """Whether any element along these dims is true, or not 0."""
        return self.builder.any(self, axis, keepdims=keepdims)

    @check_spelling
    def var(self, axis: Axes = None, *, ddof: float = 0, keepdims: bool = False) -> Tensor:
        """The variance along these dims."""
        return self.builder.var(self, axis, ddof=ddof, keepdims=keepdims)

    @check_spelling
    def std(self, axis: Axes = None, *, ddof: float = 0, keepdims: bool = False) -> Tensor:
        """The standard deviation along these dims."""
        return self.builder.std(self, axis, ddof=ddof, keepdims=keepdims)

    @property
    def T(self) -> Tensor:  # noqa: N802 - as in NumPy
        """The tensor with its axes reversed."""
        return self.transpose()


def _flat(given: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(given[0]) if len(given) == 1 and isinstance(given[0], Sequence) else given
