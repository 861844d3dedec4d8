"""Records the operations of a graph that is being built, and what is known of its tensors."""

from __future__ import annotations

import numbers
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np

from cudnn_actor.protocol.errors import InvalidRequest, Words
from cudnn_actor.protocol.graphs.compute_types import asks_for_more
from cudnn_actor.protocol.graphs.expressions import Made, Tensor
from cudnn_actor.protocol.graphs.layouts import in_layout_of_operands
from cudnn_actor.protocol.graphs.limits import GraphLimits
from cudnn_actor.protocol.graphs.named_outputs import named_outputs
from cudnn_actor.protocol.graphs.number_ranges import as_compared, require_unsigned
from cudnn_actor.protocol.operations import (
    OPERATIONS,
    Node,
    Operation,
    Pointwise,
    PointwiseMode,
    Reshape,
    TensorRole,
)
from cudnn_actor.protocol.operations.field_checks import check_parameters
from cudnn_actor.protocol.types.checks import (
    as_number,
    did_you_mean,
    require_mapping,
    require_names,
    require_type,
)
from cudnn_actor.protocol.types.dtypes import DType, DTypeLike
from cudnn_actor.protocol.types.numerics import Numerics
from cudnn_actor.protocol.types.spatial import are_several
from cudnn_actor.protocol.types.tensor import TensorSpec

if TYPE_CHECKING:
    from cudnn_actor.protocol.graphs.graph_builder import GraphBuilder

__all__ = ["Recorder", "as_called", "pointwise_mode"]

_OWN = "cudnn_actor.protocol."
"""The prefix of the names of this package's modules."""
_LARGEST = 2.0**128 - 2.0**103
"""Below it, every number rounds to a float32 that is not infinite."""
_OF_LENGTHS = ("input_lengths", "target_lengths", "lengths_q", "lengths_kv")
_INTEGERS = frozenset(("indices", "index", "offsets", "state", "targets", *_OF_LENGTHS))
"""Arguments that are tensors of integers."""


class Recorder:
    """Records operations on tensors: what all functions of a `GraphBuilder` add to the graph by."""

    def __init__(self, numerics: Numerics | None = None, *, limits: GraphLimits | None = None) -> None:
        self._numerics = Numerics() if numerics is None else numerics
        self._limits = GraphLimits() if limits is None else limits
        require_type(
            "numerics", self._numerics, Numerics, "pass one, as in GraphBuilder(Numerics(tf32=True))"
        )
        require_type("limits", self._limits, GraphLimits, "pass some, as in GraphLimits(operations=20_000)")
        self._writers: dict[int, int] = {}
        """Results → the places of the operations that write them."""
        self._tensors: list[Made] = []
        self._operations: list[Node] = []
        self._constants: dict[tuple[str, type, DType, tuple[int, ...]], int] = {}
        self.place = ""
        """The place that error messages give for the operations that follow; empty for the line of code that
        adds them."""
        self._gradient_of = ""
        """The label of the operations that `grad` is adding, "gradient of ..."; empty otherwise."""

    @property
    def added(self) -> int:
        """How many operations have been added."""
        return len(self._operations)

    def apply(
        self,
        operation: Operation[Any],
        *,
        also: Sequence[str] = (),
        like: Mapping[str, Tensor] | None = None,
        compute_dtype: DTypeLike | None = None,
    ) -> Any:
        """Add an operation on tensors of this builder, as `CudnnRef.apply` runs one on buffers.

        Returns its output; of several, a named tuple of the required ones and those in `also`. An output that
        `like` names has the dims and the dtype of that tensor, as one needs whose dims do not follow from the
        inputs'. `compute_dtype`: as in `pointwise`. Raises `InvalidRequest` if the operands do not fit
        together.
        """
        operands = self._operands(operation)
        require_names("also", also, operation.outputs, type(operation).__name__)
        fix = "name the output, as in like={'y': x}"
        require_mapping("like", like, "outputs' names to tensors", fix)
        if compute_dtype is not None:
            return self._computed_in(
                compute_dtype,
                {
                    **dict(operation.named(operation.inputs)),
                    **{f"like {n}": x for n, x in (like or {}).items()},
                },
                lambda of: self.apply(
                    operation.with_operands(of.__getitem__),
                    also=also,
                    like={name: of[f"like {name}"] for name in like or {}},
                ),
                as_stored=not isinstance(operation, Pointwise),
            )
        require_names("like", like or {}, operation.outputs, type(operation).__name__)
        given = {name: self._tensors[self._own(name, tensor)].spec for name, tensor in (like or {}).items()}
        node = check_parameters(operation).with_operands(lambda name: operands.get(name, 0))
        specs = {name: self._tensors[number].spec for name, number in operands.items()}
        inferred = node.infer(specs) | given
        names = [n for n in operation.outputs if n not in operation.optional or n in also]
        for name in names:
            if name not in inferred:
                problem = "has dims that do not follow from the inputs"
                fix = f"give them by a tensor that has them: like={{{name!r}: x}}"
                if name in operation.optional:
                    problem = f"is no output that {type(operation).__name__} has with these inputs"
                    fix = f"use {', '.join(inferred)}"
                raise InvalidRequest(field=name, value=None, problem=problem, fix=fix)
        if given:
            node.check(specs | {name: inferred[name] for name in names})
        label = self._label(operation)
        results = {
            name: self._add(
                Made(in_layout_of_operands(node, inferred[name], specs), TensorRole.VIRTUAL, label)
            )
            for name in names
        }
        changes = {name: results.get(name) for name in operation.outputs}
        if not self._gradient_of:  # `grad` checks when it has dropped what nothing reads
            self._limits.check_operations(len(self._operations) + 1)
        self._record(cast("Node", msgspec.structs.replace(node, **changes)))
        made = [self._tensor(number) for number in results.values()]
        if len(made) == 1:
            return made[0]
        return named_outputs(f"{type(operation).__name__}Outputs", dict(zip(names, made, strict=True)))

    def _computed_in(
        self,
        compute_dtype: DTypeLike,
        operands: Mapping[str, Any],
        add: Callable[[Mapping[str, Any]], Any],
        *,
        as_stored: bool = True,
    ) -> Any:
        """The result of `add` for operands, computed in a type. Raises `InvalidRequest`, also as `add` does.

        `as_stored`: whether operands are read as they are stored, and not as between functions of elements.
        """
        tensors = {name: one for name, one in operands.items() if isinstance(one, Tensor)}
        more = tensors and asks_for_more(compute_dtype, [one.dtype for one in tensors.values()])
        place = len(self._operations)
        usual = add(operands)
        if not more:
            return usual
        self._drop_unread(place, ())  # it has shown that the operands fit, and what dtypes results have
        wide = add({**operands, **{n: self._in_float64(x, as_stored=as_stored) for n, x in tensors.items()}})
        if isinstance(wide, Tensor):
            return self._round(wide, usual.dtype)
        return type(wide)(*(self._round(y, of.dtype) for y, of in zip(wide, usual, strict=True)))

    def _in_float64(self, x: Tensor, *, as_stored: bool) -> Tensor:
        if as_stored and x.dtype.is_half:
            x = self._convert(x, x.dtype, kept=True)
        return self._convert(x, DType.FLOAT64, kept=True) if x.dtype.is_floating else x

    def _round(self, y: Tensor, dtype: DType) -> Tensor:
        return y if y.dtype is dtype else self._convert(y, dtype, kept=True)

    def _label(self, operation: Operation[Any]) -> str:
        """The name of the operation that is added now, for people: "relu at model.py:12"."""
        return self._gradient_of or f"{operation.title} at {self.place or _line()}"

    def _operands(self, operation: Operation[Any]) -> dict[str, int]:
        """The numbers of an operation's inputs, by name. Raises `InvalidRequest`."""
        if type(operation) not in OPERATIONS:
            raise InvalidRequest(
                field="operation",
                value=Words(operation.__name__ if isinstance(operation, type) else repr(operation)),
                problem="is not an operation",
                fix="pass one, as in MaxPool(x=x, window=window)",
            )
        for name in operation.inputs:
            if name not in operation.optional and getattr(operation, name) is None:
                self._own(name, None)
        fixes = {"numerics": "give it to the whole graph: GraphBuilder(numerics)"}
        for name in ("numerics", *operation.outputs):
            if getattr(operation, name) is not None:
                raise InvalidRequest(
                    field=name,
                    value=getattr(operation, name),
                    problem="is not given to an operation of a graph",
                    fix=fixes.get(name, "leave it out: `apply` returns it"),
                )
        return {name: self._own(name, operand) for name, operand in operation.named(operation.inputs)}

    def pointwise(
        self,
        mode: str,
        *operands: Any,
        parameter: float | None = None,
        lower: float | None = None,
        upper: float | None = None,
        alphas: Sequence[float] | None = None,
        compute_dtype: DTypeLike | None = None,
    ) -> Tensor:
        """Add a pointwise operation, with NumPy's broadcasting; operands may be numbers.

        Parameters
        ----------
        mode
            The function.
        operands
            Tensors of this builder, at least one, and numbers.
        parameter, lower, upper
            As in `Pointwise`.
        alphas
            A factor for each operand, by which it is multiplied before: cuDNN's alpha1 and alpha2. Products
            of floats are not rounded in between.
        compute_dtype
            The type that is computed in, of floats: float32 or float64. None for the usual one: float32, or
            float64 if an operand is float64. Float64 of others converts the operands before, and rounds the
            result to the dtype that it has without, wherever it is read. Numbers are then float64, too.

        Raises
        ------
        InvalidRequest
            The operands do not fit together, or they are not computed in that type.
        """
        pointwise_mode(mode)
        tensors = [operand for operand in operands if isinstance(operand, Tensor)]
        if not tensors:
            raise _no_tensors(operands)
        _check_broadcast(operands)
        if compute_dtype is not None:
            made: Tensor = self._computed_in(
                compute_dtype,
                {str(number): operand for number, operand in enumerate(operands)},
                lambda of: self.pointwise(
                    mode, *of.values(), parameter=parameter, lower=lower, upper=upper, alphas=alphas
                ),
                as_stored=False,
            )
            return made
        if alphas is not None:
            scaled = self._scale(operands, alphas)
            return self.pointwise(mode, *scaled, parameter=parameter, lower=lower, upper=upper)
        rank = max(tensor.rank for tensor in tensors)
        chosen = operands[1:] if mode == PointwiseMode.SELECT else operands  # a condition decides no type
        stored = of_numbers = _promote(chosen)
        if len(tensors) < len(operands) and not stored.is_floating:
            mode, operands = as_compared(mode, operands, stored)
        operation: Pointwise[Any] = Pointwise(
            mode=PointwiseMode(mode), operands=(), parameter=parameter, lower=lower, upper=upper
        )
        if len(tensors) < len(operands) and not stored.is_floating:
            computed = operation.compute(
                tuple(one.dtype if isinstance(one, Tensor) else stored for one in operands)
            )
            of_numbers = computed if computed.is_floating else stored  # -1 is no uint64, but may divide one
        aligned = self._align(operands, rank, of_numbers)
        result = self._result(msgspec.structs.replace(operation, operands=tuple(aligned)))
        computed = self._operations[-1].compute(tuple(tensor.dtype for tensor in aligned))
        inferred = result._entry
        dtype = inferred.spec.dtype
        # A comparison gives truth values, and a quotient of integers is no integer.
        if dtype is computed and computed.is_floating <= stored.is_floating:
            dtype = stored
        spec = TensorSpec.packed(inferred.spec.dims, dtype, inferred.spec.layout)
        self._tensors[result.number] = inferred._replace(spec=spec)
        return result

    def _scale(self, operands: Sequence[Any], alphas: object) -> list[Any]:
        """Operands times their factors; those with a factor of 1 as they are."""
        if not are_several(alphas) or len(alphas) != len(operands):
            raise InvalidRequest(
                field="alphas",
                value=alphas,
                problem=f"must have a factor for each of {len(operands)} operands",
                fix="give a tuple of numbers, with 1 for an operand that stays as it is",
            )
        factors = [as_number(f"alphas[{number}]", alpha) for number, alpha in enumerate(alphas)]
        each = zip(operands, factors, strict=True)
        return [operand if factor == 1 else self._product(operand, factor) for operand, factor in each]

    def _product(self, operand: Any, factor: float) -> Any:
        if isinstance(operand, Tensor):
            return self.pointwise(PointwiseMode.MUL, operand, factor)
        return operand * factor

    def _align(self, operands: Sequence[Any], rank: int, dtype: DType) -> list[Tensor]:
        """Operands as tensors of that rank, with leading dims of 1."""
        aligned = []
        for number, operand in enumerate(operands):
            name = f"operands[{number}]"
            if not isinstance(operand, Tensor):
                aligned.append(self._constant(name, operand, (1,) * rank, dtype))
            elif operand.rank == rank:
                aligned.append(operand)
            else:
                dims = (1,) * (rank - operand.rank) + operand.dims
                aligned.append(self._result(Reshape(x=operand, dims=dims), x=name))
        return aligned

    def _constant(self, name: str, number: Any, dims: tuple[int, ...], dtype: DType) -> Tensor:
        """A tensor of one number, which is the caller's argument of that name. Raises `InvalidRequest`."""
        number = as_number(name, number, unsigned=dtype is DType.UINT64 or dtype.is_floating)
        require_unsigned(name, number, dtype)
        label = str(number)
        if dtype.is_floating:
            number, dtype = float(number), DType.FLOAT64 if dtype is DType.FLOAT64 else DType.FLOAT32
            if abs(number) < _LARGEST:
                number = float(dtype.numpy.type(number))  # 0.1 of float32 is the same number on all engines
        key = (str(number), type(number), dtype, dims)  # as text: -0.0 is another number than 0.0
        if key not in self._constants:
            made = Made(TensorSpec.packed(dims, dtype), TensorRole.CONSTANT, label, number)
            self._constants[key] = self._add(made)
        return self._tensor(self._constants[key])

    def _convert(self, x: Tensor, dtype: DTypeLike, *, kept: bool) -> Tensor:
        """x with another dtype; `kept`: wherever it is read, else where it is stored."""
        made = self._result(Pointwise(mode=PointwiseMode.IDENTITY, operands=(x,)))
        spec = TensorSpec.packed(x.dims, dtype, made._entry.spec.layout)
        self._tensors[made.number] = made._entry._replace(spec=spec, kept=kept)
        return made

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
        if not operation.writes:
            raise InvalidRequest(
                field="operation",
                value=operation,
                problem="is no operation of this graph",
                fix="pass the one that `gradient` was called on",
            )
        require_names("name", (name,), operation.outputs, type(operation).__name__)
        number = self._own(operation.outputs[0], operation.writes[0])
        place = self._writers[number]
        node = self._operations[place]
        made: int | None = getattr(node, name)
        if made is None:
            specs = {n: self._tensors[uid].spec for n, uid in node.named(node.inputs)}
            spec = in_layout_of_operands(node, node.infer(specs)[name], specs)
            made = self._add(Made(spec, TensorRole.VIRTUAL, self._tensors[number].label))
            self._operations[place] = msgspec.structs.replace(node, **{name: made})
            self._writers[made] = place
        return self._tensor(made)

    # What the builder keeps.

    def _record(self, node: Node) -> None:
        self._writers |= dict.fromkeys(node.writes, len(self._operations))
        self._operations.append(node)

    def _drop_unread(self, place: int, wanted: Iterable[int]) -> None:
        """Forget the operations from a place on that these tensors do not depend on."""
        read, added = set(wanted), self._operations[place:]
        needed = []
        for node in reversed(added):
            if not read.isdisjoint(node.writes):
                needed.append(node)
                read.update(node.reads)
        if len(needed) < len(added):
            del self._operations[place:]
            for node in reversed(needed):
                self._record(node)

    def _own(self, name: str, operand: Any) -> int:
        """The number of a tensor of this builder. Raises `InvalidRequest`, which names the argument."""
        if not isinstance(operand, Tensor) or operand.builder is not self:
            raise _no_tensor(name, operand)
        return operand.number

    def _tensor(self, number: int) -> Tensor:
        return Tensor(cast("GraphBuilder", self), number)

    def _result(self, operation: Operation[Any], **arguments: str) -> Tensor:
        """The result of an operation that has one. `arguments`: as the names of `as_called`."""
        try:
            made: Tensor = self.apply(operation)
        except InvalidRequest as error:
            raise as_called(error, arguments) from None
        return made

    def _add(self, made: Made) -> int:
        self._tensors.append(made)
        return len(self._tensors) - 1


def pointwise_mode(mode: object) -> PointwiseMode:
    """The mode of that name. Raises `InvalidRequest`."""
    try:
        return PointwiseMode(mode)  # type: ignore[arg-type]
    except ValueError:
        fix = f"{did_you_mean(mode, PointwiseMode)}use one of PointwiseMode"
        raise InvalidRequest(field="mode", value=mode, problem="is no pointwise mode", fix=fix) from None


def as_called(error: InvalidRequest, names: Mapping[str, str]) -> InvalidRequest:
    """The error with the name of the caller's argument as its field.

    `names`: fields → the caller's arguments, where those have other names; of a tuple of operands, the name
    of all, or of one as `operands[0]`.
    """
    field, bracket, number = error.field.partition("[")
    if error.field in names:
        return error.about(names[error.field])
    return error.about(f"{names[field]}{bracket}{number}") if field in names else error


def _no_tensors(operands: Sequence[Any]) -> InvalidRequest:
    """The error for operands of which none is a tensor."""
    if len(operands) == 1:
        return _no_tensor("operands[0]", operands[0])
    return InvalidRequest(
        field="operands[0]" if operands else "operands",
        value=operands[0] if operands else operands,
        problem="is no tensor, and no other operand is one",
        fix="compute with numbers in Python; a tensor is declared by g.input(name, dims)",
    )


def _no_tensor(name: str, given: object) -> InvalidRequest:
    """The error for an argument that is no tensor of the builder."""
    problem = "is no tensor of this builder"
    fix = "declare an input, g.input(name, dims), and give its values when the graph runs"
    if isinstance(given, Tensor):
        problem, fix = "belongs to another builder", "declare an input of this one: g.input(name, dims)"
    elif given is None:
        problem, fix = "is left out", "give a tensor of this builder"
    elif isinstance(given, numbers.Number):
        dtype = ', "int64"' if name in _INTEGERS else ""
        problem, fix = "is a number where a tensor belongs", f"make it a tensor: g.full(dims, value{dtype})"
    elif isinstance(given, tuple) and any(isinstance(one, Tensor) for one in given):
        problem, fix = "is several tensors where one belongs", "give one of them"
    return InvalidRequest(field=name, value=given, problem=problem, fix=fix)


def _check_broadcast(operands: Sequence[Any]) -> None:
    """Raise `InvalidRequest`, which names the operand, unless the tensors of these broadcast as NumPy's."""
    met: dict[int, tuple[int, ...]] = {}
    """Axes, counted from the last → the dims of the first tensor that is not 1 there."""
    for number, operand in enumerate(operands):
        dims: tuple[int, ...] = operand.dims if isinstance(operand, Tensor) else ()
        for axis in range(-len(dims), 0):
            if dims[axis] == 1:
                continue
            first = met.setdefault(axis, dims)
            if first[axis] != dims[axis]:
                raise InvalidRequest(
                    field=f"operands[{number}]",
                    value=dims,
                    problem=f"does not broadcast with dims {first}: along dim {axis} they have the sizes "
                    f"{dims[axis]} and {first[axis]}",
                    fix="give each dim, counted from the last, one size or 1",
                )


def _promote(operands: Sequence[Any]) -> DType:
    """The type of the result of arithmetic on tensors and numbers.

    That of its floats, if any: two half types give float32. Else NumPy's of its integers; uint64 if one is.
    A number takes the type of the tensors: but a float is float32 among integers, and an int is int64 among
    truth values.
    """
    dtypes = {operand.dtype for operand in operands if isinstance(operand, Tensor)}
    floats = {dtype for dtype in dtypes if dtype.is_floating}
    if floats:
        if DType.FLOAT64 in floats:
            return DType.FLOAT64
        return floats.pop() if len(floats) == 1 else DType.FLOAT32
    others = [operand for operand in operands if not isinstance(operand, Tensor)]
    if not all(isinstance(number, numbers.Integral) for number in others):
        return DType.FLOAT32
    if dtypes <= {DType.BOOL}:
        return DType.INT64 if others else DType.BOOL
    if DType.UINT64 in dtypes:
        return DType.UINT64
    found = DType.of(np.result_type(*(dtype.numpy for dtype in dtypes)))
    assert found is not None, "NumPy promotes integers to integers"
    return found


def _line() -> str:
    """The line of code outside of this package that adds an operation: "file.py:12"."""
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(_OWN):
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
