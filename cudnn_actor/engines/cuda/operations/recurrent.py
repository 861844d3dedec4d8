"""Recurrent layers by libcudnn.

Its weights lie in one space, into which those of a run are copied first: neighbours there and here in one
copy. Its reserve has no meaning outside of it, so it stays within a plan. For gradients, planning leaves out
the reserve of the forward pass, and the steps are computed again; the gradients of the weights are in one
piece with those by data, and `slopes` between them holds the reserve.
https://docs.nvidia.com/deeplearning/cudnn/backend/latest/api/cudnn-adv-library.html
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from ctypes import c_size_t, c_void_p
from typing import Any, NamedTuple

from cudnn_actor.engines.cuda.cudnn.frontend_graph import Refused
from cudnn_actor.engines.cuda.kernels.kernel import Run
from cudnn_actor.engines.cuda.library.libcudnn import (
    Descriptor,
    data_type,
    libcudnn,
    sequences_descriptor,
    tensor_descriptor,
)
from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.operations.implementation import Launcher, implement
from cudnn_actor.protocol.operations import (
    GraphTensor,
    Recurrent,
    RecurrentBackwardData,
    RecurrentBackwardWeights,
    RecurrentMode,
    TensorRole,
)
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import packed_strides

__all__ = ["Span", "joined", "library_recurrent", "spans_of"]

AnyRecurrent = Recurrent[int] | RecurrentBackwardData[int] | RecurrentBackwardWeights[int]

_MODES = {RecurrentMode.RELU: 0, RecurrentMode.TANH: 1, RecurrentMode.LSTM: 2, RecurrentMode.GRU: 3}
"""cudnnRNNMode_t."""
_STANDARD, _TWO_BIASES, _MULTIPLIED_INPUT, _PADDED = 0, 2, 0, 1
"""CUDNN_RNN_ALGO_STANDARD, _DOUBLE_BIAS, _LINEAR_INPUT, and CUDNN_RNN_PADDED_IO_ENABLED."""
_DEFAULT_MATH, _TENSOR_CORES, _FULL = 0, 1, 3
"""cudnnMathType_t. The last one multiplies float32 in full."""
_INFERENCE, _TRAINING = 0, 1
"""cudnnForwardMode_t."""
_ADDED = 0
"""cudnnWgradMode_t: libcudnn adds to what is there."""
_PROJECTION = 8
"""The number that cudnnGetRNNWeightParams has for the weights of a projection."""
_BFLOAT16_SINCE = 91300
_LINE = 256
"""Parts of the workspace begin at multiples of that."""
_BASE = 1 << 32
"""An address that stands for the space of the weights: what is asked for is where they lie in it."""
_ON_DEVICE = 3
"""cudaMemcpyKind."""


class Span(NamedTuple):
    """Bytes of an operand, from `start` on, and where they lie in the space of the weights."""

    name: str
    start: int
    place: int
    nbytes: int


class _Sizes(NamedTuple):
    steps: int
    batch: int
    features: int
    directions: int
    hidden: int
    state: int


class _Layer:
    """A layer, as libcudnn is told of it, and the parts of the workspace.

    Raises `Refused`, and `EngineFailure` if libcudnn does not take it.
    """

    def __init__(self, operation: AnyRecurrent, tensors: Sequence[GraphTensor], handle: Any) -> None:
        self.operation, self.handle = operation, handle.backend_handle
        names = [name for name, _ in operation.named()]
        self.given = dict(zip(names, tensors, strict=True))
        self.places = {name: number for number, name in enumerate(names)}
        self.sizes = sizes = self._sizes()
        self.dtype = dtype = self.given["x"].dtype
        library = libcudnn()
        if dtype is DType.BFLOAT16 and library.cudnnGetVersion() < _BFLOAT16_SINCE:
            raise Refused("cuDNN has recurrent layers of bfloat16 from version 9.13 on")
        self._dropout, self.rnn = Descriptor("Dropout"), Descriptor("RNN")
        library.cudnnSetDropoutDescriptor(self._dropout.pointer, self.handle, 0.0, None, 0, 0)
        wide = data_type(DType.FLOAT64 if dtype is DType.FLOAT64 else DType.FLOAT32)
        library.cudnnSetRNNDescriptor_v8(
            *(self.rnn.pointer, _STANDARD, _MODES[operation.mode], _TWO_BIASES, sizes.directions - 1),
            *(_MULTIPLIED_INPUT, data_type(dtype), wide, self._math()),
            *(sizes.features, sizes.hidden, sizes.state, 1, self._dropout.pointer, _PADDED),
        )
        lengths = operation.lengths or (sizes.steps,) * sizes.batch
        self.lengths = libraries().cupy.asarray(lengths, dtype="int32")
        of_steps = (sizes.steps, sizes.batch)
        self.x = sequences_descriptor((*of_steps, sizes.features), lengths, dtype)
        self.y = sequences_descriptor((*of_steps, sizes.directions * sizes.state), lengths, dtype)
        self.h, self.c = (self._states(size) for size in (sizes.state, sizes.hidden))
        self.weights = self._asked("cudnnGetRNNWeightSpaceSize", self.handle, self.rnn.pointer)[0]
        self.training = not isinstance(operation, Recurrent)
        forward = _TRAINING if self.training else _INFERENCE
        self.temporary, self.reserve = self._asked(
            "cudnnGetRNNTempSpaceSizes", self.handle, self.rnn.pointer, forward, self.x.pointer, count=2
        )
        self._check_kept()
        of_y = math.prod((*of_steps, sizes.directions * sizes.state)) * dtype.itemsize
        self.bytes_of_x, self.bytes_of_y = math.prod((*of_steps, sizes.features)) * dtype.itemsize, of_y
        again = isinstance(operation, RecurrentBackwardData)
        own_reserve = self.reserve if again and "slopes" not in self.given else 0
        self.parts = dict[str, int]()
        start = 0
        for name, nbytes in (
            *(("weights", self.weights), ("temporary", self.temporary)),
            *(("y", of_y if again else 0), ("reserve", own_reserve)),
            ("dy", of_y if again and "dy" not in self.given else 0),
        ):
            self.parts[name] = start
            start += -(-nbytes // _LINE) * _LINE
        self.room = start

    def _sizes(self) -> _Sizes:
        (steps, batch, features), gates = self.given["x"].dims, self.operation.mode.gates
        if "w_hh" in self.given:
            directions, rows, state = self.given["w_hh"].dims
            return _Sizes(steps, batch, features, directions, rows // gates, state)
        directions, *_, hidden = self.given["slopes"].dims
        return _Sizes(steps, batch, features, directions, hidden, self.given["y"].dims[2] // directions)

    def _math(self) -> int:
        if self.dtype.is_half:
            return _TENSOR_CORES
        if self.dtype is DType.FLOAT64:
            return _DEFAULT_MATH
        numerics = self.operation.numerics
        return _TENSOR_CORES if numerics is not None and numerics.tf32 else _FULL

    def _states(self, size: int) -> Descriptor:
        dims = (self.sizes.directions, self.sizes.batch, size)
        return tensor_descriptor(dims, packed_strides(dims), self.dtype)

    def _asked(self, function: str, *arguments: Any, count: int = 1) -> list[int]:
        """Sizes in bytes that a function gives."""
        found = [c_size_t() for _ in range(count)]
        getattr(libcudnn(), function)(*arguments, *map(ctypes.byref, found))
        return [each.value for each in found]

    def _check_kept(self) -> None:
        """Raise `Refused` unless a reserve stays within the plan, and has room in what holds it there."""
        if "reserve" in self.given:
            raise Refused("cuDNN's reserve has no meaning outside of it: gradients compute the steps again")
        slopes = self.given.get("slopes")
        if slopes is None:
            return
        if slopes.role is TensorRole.BOUND:
            raise Refused("slopes stay within a plan on CUDA: ask for the gradients of a graph, by g.grad")
        room = math.prod(slopes.dims) * slopes.dtype.itemsize
        if self.reserve > room:
            raise Refused(f"cuDNN's reserve of {self.reserve:,} bytes does not fit into slopes of {room:,}")

    def spans(self, *, gradients: bool) -> list[Span]:
        """Where the weights lie, or their gradients: those that are operands."""
        found: list[Span] = []
        for way in range(self.sizes.directions):
            for number in range(2 * self.operation.mode.gates + (self.sizes.state < self.sizes.hidden)):
                matrix, bias = self._of_weights(way, self._number(number))
                found += spans_of(self.operation.mode, self.sizes, way, number, (matrix, bias))
        itemsize, prefix = self.dtype.itemsize, "d" if gradients else ""
        named = [
            Span(prefix + each.name, each.start * itemsize, each.place, each.nbytes * itemsize)
            for each in found
            if prefix + each.name in self.given
        ]
        if any(each.place < 0 or each.place + each.nbytes > self.weights for each in named):
            raise Refused("cuDNN's weights lie outside of their space")
        return joined(named)

    def _number(self, number: int) -> int:
        """The number of weights in cudnnGetRNNWeightParams."""
        return _PROJECTION if number == 2 * self.operation.mode.gates else number

    def _of_weights(self, way: int, number: int) -> tuple[int, int]:
        """Where a matrix and its bias lie in the space of the weights."""
        of_matrix, of_bias = Descriptor("Tensor"), Descriptor("Tensor")
        matrix, bias = c_void_p(), c_void_p()
        libcudnn().cudnnGetRNNWeightParams(
            *(self.handle, self.rnn.pointer, way, self.weights, c_void_p(_BASE), number),
            *(of_matrix.pointer, ctypes.byref(matrix), of_bias.pointer, ctypes.byref(bias)),
        )
        return (matrix.value or 0) - _BASE, (bias.value or 0) - _BASE


def spans_of(
    mode: RecurrentMode, sizes: Any, way: int, number: int, places: tuple[int, int]
) -> Iterator[Span]:
    """The spans of one gate's weights and bias, with starts and sizes in elements, places in bytes.

    `number`: a gate's of the input, then of the state, then the projection. `places`: of the matrix and of
    the bias in the space of the weights, in bytes.
    """
    gates, hidden = mode.gates, sizes.hidden
    if number == 2 * gates:
        count = sizes.state * hidden
        yield Span("w_hr", way * count, places[0], count)
        return
    name, columns = ("w_ih", sizes.features) if number < gates else ("w_hh", sizes.state)
    row = (way * gates + number % gates) * hidden
    yield Span(name, row * columns, places[0], hidden * columns)
    yield Span("bias", (way * 2 * gates + number) * hidden, places[1], hidden)


def joined(spans: Sequence[Span]) -> list[Span]:
    """Those that are neighbours in both places as one."""
    found: list[Span] = []
    for span in sorted(spans, key=lambda each: (each.name, each.start)):
        last = found[-1] if found else None
        if (
            last is not None
            and last.name == span.name
            and last.start + last.nbytes == span.start
            and last.place + last.nbytes == span.place
        ):
            found[-1] = last._replace(nbytes=last.nbytes + span.nbytes)
        else:
            found.append(span)
    return found


def library_recurrent(operation: AnyRecurrent, tensors: Sequence[GraphTensor], handle: Any) -> Run:
    """The run of a layer, or of its gradients, by libcudnn. Raises `Refused` and `EngineFailure`."""
    layer = _Layer(operation, tensors, handle)
    spans = layer.spans(gradients=isinstance(operation, RecurrentBackwardWeights))
    whole = {"bias", "dbias"} & layer.given.keys()
    library, runtime, cupy = libcudnn(), libraries().runtime, libraries().cupy
    rnn, lengths = layer.rnn.pointer, layer.lengths.data.ptr

    def launch(addresses: Sequence[int], _: Sequence[float]) -> None:
        def at(name: str) -> int | None:
            place = layer.places.get(name)
            return None if place is None else addresses[place]

        def part(name: str) -> int:
            return addresses[-1] + layer.parts[name]

        def forward(mode: int, y: Any, ends: tuple[Any, Any], reserve: tuple[int, Any]) -> None:
            library.cudnnRNNForward(
                *(layer.handle, rnn, mode, lengths, layer.x.pointer, at("x"), layer.y.pointer, y),
                *(layer.h.pointer, at("h0"), ends[0], layer.c.pointer, at("c0"), ends[1]),
                *(layer.weights, part("weights"), layer.temporary, part("temporary"), *reserve),
            )

        stream = cupy.cuda.get_current_stream().ptr
        weights = part("weights")
        if isinstance(operation, RecurrentBackwardWeights):
            runtime.memsetAsync(weights, 0, layer.weights, stream)
            library.cudnnRNNBackwardWeights_v8(
                *(layer.handle, rnn, _ADDED, lengths, layer.x.pointer, at("x"), layer.h.pointer, at("h0")),
                *(layer.y.pointer, at("y"), layer.weights, weights),
                *(layer.temporary, part("temporary"), layer.reserve, at("slopes")),
            )
            for span in spans:
                into = (at(span.name) or 0) + span.start
                runtime.memcpyAsync(into, weights + span.place, span.nbytes, _ON_DEVICE, stream)
            return
        if not whole:  # what no operand gives is 0
            runtime.memsetAsync(weights, 0, layer.weights, stream)
        for span in spans:
            source = (at(span.name) or 0) + span.start
            runtime.memcpyAsync(weights + span.place, source, span.nbytes, _ON_DEVICE, stream)
        if isinstance(operation, Recurrent):
            forward(_INFERENCE, at("y"), (at("h_n"), at("c_n")), (0, None))
            return
        y, dy = part("y"), at("dy")
        if dy is None:
            dy = part("dy")
            runtime.memsetAsync(dy, 0, layer.bytes_of_y, stream)
        if operation.lengths is not None:  # libcudnn may leave what lies behind the end of a sequence
            runtime.memsetAsync(at("dx"), 0, layer.bytes_of_x, stream)
        reserve = layer.reserve, at("slopes") or part("reserve")
        forward(_TRAINING, y, (None, None), reserve)
        library.cudnnRNNBackwardData_v8(
            *(layer.handle, rnn, lengths, layer.y.pointer, y, dy, layer.x.pointer, at("dx")),
            *(layer.h.pointer, at("h0"), at("dh_n"), at("dh0")),
            *(layer.c.pointer, at("c0"), at("dc_n"), at("dc0")),
            *(layer.weights, weights, layer.temporary, part("temporary"), *reserve),
        )

    return launch


def _room(operation: AnyRecurrent, tensors: Sequence[GraphTensor], handle: Any) -> int:
    """Bytes of the workspace."""
    return _Layer(operation, tensors, handle).room


implement(
    Recurrent,
    RecurrentBackwardData,
    RecurrentBackwardWeights,
    launchers={"library": Launcher(library_recurrent, packed=True, room=_room)},
    partly="what a recurrent layer keeps for its gradients stays within a plan",
)
