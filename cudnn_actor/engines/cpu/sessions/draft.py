"""An ONNX model of an operation graph, while it is being written.

Floats are float32 inside. A tensor of a half type is rounded where an operation writes it, as it would be if
it were stored, and read as float32 again. Integers and truth values have their own dtype.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NoReturn

import numpy as np
import numpy.typing as npt

from cudnn_actor.engines.cpu.rounding import integer_range
from cudnn_actor.engines.cpu.sessions.onnx_format import (
    ElementType,
    Value,
    external_tensor,
    model,
    node,
    tensor,
)
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.operations import (
    ConvolutionBackwardData,
    ConvolutionForward,
    GraphTensor,
    Operation,
    TensorRole,
)
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import Layout

__all__ = ["Draft", "Unsupported", "memory_order", "refuse"]

_LEAST_INT64 = float(np.iinfo(np.int64).min)
_MOST_INT64 = float(np.nextafter(2.0**63, 0))
_IN_FLOAT32 = frozenset({DType.INT8, DType.UINT8, DType.INT16, DType.UINT16, DType.BOOL})
"""The integers that float32 holds, so that they are not rounded twice on the way to a half type."""


class Unsupported(Exception):
    """Raised for what ONNX Runtime does not have, or computes otherwise."""


def refuse(why: str) -> NoReturn:
    """Raise `Unsupported`."""
    raise Unsupported(why)


class Draft:
    """Nodes and constants, and under which names the values of the graph's tensors are known.

    Parameters
    ----------
    graph
        What is written.
    """

    def __init__(self, graph: OperationGraph) -> None:
        self.graph = graph
        self.inputs: dict[int, str] = {}
        """The bound tensors and scalars that are read, by uid, and the inputs for them."""
        self.outputs: dict[int, str] = {}
        """The bound tensors that are written, likewise."""
        self._nodes: list[bytes] = []
        self._constants: list[bytes] = []
        self._known: dict[tuple[object, ...], str] = {}
        """The names of constants."""
        self._made: set[str] = set()
        """The outputs of nodes."""
        self._values: dict[int, str] = {}
        """The names of values that operations can read."""
        self._convolved = {
            uid
            for operation in graph.operations
            if isinstance(operation, ConvolutionForward | ConvolutionBackwardData)
            for uid in operation.writes
        }
        self._readers: dict[int, list[Operation[int]]] = {}
        self._writers: dict[int, Operation[int]] = {}
        for operation in graph.operations:
            self._writers.update(dict.fromkeys(operation.writes, operation))
            for uid in operation.reads:
                self._readers.setdefault(uid, []).append(operation)
        self._count = 0

    # Nodes.

    def emit(self, operator: str, *inputs: str, **attributes: Value) -> str:
        """Add a node of one output. Returns that. An input that is left out is empty."""
        (found,) = self.emit_several(1, operator, *inputs, **attributes)
        return found

    def emit_several(self, outputs: int, operator: str, *inputs: str, **attributes: Value) -> list[str]:
        """Add a node of several outputs."""
        names = [self._name() for _ in range(outputs)]
        self._made.update(names)
        self._nodes.append(node(operator, inputs, names, attributes, f"{operator}_{len(self._nodes)}"))
        return names

    def constant(self, array: np.ndarray) -> str:
        """A constant of these values."""
        key = array.dtype.str, array.shape, array.tobytes()
        if key not in self._known:
            self._known[key] = name = self._name()
            self._constants.append(tensor(name, array))
        return self._known[key]

    def number(self, value: float, dtype: DType = DType.FLOAT32, rank: int = 0) -> str:
        """A constant of one value."""
        return self.constant(np.full((1,) * rank, value, dtype.numpy))

    def list_of(self, values: npt.ArrayLike) -> str:
        """A constant list of whole numbers."""
        return self.constant(np.array(values, np.int64))

    def cast(self, value: str, dtype: DType) -> str:
        """A value in another dtype, by ONNX's `Cast`."""
        return self.emit("Cast", value, to=ElementType.of(dtype))

    # The graph's tensors.

    def dims(self, uid: int) -> tuple[int, ...]:
        """A tensor's dims."""
        return self.graph.tensor(uid).dims

    def writer_of(self, uid: int) -> Operation[int] | None:
        """The operation that writes a tensor; None of an input."""
        return self._writers.get(uid)

    def readers_of(self, uid: int) -> list[Operation[int] | None]:
        """The operations that read a tensor, and None for one that reads the graph's output."""
        outside = [None] if self.graph.tensor(uid).role is TensorRole.BOUND else []
        return [*self._readers.get(uid, []), *outside]

    def is_number(self, uid: int) -> bool:
        """Whether a tensor is a constant or passed by value: one number in all its elements."""
        return self.graph.tensor(uid).role in (TensorRole.CONSTANT, TensorRole.SCALAR)

    def is_convolved(self, uid: int) -> bool:
        """Whether a convolution writes the tensor, in float32."""
        tensor = self.graph.tensor(uid)
        return tensor.dtype is DType.FLOAT32 and uid in self._convolved

    def type_of(self, uid: int) -> DType:
        """The dtype of what `read` gives: float32 of half types."""
        dtype = self.graph.tensor(uid).dtype
        return DType.FLOAT32 if dtype.is_half else dtype

    def read(self, uid: int) -> str:
        """A tensor's values, of its dims; those of a number have a size of 1 in each dim."""
        if uid not in self._values:
            self._values[uid] = self._input(uid)
        return self._values[uid]

    def read_float(self, uid: int) -> str:
        """The values of floats that are computed with: float32."""
        dtype = self.type_of(uid)
        if dtype is not DType.FLOAT32:
            refuse(f"{dtype} operands")
        return self.read(uid)

    def write(self, uid: int, value: str, *, rounded: bool = False) -> None:
        """Note what an operation writes: of the tensor's dims, and of float32 or of its own dtype.

        `rounded`: whether it has values of the tensor's dtype already, as what is moved has.
        """
        tensor = self.graph.tensor(uid)
        stored = value
        if tensor.dtype.is_half:
            bound = tensor.role is TensorRole.BOUND
            if bound or not rounded:
                stored = self.cast(value, tensor.dtype)
            if not rounded:
                value = self.cast(stored, DType.FLOAT32)
        self._values[uid] = value
        if tensor.role is TensorRole.BOUND:
            self.outputs[uid] = self._laid_out(stored, memory_order(tensor))

    def write_float(self, uid: int, value: str) -> None:
        """Note what an operation computes in float32: rounded once to the tensor's dtype."""
        dtype = self.graph.tensor(uid).dtype
        if dtype is DType.FLOAT64:
            refuse("float64 results")
        if dtype.is_floating:
            self.write(uid, value)
        elif dtype is DType.BOOL:
            self.write(uid, self.cast(value, dtype))
        else:
            self.write(uid, self._saturate(value, dtype))

    def write_integers(self, uid: int, value: str, of: DType = DType.INT64) -> None:
        """Note what an operation computes in integers of a dtype: exact, or at the limits of the tensor's."""
        dtype = self.graph.tensor(uid).dtype
        if dtype is of:
            self.write(uid, value)
        elif dtype is DType.BOOL or of is DType.BOOL or dtype is DType.FLOAT32:
            self._write_cast(uid, value, dtype)
        elif dtype is DType.INT64:
            self.write(uid, self.cast(value, dtype))
        elif dtype.is_floating or dtype is DType.UINT64:
            if of not in _IN_FLOAT32 or dtype is DType.FLOAT64:
                refuse(f"{dtype} results of {of}")
            self._write_cast(uid, value, dtype)
        else:
            least, most = integer_range(dtype.numpy)
            wide = value if of is DType.INT64 else self.cast(value, DType.INT64)
            ends = (self.number(end, DType.INT64) for end in (least, most))
            self.write(uid, self.cast(self.emit("Clip", wide, *ends), dtype))

    def _write_cast(self, uid: int, value: str, dtype: DType) -> None:
        half = dtype.is_half
        self.write(uid, self.cast(value, DType.FLOAT32 if half else dtype))

    def _saturate(self, value: str, dtype: DType) -> str:
        """Floats as integers: the nearest, the limit of the dtype, or 0 of NaN. Float64 has all of these."""
        if dtype is DType.UINT64:
            refuse("uint64 results of floats")
        least, most = integer_range(dtype.numpy)
        ends = max(float(least), _LEAST_INT64), min(float(most), _MOST_INT64)
        wide = self.emit("Round", self.cast(value, DType.FLOAT64))
        limits = (self.number(end, DType.FLOAT64) for end in ends)
        inside = self.emit("Clip", wide, *limits)
        zero = self.number(0, DType.FLOAT64)
        return self.cast(self.emit("Where", self.emit("IsNaN", wide), zero, inside), dtype)

    def _input(self, uid: int) -> str:
        """A tensor that no operation has written."""
        given = self.graph.tensor(uid)
        if given.role is TensorRole.CONSTANT:
            return self._constant_of(given)
        name = self.inputs[uid] = self._name()
        if given.role is TensorRole.SCALAR:
            if not given.dtype.is_floating:
                refuse("numbers of integers that are passed by value")
            return name
        order = memory_order(given)
        if order is not None and order != tuple(range(len(order))):
            name = self.emit("Transpose", name, perm=[order.index(axis) for axis in range(len(order))])
        return self.cast(name, DType.FLOAT32) if given.dtype.is_half else name

    def _laid_out(self, value: str, order: tuple[int, ...] | None) -> str:
        """A value as an output, with its axes in this order.

        It is a node's own output where it can be: ONNX Runtime 1.32 loses a GELU behind which there is an
        `Identity` for an output, if another node reads it too.
        """
        if order is None or order == tuple(range(len(order))):
            own = value in self._made and value not in self.outputs.values()
            return value if own else self.emit("Identity", value)
        return self.emit("Transpose", value, perm=order)

    def _constant_of(self, given: GraphTensor) -> str:
        dtype, value = self.type_of(given.uid), given.value
        assert value is not None
        if not dtype.is_floating and (isinstance(value, float) or not dtype.holds(value)):
            refuse(f"a constant of {dtype} that is {value}")
        return self.number(value, dtype, len(given.dims))

    def port_of(self, uid: int) -> tuple[ElementType, tuple[int, ...]]:
        """The dtype and dims of an input or output, as it lies in memory."""
        tensor = self.graph.tensor(uid)
        if tensor.role is TensorRole.SCALAR:
            return ElementType.FLOAT32, (1,) * len(tensor.dims)
        order = memory_order(tensor) or range(len(tensor.dims))
        return ElementType.of(tensor.dtype), tuple(tensor.dims[axis] for axis in order)

    def model(self, constant: Collection[int] = ()) -> bytes:
        """The model. `constant`: bound tensors whose values are given beside it, instead of as inputs."""
        ports = {name: self.port_of(uid) for uid, name in self.inputs.items() if uid not in constant}
        given = (external_tensor(self.inputs[uid], *self.port_of(uid)) for uid in constant)
        outputs = {name: self.port_of(uid) for uid, name in self.outputs.items()}
        return model(self._nodes, (*self._constants, *given), ports, outputs)

    def _name(self) -> str:
        self._count += 1
        return f"v{self._count}"


def memory_order(tensor: GraphTensor) -> tuple[int, ...] | None:
    """The axes of a tensor as they lie in memory, the slowest first; None if there are gaps."""
    own = tuple(range(len(tensor.dims)))
    match tensor.spec.layout:
        case Layout.NCHW:
            return own
        case Layout.NHWC:
            return (0, *own[2:], 1)
    wide = sorted((axis for axis in own if tensor.dims[axis] > 1), key=lambda axis: -tensor.strides[axis])
    step = 1
    for axis in reversed(wide):
        if tensor.strides[axis] != step:
            return None
        step *= tensor.dims[axis]
    return own if wide == sorted(wide) else (*(axis for axis in own if tensor.dims[axis] == 1), *wide)
