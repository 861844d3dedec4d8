"""Records the operations of a graph that is being built, and what is known of its tensors."""

from __future__ import annotations

import numbers
import sys
from collections import namedtuple
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec

from cudnn_actor.protocol.checks import did_you_mean
from cudnn_actor.protocol.dtypes import DType, DTypeLike
from cudnn_actor.protocol.errors import InvalidRequest, Words
from cudnn_actor.protocol.expressions import Made, Number, Tensor
from cudnn_actor.protocol.limits import GraphLimits
from cudnn_actor.protocol.numerics import Numerics
from cudnn_actor.protocol.operations import (
    FUNCTIONS,
    OPERATIONS,
    Node,
    Operation,
    Pointwise,
    PointwiseMode,
    Reshape,
    TensorRole,
    Transpose,
)
from cudnn_actor.protocol.tensor import Layout, TensorSpec

if TYPE_CHECKING:
    from cudnn_actor.protocol.graph_builder import GraphBuilder

__all__ = ["Recorder"]

_OWN = __name__.rpartition(".")[0] + "."
"""What the names of this package's modules begin with."""
_LARGEST = 2.0**128 - 2.0**103
"""Below it, every number rounds to a float32 that is not infinite."""


class Recorder:
    """Records operations on tensors: what all functions of a `GraphBuilder` add to the graph by."""

    def __init__(self, numerics: Numerics | None = None, *, limits: GraphLimits | None = None) -> None:
        self._numerics = numerics or Numerics()
        self._limits = limits or GraphLimits()
        self._writers: dict[int, int] = {}
        """Results → the places of the operations that write them."""
        self._tensors: list[Made] = []
        self._operations: list[Node] = []
        self._constants: dict[tuple[Number, type, DType, tuple[int, ...]], int] = {}
        self.place = ""
        """What adds the operations that follow, for people; empty for the line of code that does."""
        self._gradient_of = ""
        """While `grad` adds operations: the label of what they are the gradient of."""

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
            name: self._add(Made(self._laid_out(node, inferred[name], specs), TensorRole.VIRTUAL, label))
            for name in names
        }
        changes = {name: results.get(name) for name in operation.outputs}
        self._limits.check_operations(len(self._operations) + 1)
        self._writers |= dict.fromkeys(results.values(), len(self._operations))
        self._operations.append(cast("Node", msgspec.structs.replace(node, **changes)))
        made = [self._tensor(number) for number in results.values()]
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
        chosen = operands[1:] if mode == PointwiseMode.SELECT else operands  # a condition decides no type
        typed = [operand for operand in chosen if isinstance(operand, Tensor)] or tensors
        stored = _promoted([tensor.dtype for tensor in typed], chosen)
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
            if missing <= 0:
                return operand
            return self._result(Reshape(x=operand, dims=(1,) * missing + operand.dims))
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
            made = Made(TensorSpec.packed(dims, dtype), TensorRole.CONSTANT, label, number)
            self._constants[key] = self._add(made)
        return self._tensor(self._constants[key])

    def _converted(self, x: Tensor, dtype: DTypeLike, *, kept: bool) -> Tensor:
        """x with another dtype; `kept`: wherever it is read, else where it is stored."""
        made = self._result(Pointwise(mode=PointwiseMode.IDENTITY, operands=(x,)))
        spec = TensorSpec.packed(x.dims, dtype, made._made.spec.layout)
        self._tensors[made.number] = made._made._replace(spec=spec, kept=kept)
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
        number = operation.writes[0].number
        place = self._writers[number]
        node = self._operations[place]
        made: int | None = getattr(node, name)
        if made is None:
            specs = {n: self._tensors[uid].spec for n, uid in node.named(node.inputs)}
            spec = self._laid_out(node, node.infer(specs)[name], specs)
            made = self._add(Made(spec, TensorRole.VIRTUAL, self._tensors[number].label))
            self._operations[place] = msgspec.structs.replace(node, **{name: made})
            self._writers[made] = place
        return self._tensor(made)

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
        return Tensor(cast("GraphBuilder", self), number)

    def _result(self, operation: Operation[Any]) -> Tensor:
        """The result of an operation that has one."""
        made: Tensor = self.apply(operation)
        return made

    def _add(self, made: Made) -> int:
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
    """Where the code is, outside of this package, that adds an operation: "file.py:12"."""
    frame = sys._getframe(1)
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).startswith(_OWN):
        frame = frame.f_back
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"
