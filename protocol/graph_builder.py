"""Builds graphs from expressions that read like NumPy's."""

from __future__ import annotations

import math
import numbers
import sys
from collections import namedtuple
from collections.abc import Iterator, Mapping, Sequence
from types import EllipsisType
from typing import Any, NamedTuple, cast, overload

import msgspec

from cudnn_actor.protocol.checks import did_you_mean, is_whole, require_name
from cudnn_actor.protocol.conv import ConvSpec
from cudnn_actor.protocol.dtypes import DType, DTypeLike
from cudnn_actor.protocol.errors import InvalidRequest, Words
from cudnn_actor.protocol.graph import OperationGraph
from cudnn_actor.protocol.graph_functions import Axes, Functions
from cudnn_actor.protocol.graph_gradients import Gradients
from cudnn_actor.protocol.limits import GraphLimits
from cudnn_actor.protocol.named_graph import Graph, Port
from cudnn_actor.protocol.numerics import Numerics
from cudnn_actor.protocol.operations import (
    FUNCTIONS,
    OPERATIONS,
    ConvolutionForward,
    GraphTensor,
    Movement,
    Node,
    Operation,
    Pad,
    Pointwise,
    PointwiseMode,
    Reshape,
    Slice,
    TensorRole,
    Transpose,
)
from cudnn_actor.protocol.tensor import Layout, LayoutLike, TensorSpec

__all__ = ["GraphBuilder", "Tensor"]

Number = float | int
Operand = "Tensor | Number"
_M = PointwiseMode
_Index = int | slice | EllipsisType | None
_LARGEST = 2.0**128 - 2.0**103
"""Below it, every number rounds to a float32 that is not infinite."""


class _Made(NamedTuple):
    """What is known of a tensor while the graph is built.

    `spec` has the dtype that it has where it is stored. `role`: bound for an input. `label`: for people.
    `kept`: it has that dtype wherever it is read, since the user asked for it.
    """

    spec: TensorSpec
    role: TensorRole
    label: str
    value: Number | None = None
    kept: bool = False


class Tensor:
    """A tensor of a graph that is being built. Made by a `GraphBuilder`; holds no values.

    Arithmetic, comparisons, indexing and the methods below add operations to the graph.
    """

    __array_ufunc__ = None  # NumPy's arrays leave operators to this class
    __slots__ = ("builder", "number")

    def __init__(self, builder: GraphBuilder, number: int) -> None:
        self.builder = builder
        self.number = number

    @property
    def _made(self) -> _Made:
        return self.builder._tensors[self.number]

    @property
    def dims(self) -> tuple[int, ...]:
        """Its dims."""
        return self._made.spec.dims

    @property
    def dtype(self) -> DType:
        """The element type that it has where it is stored."""
        return self._made.spec.dtype

    @property
    def rank(self) -> int:
        """How many dims it has."""
        return len(self.dims)

    def __repr__(self) -> str:
        return f"<{self._made.label or 'tensor'}: {self.dtype} {self.dims}>"

    def __hash__(self) -> int:
        return id(self)

    def __iter__(self) -> Iterator[Tensor]:
        if not self.dims:
            raise TypeError("a tensor without dims cannot be iterated")
        return (self[place] for place in range(self.dims[0]))

    def __bool__(self) -> bool:
        raise TypeError("a tensor of a graph has no truth value while the graph is built; use g.where")

    # Operators.

    def __add__(self, other: Any) -> Tensor:
        return self.builder.pointwise(_M.ADD, self, other)

    def __radd__(self, other: Any) -> Tensor:
        return self.builder.pointwise(_M.ADD, other, self)

    def __sub__(self, other: Any) -> Tensor:
        return self.builder.pointwise(_M.SUB, self, other)

    def __rsub__(self, other: Any) -> Tensor:
        return self.builder.pointwise(_M.SUB, other, self)

    def __mul__(self, other: Any) -> Tensor:
        return self.builder.pointwise(_M.MUL, self, other)

    def __rmul__(self, other: Any) -> Tensor:
        return self.builder.pointwise(_M.MUL, other, self)

    def __truediv__(self, other: Any) -> Tensor:
        return self.builder.pointwise(_M.DIV, self, other)

    def __rtruediv__(self, other: Any) -> Tensor:
        return self.builder.pointwise(_M.DIV, other, self)

    def __mod__(self, other: Any) -> Tensor:
        return self.builder.pointwise(_M.MOD, self, other)

    def __rmod__(self, other: Any) -> Tensor:
        return self.builder.pointwise(_M.MOD, other, self)

    def __pow__(self, other: Any) -> Tensor:
        return self.builder.pointwise(_M.POW, self, other)

    def __rpow__(self, other: Any) -> Tensor:
        return self.builder.pointwise(_M.POW, other, self)

    def __and__(self, other: Any) -> Tensor:
        return self.builder.pointwise(_M.BITWISE_AND, self, other)

    def __rand__(self, other: Any) -> Tensor:
        return self.builder.pointwise(_M.BITWISE_AND, other, self)

    def __or__(self, other: Any) -> Tensor:
        return self.builder.pointwise(_M.BITWISE_OR, self, other)

    def __ror__(self, other: Any) -> Tensor:
        return self.builder.pointwise(_M.BITWISE_OR, other, self)

    def __xor__(self, other: Any) -> Tensor:
        return self.builder.pointwise(_M.BITWISE_XOR, self, other)

    def __rxor__(self, other: Any) -> Tensor:
        return self.builder.pointwise(_M.BITWISE_XOR, other, self)

    def __lshift__(self, other: Any) -> Tensor:
        return self.builder.pointwise(_M.SHIFT_LEFT, self, other)

    def __rlshift__(self, other: Any) -> Tensor:
        return self.builder.pointwise(_M.SHIFT_LEFT, other, self)

    def __rshift__(self, other: Any) -> Tensor:
        return self.builder.pointwise(_M.SHIFT_RIGHT, self, other)

    def __rrshift__(self, other: Any) -> Tensor:
        return self.builder.pointwise(_M.SHIFT_RIGHT, other, self)

    def __eq__(self, other: Any) -> Tensor:  # type: ignore[override]
        return self.builder.pointwise(_M.EQ, self, other)

    def __ne__(self, other: Any) -> Tensor:  # type: ignore[override]
        return self.builder.pointwise(_M.NE, self, other)

    def __lt__(self, other: Any) -> Tensor:
        return self.builder.pointwise(_M.LT, self, other)

    def __le__(self, other: Any) -> Tensor:
        return self.builder.pointwise(_M.LE, self, other)

    def __gt__(self, other: Any) -> Tensor:
        return self.builder.pointwise(_M.GT, self, other)

    def __ge__(self, other: Any) -> Tensor:
        return self.builder.pointwise(_M.GE, self, other)

    def __neg__(self) -> Tensor:
        return self.builder.negative(self)

    def __abs__(self) -> Tensor:
        return self.builder.abs(self)

    def __invert__(self) -> Tensor:
        return self.builder.pointwise(_M.BITWISE_NOT, self)

    def __matmul__(self, other: Tensor) -> Tensor:
        return self.builder.matmul(self, other)

    def __getitem__(self, index: Any) -> Tensor:
        return self.builder.slice(self, index)

    def astype(self, dtype: DTypeLike) -> Tensor:
        """Rounded to another type: integers saturate, and NaN becomes 0."""
        return self.builder.astype(self, dtype)

    # Movement.

    def reshape(self, *dims: int | Sequence[int]) -> Tensor:
        """With other dims, as NumPy's `reshape`; one of them may be -1."""
        return self.builder.reshape(self, _flat(dims))

    def transpose(self, *axes: int | Sequence[int]) -> Tensor:
        """With its axes in another order; without any, reversed. As NumPy's `transpose`."""
        return self.builder.transpose(self, _flat(axes) or None)

    # Reductions.

    def sum(self, axis: Axes = None, *, keepdims: bool = False) -> Tensor:
        """The sum of the elements along these dims."""
        return self.builder.sum(self, axis, keepdims=keepdims)

    def mean(self, axis: Axes = None, *, keepdims: bool = False) -> Tensor:
        """The mean of the elements along these dims."""
        return self.builder.mean(self, axis, keepdims=keepdims)

    def max(self, axis: Axes = None, *, keepdims: bool = False) -> Tensor:
        """The largest element along these dims."""
        return self.builder.max(self, axis, keepdims=keepdims)

    def min(self, axis: Axes = None, *, keepdims: bool = False) -> Tensor:
        """The smallest element along these dims."""
        return self.builder.min(self, axis, keepdims=keepdims)

    @property
    def T(self) -> Tensor:  # noqa: N802 - as in NumPy
        """With its axes reversed."""
        return self.transpose()


def _flat(given: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(given[0]) if len(given) == 1 and isinstance(given[0], Sequence) else given


class GraphBuilder(Functions):
    """Builds a graph: declare inputs, compute with them, and `build` with the outputs.

    A mistake raises `InvalidRequest` at the line that makes it. A tensor's dtype is the type that it has
    where it is stored: as an output, or as an input of an operation that is not pointwise. Between pointwise
    operations, values are float32 (float64 if an operand is), and are not rounded to the dtype.

    Parameters
    ----------
    numerics
        TF32 and determinism, for the whole graph.
    limits
        How large the graph may become. The operation that is one too many raises `InvalidRequest`.
    """

    def __init__(self, numerics: Numerics | None = None, *, limits: GraphLimits | None = None) -> None:
        self._numerics = numerics or Numerics()
        self._limits = limits or GraphLimits()
        self._writers: dict[int, int] = {}
        """Results → the places of the operations that write them."""
        self._tensors: list[_Made] = []
        self._operations: list[Node] = []
        self._inputs: dict[str, int] = {}
        self._constants: dict[tuple[Number, type, DType, tuple[int, ...]], int] = {}
        self.place = ""
        """What added the operations that follow, for people; empty for the line of code that does."""
        self._gradient_of = ""
        """While `grad` adds operations: the label of what they are the gradient of."""

    # Inputs and outputs.

    def input(
        self,
        name: str,
        dims: Sequence[int],
        dtype: DTypeLike = DType.FLOAT32,
        *,
        layout: LayoutLike = Layout.NCHW,
    ) -> Tensor:
        """Declare an input. Raises `InvalidRequest` if the name is taken or is no name."""
        self._check_name(name)
        spec = TensorSpec.packed(dims, dtype, layout)
        self._inputs[name] = self._add(_Made(spec, TensorRole.BOUND, name))
        return Tensor(self, self._inputs[name])

    def build(
        self,
        outputs: Mapping[str, Tensor] | None = None,
        /,
        *,
        updates: Mapping[str, Tensor] | None = None,
        **named: Tensor,
    ) -> Graph:
        """The graph that computes these outputs.

        Operations that no output needs are left out. Inputs that nothing reads stay inputs.

        Parameters
        ----------
        outputs, named
            The outputs by name.
        updates
            Inputs' names → the values that their buffers have afterwards, of the same dims. A graph with an
            update is not run again after a crash that interrupts it.

        Raises
        ------
        InvalidRequest
            There is no output, a name is taken, or an update does not fit its input.
        """
        if not (outputs is None or isinstance(outputs, Mapping)):
            raise InvalidRequest(
                field="outputs",
                value=outputs,
                problem="is not a mapping of names to tensors",
                fix="name each output, as in g.build(y=y)",
            )
        wanted = {**(outputs or {}), **named}
        updated = dict(updates or {})
        if not wanted and not updated:
            raise InvalidRequest(
                field="outputs", value=None, problem="are none", fix="name one, as in g.build(y=y)"
            )
        for name, value in wanted.items():
            self._check_name(name)
            self._own(name, value)
        for name, value in updated.items():
            self._check_update(name, value)
            if value.number != self._inputs[name] and value.number in map(self._inputs.get, updated):
                updated[name] = self.pointwise(_M.IDENTITY, value)  # what it holds before its own update
        graph = _Build(self, wanted, updated).graph()
        graph.check(self._limits)
        return graph

    def _check_name(self, name: object) -> None:
        require_name("name", name)
        if name in self._inputs:
            raise InvalidRequest(
                field="name", value=name, problem="is an input's already", fix="choose another"
            )

    def _check_update(self, name: str, value: Tensor) -> None:
        if name not in self._inputs:
            raise InvalidRequest(
                field="updates", value=name, problem="is no input", fix=f"use {', '.join(self._inputs)}"
            )
        self._own(name, value)
        spec = self._tensors[self._inputs[name]].spec
        if value.dims != spec.dims:
            raise InvalidRequest(
                field=name,
                value=value.dims,
                problem="is not the shape of that input",
                fix=f"give it dims {spec.dims}",
            )

    # Operations.

    def apply(
        self,
        operation: Operation[Any],
        *,
        also: Sequence[str] = (),
        like: Mapping[str, Tensor] | None = None,
    ) -> Any:
        """Add an operation on tensors of this builder, as `CudnnRef.apply` runs one on buffers.

        Returns its output; of several, a named tuple of the required ones and those in `also`. An output that
        `like` names has the dims and the dtype of that tensor, as one needs whose dims do not follow from the
        inputs'. Raises `InvalidRequest` if the operands do not fit together.
        """
        if type(operation) not in OPERATIONS:
            raise InvalidRequest(
                field="operation",
                value=Words(type(operation).__name__),
                problem="is not an operation",
                fix="pass one, as in MaxPool(x=x, window=window)",
            )
        operands = {name: self._own(name, operand) for name, operand in operation.named(operation.inputs)}
        node = operation.with_operands(lambda name: operands.get(name, 0))
        specs = {name: self._tensors[number].spec for name, number in operands.items()}
        inferred = node.infer(specs)
        given = {name: self._tensors[self._own(name, tensor)].spec for name, tensor in (like or {}).items()}
        inferred |= {name: spec for name, spec in given.items() if name in operation.outputs}
        unknown = [name for name in (*also, *given) if name not in operation.outputs]
        names = [n for n in operation.outputs if n not in operation.optional or n in also]
        for name in (*unknown, *names):
            if name not in inferred and name in operation.outputs and name not in operation.optional:
                raise InvalidRequest(
                    field=name,
                    value=None,
                    problem="has dims that do not follow from the inputs",
                    fix=f"give them by a tensor that has them: like={{{name!r}: x}}",
                )
            if name not in inferred:
                raise InvalidRequest(
                    field=name,
                    value=None,
                    problem=f"is no output that {operation.kind} has with these inputs",
                    fix=f"use one of {', '.join(inferred)}",
                )
        if given:
            node.check(specs | {name: inferred[name] for name in names})
        name = getattr(operation, "mode", operation.kind)
        label = self._gradient_of or f"{name} at {self.place or _line()}"
        results = {
            name: self._add(_Made(self._laid_out(node, inferred[name], specs), TensorRole.VIRTUAL, label))
            for name in names
        }
        changes = {name: results.get(name) for name in operation.outputs}
        self._limits.check_operations(len(self._operations) + 1)
        self._writers |= dict.fromkeys(results.values(), len(self._operations))
        self._operations.append(cast("Node", msgspec.structs.replace(node, **changes)))
        made = [Tensor(self, number) for number in results.values()]
        if len(made) == 1:
            return made[0]
        return namedtuple(f"{type(operation).__name__}Outputs", names)(*made)

    def pointwise(self, mode: str, *operands: Any, **parameters: float | None) -> Tensor:
        """Add a pointwise operation, with NumPy's broadcasting; operands may be numbers.

        Raises `InvalidRequest` if the shapes do not fit together.
        """
        if mode not in FUNCTIONS:
            known = [str(known) for known in PointwiseMode]
            fix = f"{did_you_mean(mode, known)}use one of: {', '.join(known)}"
            raise InvalidRequest(field="mode", value=mode, problem="is no pointwise mode", fix=fix)
        tensors = [operand for operand in operands if isinstance(operand, Tensor)]
        if not tensors:
            raise InvalidRequest(
                field="operands", value=operands, problem="hold no tensor", fix="compute it in Python"
            )
        rank = max(tensor.rank for tensor in tensors)
        stored = _promoted([tensor.dtype for tensor in tensors], operands)
        aligned = [self._aligned(operand, rank, stored) for operand in operands]
        result = self._result(
            Pointwise(mode=PointwiseMode(mode), operands=tuple(aligned), **parameters)  # type: ignore[arg-type]
        )
        inferred = result._made
        # A comparison's type is not that of its operands.
        computed = self._operations[-1].compute(tuple(tensor.dtype for tensor in aligned))
        dtype = stored if inferred.spec.dtype is computed else inferred.spec.dtype
        spec = TensorSpec.packed(inferred.spec.dims, dtype, inferred.spec.layout)
        self._tensors[result.number] = inferred._replace(spec=spec)
        return result

    def _aligned(self, operand: Any, rank: int, dtype: DType) -> Tensor:
        """An operand as a tensor of that rank, with leading dims of 1."""
        if isinstance(operand, Tensor):
            missing = rank - operand.rank
            return self.reshape(operand, (1,) * missing + operand.dims) if missing > 0 else operand
        if isinstance(operand, bool) or not isinstance(operand, numbers.Real):
            raise InvalidRequest(
                field="operand",
                value=operand,
                problem="is neither a tensor nor a number",
                fix="declare arrays as inputs: g.input(name, dims)",
            )
        number = int(operand) if isinstance(operand, numbers.Integral) else float(operand)
        return self._constant(number, (1,) * rank, dtype)

    def _constant(self, number: Number, dims: tuple[int, ...], dtype: DType) -> Tensor:
        label = str(number)
        if dtype.is_floating:
            number, dtype = float(number), DType.FLOAT64 if dtype is DType.FLOAT64 else DType.FLOAT32
            if abs(number) < _LARGEST:
                number = float(dtype.numpy.type(number))  # 0.1 of float32 is the same number on all engines
        key = (number, type(number), dtype, dims)
        if key not in self._constants:
            made = _Made(TensorSpec.packed(dims, dtype), TensorRole.CONSTANT, label, number)
            self._constants[key] = self._add(made)
        return Tensor(self, self._constants[key])

    # Movement.

    def reshape(self, x: Tensor, dims: Sequence[int]) -> Tensor:
        """x with other dims; one of them may be -1. Raises `InvalidRequest`."""
        wanted = [int(dim) for dim in dims]
        if wanted.count(-1) == 1:
            others = -math.prod(wanted)
            if others > 0 and math.prod(x.dims) % others == 0:
                wanted[wanted.index(-1)] = math.prod(x.dims) // others
        return self._result(Reshape(x=x, dims=tuple(wanted)))

    def transpose(self, x: Tensor, axes: Sequence[int] | None = None) -> Tensor:
        """x with its axes in another order; None reverses them. Raises `InvalidRequest`."""
        order = range(x.rank)[::-1] if axes is None else [a + x.rank if a < 0 else a for a in axes]
        return self._result(Transpose(x=x, axes=tuple(order)))

    def slice(self, x: Tensor, index: Any) -> Tensor:
        """`x[index]`, of whole numbers, slices, `...` and None. Raises `InvalidRequest`."""
        given: list[_Index] = list(index) if isinstance(index, tuple) else [index]
        for one in given:
            if not (one is None or one is Ellipsis or isinstance(one, slice) or is_whole(one)):
                raise InvalidRequest(
                    field="index",
                    value=one,
                    problem="is not a whole number, a slice, ... or None",
                    fix="select elements with those",
                )
        used = sum(one is not None and one is not Ellipsis for one in given)
        if used > x.rank:
            raise InvalidRequest(
                field="index",
                value=used,
                problem=f"has more parts than x has dims: {x.rank}",
                fix="use fewer",
            )
        if given.count(Ellipsis) > 1:
            raise InvalidRequest(field="index", value=index, problem="has more than one ...", fix="use one")
        if Ellipsis not in given:
            given.append(Ellipsis)
        starts, steps, sizes, dims = [], [], [], []
        axis = 0
        for one in given:
            if one is None:
                dims.append(1)
                continue
            for _ in range(x.rank - used if one is Ellipsis else 1):
                size = x.dims[axis]
                if isinstance(one, int):
                    if not -size <= one < size:
                        raise InvalidRequest(
                            field="index",
                            value=one,
                            problem=f"is out of range for axis {axis}, of size {size}",
                            fix=f"use one from {-size} to {size - 1}",
                        )
                    picked = range(one % size, one % size + 1)
                else:
                    picked = range(size)[slice(None) if one is Ellipsis else one]
                    dims.append(len(picked))
                starts.append(picked.start)
                steps.append(picked.step)
                sizes.append(len(picked))
                axis += 1
        made = x
        if any(
            start or step != 1 or size != dim
            for start, step, size, dim in zip(starts, steps, sizes, x.dims, strict=True)
        ):
            made = self._result(Slice(x=x, starts=tuple(starts), steps=tuple(steps), sizes=tuple(sizes)))
        return made if tuple(dims) == made.dims else self.reshape(made, dims)

    def pad(self, x: Tensor, widths: int | Sequence[Sequence[int]], value: Number = 0) -> Tensor:
        """x with a number around it: `widths` before and after each axis, or one width for all.

        Raises `InvalidRequest`. See `Pad`.
        """
        self._own("x", x)
        each = [(widths, widths)] * x.rank if isinstance(widths, int) else [tuple(pair) for pair in widths]
        if any(len(pair) != 2 for pair in each):
            raise InvalidRequest(
                field="widths",
                value=widths,
                problem="are not pairs",
                fix="give (before, after) for each axis",
            )
        before, after = tuple(pair[0] for pair in each), tuple(pair[1] for pair in each)
        return self._result(Pad(x=x, before=before, after=after, steps=(1,) * x.rank, value=float(value)))

    def astype(self, x: Tensor, dtype: DTypeLike) -> Tensor:
        """x rounded to another type: integers saturate, and NaN becomes 0."""
        return self._converted(x, dtype, kept=True)

    def _converted(self, x: Tensor, dtype: DTypeLike, *, kept: bool) -> Tensor:
        """x with another dtype; `kept`: wherever it is read, else where it is stored."""
        made = self._result(Pointwise(mode=PointwiseMode.IDENTITY, operands=(x,)))
        spec = TensorSpec.packed(x.dims, dtype, made._made.spec.layout)
        self._tensors[made.number] = made._made._replace(spec=spec, kept=kept)
        return made

    # Broadcasting.

    def full(self, dims: Sequence[int], value: Number, dtype: DTypeLike = DType.FLOAT32) -> Tensor:
        """A tensor of one value."""
        wanted = TensorSpec.packed(dims, dtype)
        return self._converted(self._constant(value, wanted.dims, wanted.dtype), wanted.dtype, kept=False)

    def broadcast_to(self, x: Tensor, dims: Sequence[int]) -> Tensor:
        """x repeated along its dims of 1, and along new leading dims. Raises `InvalidRequest`."""
        self._own("x", x)
        wanted = tuple(dims)
        if x.dims == wanted:
            return x
        made = self.multiply(x, self._constant(1, wanted, x.dtype))
        if made.dims != wanted:
            raise InvalidRequest(
                field="dims",
                value=wanted,
                problem=f"cannot be reached from dims {x.dims}",
                fix="keep the last dims of x, but for those of 1",
            )
        return made if made.dtype is x.dtype else self._converted(made, x.dtype, kept=False)

    def sum_to(self, x: Tensor, dims: Sequence[int]) -> Tensor:
        """The reverse of `broadcast_to`: the sum over the dims that are 1 in `dims`, or missing in front."""
        self._own("x", x)
        wanted = tuple(dims)
        missing = x.rank - len(wanted)
        kept = (1,) * missing + wanted
        if missing < 0 or any(to not in (1, size) for to, size in zip(kept, x.dims, strict=True)):
            raise InvalidRequest(
                field="dims",
                value=wanted,
                problem=f"are not what dims {x.dims} can be broadcast from",
                fix="use 1 for the dims to sum over, or leave leading ones out",
            )
        axes = tuple(axis for axis, (to, size) in enumerate(zip(kept, x.dims, strict=True)) if to != size)
        made = self.sum(x, axes, keepdims=True) if axes else x
        return made if made.dims == wanted else self.reshape(made, wanted)

    # Gradients.

    def output(self, operation: Operation[Any], name: str) -> Tensor:
        """An output of an operation of this graph, which gets it if it was left out.

        Parameters
        ----------
        operation
            With tensors of this builder as operands, its outputs included: as `Operation.gradient` is called
            on.
        name
            The output's field.
        """
        number = operation.writes[0].number
        place = self._writers[number]
        node = self._operations[place]
        made: int | None = getattr(node, name)
        if made is None:
            specs = {n: self._tensors[uid].spec for n, uid in node.named(node.inputs)}
            spec = self._laid_out(node, node.infer(specs)[name], specs)
            made = self._add(_Made(spec, TensorRole.VIRTUAL, self._tensors[number].label))
            self._operations[place] = msgspec.structs.replace(node, **{name: made})
            self._writers[made] = place
        return self._tensor(made)

    @overload
    def grad(
        self,
        outputs: Tensor | Sequence[Tensor],
        wrt: Tensor,
        upstream: Tensor | Sequence[Tensor | None] | None = None,
    ) -> Tensor: ...
    @overload
    def grad(
        self,
        outputs: Tensor | Sequence[Tensor],
        wrt: Sequence[Tensor],
        upstream: Tensor | Sequence[Tensor | None] | None = None,
    ) -> tuple[Tensor, ...]: ...
    def grad(
        self,
        outputs: Tensor | Sequence[Tensor],
        wrt: Tensor | Sequence[Tensor],
        upstream: Tensor | Sequence[Tensor | None] | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        """The gradients of outputs with respect to tensors of this graph, by operations added to it.

        A gradient has the dims and the dtype of its tensor, and is rounded where any tensor is. Functions
        that are constant between jumps, comparisons and integers have gradients of 0. It may be
        differentiated again, where the operations that it consists of have gradients.

        Parameters
        ----------
        outputs
            What is differentiated: a loss, or several tensors whose gradients add up. Floats.
        wrt
            Inputs, or any other tensors of this builder: one or several. Floats.
        upstream
            The gradient of each output, of its dims. None for ones: what is differentiated is then the sum of
            the output's elements.

        Returns
        -------
        Tensor or tuple of Tensor
            One for each of `wrt`, as that is given. Zeros where no output depends on it.

        Raises
        ------
        InvalidRequest
            A tensor is not of floats, upstream does not fit the outputs, or an operation between them has no
            gradient: the text says which, and where it was added.
        """
        made = list(outputs) if isinstance(outputs, Sequence) else [outputs]
        of = list(wrt) if isinstance(wrt, Sequence) else [wrt]
        for name, tensor in [("outputs", each) for each in made] + [("wrt", each) for each in of]:
            self._own(name, tensor)
        if upstream is None or isinstance(upstream, Tensor):
            upstream = [upstream] * (len(made) if upstream is None else 1)
        found = Gradients(self, made, of, upstream).found()
        return found[0] if isinstance(wrt, Tensor) else tuple(found)

    # Neural networks.

    def conv(
        self,
        x: Tensor,
        w: Tensor,
        *,
        pad: int | Sequence[int] = 0,
        stride: int | Sequence[int] = 1,
        dilation: int | Sequence[int] = 1,
        groups: int = 1,
        bias: Tensor | None = None,
    ) -> Tensor:
        """Convolution forward, plus one bias per filter, of dims (K,). See `ConvFwd`."""
        self._own("x", x)
        spatial = max(x.rank - 2, 1)
        conv = ConvSpec.symmetric(spatial, pad, stride, dilation, groups)
        y = self._result(ConvolutionForward(x=x, w=w, conv=conv))
        if bias is None:
            return y
        self._own("bias", bias)
        if bias.rank == 1:
            bias = self.reshape(bias, (1, *bias.dims, *(1 for _ in range(spatial))))
        return self.pointwise("add", y, bias)

    # What the builder keeps.

    def _own(self, name: str, operand: Any) -> int:
        """The number of a tensor of this builder."""
        if not isinstance(operand, Tensor) or operand.builder is not self:
            raise InvalidRequest(
                field=name,
                value=operand if isinstance(operand, Tensor) else Words(type(operand).__name__),
                problem="is no tensor of this builder",
                fix="declare inputs with g.input(name, dims) of the same builder",
            )
        return operand.number

    def _tensor(self, number: int) -> Tensor:
        return Tensor(self, number)

    def _add(self, made: _Made) -> int:
        self._tensors.append(made)
        return len(self._tensors) - 1

    @staticmethod
    def _laid_out(node: Node, spec: TensorSpec, inputs: Mapping[str, TensorSpec]) -> TensorSpec:
        """A result's spec: channels last if an operand of its rank is, or if a transpose makes it so."""
        if not 3 <= spec.rank <= 5:
            return spec
        last = TensorSpec.packed(spec.dims, spec.dtype, Layout.NHWC)
        if isinstance(node, Transpose):
            seen = node.view(inputs["x"].dims, inputs["x"].strides).strides
            along = zip(spec.dims, seen, last.strides, strict=True)
            return last if all(one == other or size == 1 for size, one, other in along) else spec
        return last if any(i.rank == spec.rank and i.layout is Layout.NHWC for i in inputs.values()) else spec


class _Build:
    """One call of `GraphBuilder.build`."""

    def __init__(
        self, builder: GraphBuilder, outputs: Mapping[str, Tensor], updates: Mapping[str, Tensor]
    ) -> None:
        self._made = builder._tensors
        self._inputs = builder._inputs
        self._numerics = builder._numerics
        self._outputs = {name: tensor.number for name, tensor in outputs.items()}
        self._updates = {name: tensor.number for name, tensor in updates.items()}
        self._operations = self._needed(builder._operations)
        self._read = {uid for operation in self._operations for uid in operation.reads}
        self._declared: dict[int, DType] = {}
        """The dtypes of the tensors, as far as they are known."""
        self._bound: dict[int, str] = {}
        """Results that are outputs or updates → the name."""
        self._extra: dict[int, GraphTensor] = {}
        """Their tensors, by uid."""

    def graph(self) -> Graph:
        for name, number in {**self._outputs, **self._updates}.items():
            self._bind(name, number)
        self._declare()
        uids = dict.fromkeys(uid for op in self._operations for uid in (*op.reads, *op.writes))
        tensors = tuple(self._extra.get(uid) or self._tensor(uid) for uid in uids)
        body = OperationGraph(tensors=tensors, operations=tuple(self._operations), numerics=self._numerics)
        known = {tensor.uid: tensor for tensor in tensors}
        inputs = tuple(
            Port(name=name, spec=self._made[number].spec, uid=number if number in known else None)
            for name, number in self._inputs.items()
        )
        of_name = {name: uid for uid, name in self._bound.items()}
        outputs = tuple(
            Port(name=name, spec=known[of_name[name]].spec, uid=of_name[name]) for name in self._outputs
        )
        return Graph(body=body, inputs=inputs, outputs=outputs)

    def _needed(self, operations: Sequence[Node]) -> list[Node]:
        """The operations that the outputs depend on, in order.

        Their optional outputs are left out if nothing reads them.
        """
        wanted = {*self._outputs.values(), *self._updates.values()}
        kept: list[Node] = []
        for operation in reversed(_without_chains(operations)):
            if not wanted.isdisjoint(operation.writes):
                unread = {
                    name: None
                    for name, uid in operation.named(operation.outputs)
                    if uid not in wanted and name in operation.optional
                }
                kept.append(msgspec.structs.replace(operation, **unread) if unread else operation)
                wanted.update(operation.reads)
        return kept[::-1]

    def _bind(self, name: str, number: int) -> None:
        """Have an output written to a buffer: the tensor itself, or a copy of an input or another output."""
        made = self._made[number]
        before = self._inputs.get(name)
        spec = made.spec if before is None else self._made[before].spec
        # An update is a copy behind all operations: they read what its buffer held before.
        if made.role is TensorRole.VIRTUAL and number not in self._bound and before is None:
            uid = number
        else:
            uid = len(self._made) + len(self._extra)
            copy = Pointwise(mode=PointwiseMode.IDENTITY, operands=(number,), result=uid)
            self._operations.append(copy)
            self._read.add(number)
        self._bound[uid] = name
        if before is not None and before not in self._read:  # else it is no input of the graph
            raise InvalidRequest(
                field=name, value=None, problem="is updated and never read", fix="make it an output"
            )
        self._extra[uid] = GraphTensor(
            uid=uid,
            dims=spec.dims,
            strides=spec.strides,
            dtype=spec.dtype,
            alignment=spec.alignment,
            overwrites=before,
            name=made.label,
        )

    def _tensor(self, uid: int) -> GraphTensor:
        made = self._made[uid]
        spec = made.spec
        return GraphTensor(
            uid=uid,
            dims=spec.dims,
            strides=spec.strides,
            dtype=self._declared[uid],
            role=made.role,
            alignment=spec.alignment,
            value=made.value,
            name=made.label,
        )

    def _declare(self) -> None:
        """Find each tensor's dtype: a virtual one's own where it is stored, else the one that is computed in.

        A tensor is stored if an operation reads it that is not pointwise, or takes integers only, or it is
        moved and then stored.
        """
        stored = set(self._bound)
        for operation in reversed(self._operations):
            match operation:
                case Pointwise(mode=mode):
                    stores = FUNCTIONS[mode].bits
                case Movement(y=y):
                    stores = y in stored
                case _:
                    stores = True
            if stores:
                stored.update(operation.reads)
        declared = self._declared
        for operation in self._operations:
            for uid in operation.reads:
                declared.setdefault(uid, self._made[uid].spec.dtype)
            dtypes = tuple(declared[uid] for uid in operation.reads)
            for name, uid in operation.named(operation.outputs):
                if uid >= len(self._made):  # a copy that `_bind` added
                    continue
                made, computed = self._made[uid], operation.compute(dtypes)
                wide = isinstance(operation, Movement) or not (uid in stored or made.kept)
                fits = wide and self._may_be(operation, name, computed)
                declared[uid] = computed if fits else made.spec.dtype

    def _may_be(self, operation: Node, name: str, dtype: DType) -> bool:
        """Whether a result of an operation may have a dtype."""
        specs = {n: self._made[uid].spec for n, uid in operation.named() if uid < len(self._made)}
        inputs = {
            n: msgspec.structs.replace(specs[n], dtype=self._declared[uid])
            for n, uid in operation.named(operation.inputs)
        }
        try:
            operation.check(specs | inputs | {name: msgspec.structs.replace(specs[name], dtype=dtype)})
        except InvalidRequest:
            return False
        return True


def _without_chains(operations: Sequence[Node]) -> list[Node]:
    """The operations, with each reshape of a reshape as one of what that reshaped."""
    reshaped: dict[int | None, int | None] = {}
    found: list[Node] = []
    for operation in operations:
        if isinstance(operation, Reshape):
            x = reshaped.get(operation.x, operation.x)
            reshaped[operation.y] = x
            found.append(msgspec.structs.replace(operation, x=x))
        else:
            found.append(operation)
    return found


def _promoted(dtypes: Sequence[DType], operands: Sequence[Any]) -> DType:
    """The type of the result of arithmetic: the widest, floating if any is; two half types give float32."""
    floats = {dtype for dtype in dtypes if dtype.is_floating}
    if floats:
        if DType.FLOAT64 in floats:
            return DType.FLOAT64
        return floats.pop() if len(floats) == 1 else DType.FLOAT32
    if any(isinstance(operand, float) for operand in operands):
        return DType.FLOAT32
    return max(dtypes, key=lambda dtype: dtype.itemsize)


def _line() -> str:
    """Where the code is that adds an operation, outside of the builder's: "file.py:12"."""
    frame = sys._getframe(1)
    own = (__name__, Functions.__module__)
    while frame.f_back is not None and frame.f_globals.get("__name__") in own:
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
