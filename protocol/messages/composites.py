"""The convolution messages as graphs: a convolution, and the pointwise operations after it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.messages.convolution_checks import (
    check_bias,
    check_dtypes,
    check_scalars,
    check_types,
)
from cudnn_actor.protocol.messages.messages import ConvBwdData, ConvBwdFilter, ConvFwd
from cudnn_actor.protocol.operations import (
    ConvolutionBackwardData,
    ConvolutionBackwardFilter,
    ConvolutionForward,
    GraphTensor,
    Node,
    Pointwise,
    PointwiseMode,
    TensorRole,
)
from cudnn_actor.protocol.operations.base import tensor_of
from cudnn_actor.protocol.operations.convolution import Convolution, check_dims, type_of_sums
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.epilogue import Activation
from cudnn_actor.protocol.types.tensor import Layout, TensorSpec

__all__ = ["Assembled", "assemble", "signature"]

Composite = ConvFwd | ConvBwdData | ConvBwdFilter
_OPERATIONS: dict[type[Composite], type[Convolution[Any]]] = {
    ConvFwd: ConvolutionForward,
    ConvBwdData: ConvolutionBackwardData,
    ConvBwdFilter: ConvolutionBackwardFilter,
}
Signature = tuple[object, ...]


class Assembled(NamedTuple):
    """A message's graph, and the message's field for each tensor that is bound or a scalar, by uid.

    `views`: the fields of buffers that the graph uses with other dims than the buffer's own, a bias of dims
    (K,) as (1, K, 1, ...), each with the spec that it is used with.
    """

    graph: OperationGraph
    names: Mapping[int, str]
    views: Mapping[str, TensorSpec]


def signature(message: Composite) -> Signature:
    """A hashable key: equal for messages that lower to the same graph with the same bindings.

    Raises `AttributeError` or `TypeError` if a field has the wrong type; `lower` then reports which.
    """
    check_scalars(message)
    alpha, beta = message.alpha == 1.0, message.beta == 0.0
    if type(message) is ConvFwd:
        bias = None if message.bias is None else message.bias.spec
        specs = (message.x.spec, message.w.spec, message.y.spec)
        return (ConvFwd, *specs, bias, message.conv, message.epilogue, message.numerics, alpha, beta)
    if type(message) is ConvBwdData:
        first, second, result = message.dy, message.w, message.dx
    else:
        first, second, result = message.x, message.dy, message.dw  # type: ignore[union-attr]
    specs = (first.spec, second.spec, result.spec)
    return (type(message), *specs, message.conv, message.numerics, alpha, beta)


def assemble(message: Composite) -> Assembled:
    """Check everything that depends on shapes, and assemble the message's graph.

    Raises
    ------
    InvalidRequest
        A field has the wrong type, or shapes, channels, groups, ranks or dtypes do not match; the text
        names the field, its value and the fix.
    """
    check_types(message)
    check_scalars(message)
    operation = _OPERATIONS[type(message)]
    specs = {name: getattr(message, name).spec for name in (*operation.inputs, *operation.outputs)}
    check_dims(operation, message.conv, specs)
    check_dtypes(specs, operation)
    return _Builder(message, specs).build()


class _Builder:
    """Assembles one message's graph: the convolution, then the pointwise steps that the message needs."""

    def __init__(self, message: Composite, specs: dict[str, TensorSpec]) -> None:
        self.message = message
        self.names = tuple(specs)
        self.output = self.names[-1]
        self.spec = specs[self.output]
        self.specs = specs
        self.tensors: list[GraphTensor] = []
        self.operations: list[Node] = []
        self.names_of: dict[int, str] = {}
        self.views: dict[str, TensorSpec] = {}
        self.previous: int | None = None
        """The result's old values, if they are read."""
        dtype = specs[self.names[0]].dtype
        self.pointwise = DType.FLOAT64 if dtype is DType.FLOAT64 else DType.FLOAT32

    def build(self) -> Assembled:
        steps = self._steps()
        operands = [self._bind(name, self.specs[name]) for name in self.names[:-1]]
        value = self._convolution(operands, last=not steps)
        for number, (mode, other, parameter) in enumerate(steps, start=1):
            result = self._result() if number == len(steps) else self._virtual(self.pointwise)
            operands = [value] if other is None else [value, other]
            self._pointwise(mode, operands, result, parameter)
            value = result
        graph = OperationGraph(
            tensors=tuple(self.tensors), operations=tuple(self.operations), numerics=self.message.numerics
        )
        return Assembled(graph, self.names_of, self.views)

    def _steps(self) -> list[tuple[PointwiseMode, int | None, float | None]]:
        """The pointwise operations after the convolution: (mode, second operand, parameter)."""
        steps: list[tuple[PointwiseMode, int | None, float | None]] = []
        if self.message.alpha != 1.0:
            steps.append((PointwiseMode.MUL, self._scalar("alpha"), None))
        if self.message.beta != 0.0:
            scaled = self._virtual(self.pointwise)
            self.previous = self._bind(self.output, self.spec)
            self._pointwise(PointwiseMode.MUL, [self.previous, self._scalar("beta")], scaled, None)
            steps.append((PointwiseMode.ADD, scaled, None))
        if isinstance(self.message, ConvFwd):
            steps += self._epilogue_steps(self.message)
        return steps

    def _epilogue_steps(self, message: ConvFwd) -> list[tuple[PointwiseMode, int | None, float | None]]:
        steps: list[tuple[PointwiseMode, int | None, float | None]] = []
        if message.bias is not None:
            steps.append((PointwiseMode.ADD, self._bias(message.bias.spec), None))
        if message.epilogue.activation != Activation.IDENTITY:
            mode = PointwiseMode(message.epilogue.activation)
            steps.append((mode, None, message.epilogue.effective_parameter))
        return steps

    def _bias(self, spec: TensorSpec) -> int:
        filters = self.spec.dims[1]
        broadcast = (1, filters, *(1 for _ in self.spec.dims[2:]))
        check_bias(spec, broadcast, (self.spec.dtype, self.pointwise))
        step = spec.strides[0] if spec.rank == 1 else spec.strides[1]
        strides = (filters * step, step, *(step for _ in broadcast[2:]))
        shaped = TensorSpec(dims=broadcast, strides=strides, dtype=spec.dtype, alignment=spec.alignment)
        if shaped.dims != spec.dims:
            self.views["bias"] = shaped
        return self._bind("bias", shaped)

    def _convolution(self, operands: list[int], *, last: bool) -> int:
        sums = type_of_sums(self.specs[self.names[0]].dtype)
        result = self._result() if last else self._virtual(sums)
        uids: Any = dict(zip(self.names, (*operands, result), strict=True))
        self.operations.append(_OPERATIONS[type(self.message)](**uids, conv=self.message.conv))
        return result

    def _pointwise(
        self, mode: PointwiseMode, operands: list[int], result: int, parameter: float | None
    ) -> None:
        operation = Pointwise(mode=mode, operands=tuple(operands), result=result, parameter=parameter)
        self.operations.append(operation)

    def _bind(self, name: str, spec: TensorSpec, overwrites: int | None = None) -> int:
        uid = self._add(spec, TensorRole.BOUND, name, overwrites)
        self.names_of[uid] = name
        return uid

    def _result(self) -> int:
        return self._bind(self.output, self.spec, overwrites=self.previous)

    def _virtual(self, dtype: DType) -> int:
        layout = Layout.NHWC if self.spec.layout is Layout.NHWC else Layout.NCHW
        return self._add(TensorSpec.packed(self.spec.dims, dtype, layout), TensorRole.VIRTUAL)

    def _scalar(self, name: str) -> int:
        one = TensorSpec.packed((1,) * self.spec.rank, self.pointwise)
        uid = self._add(one, TensorRole.SCALAR, name)
        self.names_of[uid] = name
        return uid

    def _add(self, spec: TensorSpec, role: TensorRole, name: str = "", overwrites: int | None = None) -> int:
        uid = len(self.tensors)
        self.tensors.append(tensor_of(uid, spec, role=role, overwrites=overwrites, name=name))
        return uid
