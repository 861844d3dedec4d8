"""Recurrent layers by libcudnn.

Its weights lie in one space, into which those of a run are copied first: neighbours there and here in one
copy. Its reserve has no meaning outside of it, so it stays within a plan. For gradients, planning leaves out
the reserve of the forward pass, and the steps are computed again; the gradients of the weights are in one
piece with those by data, and `slopes` between them holds the reserve.
https://docs.nvidia.com/deeplearning/cudnn/backend/latest/api/cudnn-adv-library.html
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from ctypes import c_size_t, c_void_p
from typing import Any, NamedTuple

import numpy as np

from cudnn_actor.engines.cuda.cudnn.frontend_graph import Refused
from cudnn_actor.engines.cuda.kernels.kernel import Run, on_device
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
        of_steps = (sizes.steps, sizes.batch)
        self.x = sequences_descriptor((*of_steps, sizes.features), lengths, dtype)
        self.y = sequences_descriptor((*of_steps, sizes.directions * sizes.state), lengths, dtype)
        self.lengths = on_device(np.asarray(lengths, np.int32))  # behind the descriptors, which check them
        self.h, self.c = (self._states(size) for size in (sizes.state, sizes.hidden))
        self.weights = self._asked("cudnnGetRNNWeightSpaceSize", self.handle, self.rnn.pointer)[0]
        forward = _INFERENCE if isinstance(operation, Recurrent) else _TRAINING
        self.temporary, self.reserve = self._asked(
            "cudnnGetRNNTempSpaceSizes", self.handle, self.rnn.pointer, forward, self.x.pointer, count=2
        )
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

    @functools.cached_property
    def _without_steps(self) -> list[range]:
        """The sequences without a step, neighbours together."""
        found = []
        numbered = itertools.groupby(enumerate(self.operation.lengths or ()), lambda pair: pair[1] == 0)
        for empty, group in numbered:
            numbers = [number for number, _ in group]
            if empty:
                found.append(range(numbers[0], numbers[-1] + 1))
        return found

    def without_steps(self, name: str) -> list[tuple[int, int]]:
        """Where the states of sequences without a step lie in an operand: starts and sizes in bytes."""
        directions, batch, size = self.given[name].dims
        line = size * self.dtype.itemsize
        return [
            ((way * batch + several.start) * line, len(several) * line)
            for several in self._without_steps
            for way in range(directions)
        ]

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


class _Call:
    """One run of a layer: where its operands and the parts of its workspace are."""

    def __init__(self, layer: _Layer, spans: Sequence[Span], addresses: Sequence[int]) -> None:
        self.layer, self._spans, self._addresses = layer, spans, addresses
        self._library, self._runtime = libcudnn(), libraries().runtime
        self._stream = libraries().cupy.cuda.get_current_stream().ptr

    def at(self, name: str) -> int | None:
        """The address of an operand; None if it is left out."""
        place = self.layer.places.get(name)
        return None if place is None else self._addresses[place]

    def part(self, name: str) -> int:
        """The address of a part of the workspace."""
        return self._addresses[-1] + self.layer.parts[name]

    def clear(self, address: int, nbytes: int) -> None:
        self._runtime.memsetAsync(address, 0, nbytes, self._stream)

    def copy(self, into: int, source: int, nbytes: int) -> None:
        self._runtime.memcpyAsync(into, source, nbytes, _ON_DEVICE, self._stream)

    def gather_weights(self) -> None:
        """Copy the weights into their space."""
        weights = self.part("weights")
        if "bias" not in self.layer.given:  # what no operand gives is 0
            self.clear(weights, self.layer.weights)
        for span in self._spans:
            self.copy(weights + span.place, (self.at(span.name) or 0) + span.start, span.nbytes)

    def scatter_weights(self) -> None:
        """Copy the gradients of the weights out of their space."""
        for span in self._spans:
            self.copy((self.at(span.name) or 0) + span.start, self.part("weights") + span.place, span.nbytes)

    def keep_states(self, *pairs: tuple[str, str]) -> None:
        """Copy the states of sequences without a step, for which libcudnn writes 0."""
        for name, result in pairs:
            source, into = self.at(name), self.at(result)
            if source is not None and into is not None:
                for start, nbytes in self.layer.without_steps(name):
                    self.copy(into + start, source + start, nbytes)

    def forward(self, mode: int, y: int | None, ends: Sequence[int | None], reserve: Sequence[Any]) -> None:
        """cudnnRNNForward. `ends`: where the last states go. `reserve`: its bytes and its address."""
        layer, at = self.layer, self.at
        self._library.cudnnRNNForward(
            *(layer.handle, layer.rnn.pointer, mode, layer.lengths.data.ptr),
            *(layer.x.pointer, at("x"), layer.y.pointer, y),
            *(layer.h.pointer, at("h0"), ends[0], layer.c.pointer, at("c0"), ends[1]),
            *(layer.weights, self.part("weights"), layer.temporary, self.part("temporary"), *reserve),
        )

    def by_data(self, y: int, dy: int, reserve: Sequence[Any]) -> None:
        """cudnnRNNBackwardData_v8. `reserve`: its bytes and its address."""
        layer, at = self.layer, self.at
        self._library.cudnnRNNBackwardData_v8(
            *(layer.handle, layer.rnn.pointer, layer.lengths.data.ptr),
            *(layer.y.pointer, y, dy, layer.x.pointer, at("dx")),
            *(layer.h.pointer, at("h0"), at("dh_n"), at("dh0")),
            *(layer.c.pointer, at("c0"), at("dc_n"), at("dc0")),
            *(layer.weights, self.part("weights"), layer.temporary, self.part("temporary"), *reserve),
        )

    def by_weights(self) -> None:
        """cudnnRNNBackwardWeights_v8. It adds to what is in the space of the weights."""
        layer, at = self.layer, self.at
        self._library.cudnnRNNBackwardWeights_v8(
            *(layer.handle, layer.rnn.pointer, _ADDED, layer.lengths.data.ptr),
            *(layer.x.pointer, at("x"), layer.h.pointer, at("h0"), layer.y.pointer, at("y")),
            *(layer.weights, self.part("weights"), layer.temporary, self.part("temporary")),
            *(layer.reserve, at("slopes")),
        )


def _run_forward(call: _Call) -> None:
    call.gather_weights()
    call.forward(_INFERENCE, call.at("y"), (call.at("h_n"), call.at("c_n")), (0, None))
    call.keep_states(("h0", "h_n"), ("c0", "c_n"))


def _run_by_data(call: _Call) -> None:
    layer = call.layer
    call.gather_weights()
    y, dy = call.part("y"), call.at("dy")
    if dy is None:
        dy = call.part("dy")
        call.clear(dy, layer.bytes_of_y)
    if layer.operation.lengths is not None:  # libcudnn may leave what lies behind the end of a sequence
        call.clear(call.at("dx") or 0, layer.bytes_of_x)
    reserve = layer.reserve, call.at("slopes") or call.part("reserve")
    call.forward(_TRAINING, y, (None, None), reserve)
    call.by_data(y, dy, reserve)
    call.keep_states(("dh_n", "dh0"), ("dc_n", "dc0"))


def _run_by_weights(call: _Call) -> None:
    call.clear(call.part("weights"), call.layer.weights)
    call.by_weights()
    call.scatter_weights()


_RUNS: dict[type, Callable[[_Call], None]] = {
    Recurrent: _run_forward,
    RecurrentBackwardData: _run_by_data,
    RecurrentBackwardWeights: _run_by_weights,
}


def library_recurrent(operation: AnyRecurrent, tensors: Sequence[GraphTensor], handle: Any) -> Run:
    """The run of a layer, or of its gradients, by libcudnn. Raises `Refused` and `EngineFailure`."""
    layer = _Layer(operation, tensors, handle)
    spans = layer.spans(gradients=isinstance(operation, RecurrentBackwardWeights))
    run = _RUNS[type(operation)]
    return lambda addresses, _: run(_Call(layer, spans, addresses))


def _room(operation: AnyRecurrent, tensors: Sequence[GraphTensor], handle: Any) -> int:
    """Bytes of the workspace."""
    return _Layer(operation, tensors, handle).room


def _held(operation: AnyRecurrent, tensors: Sequence[GraphTensor], handle: Any) -> dict[str, int]:
    """Bytes of the reserve, which lies in the place of `slopes`. Raises `Refused` if it leaves the plan."""
    given = {name: tensor for (name, _), tensor in zip(operation.named(), tensors, strict=True)}
    if "reserve" in given:
        raise Refused("cuDNN's reserve has no meaning outside of it: gradients compute the steps again")
    if "slopes" not in given:
        return {}
    if given["slopes"].role is TensorRole.BOUND:
        raise Refused("slopes stay within a plan on CUDA: ask for the gradients of a graph, by g.grad")
    return {"slopes": _Layer(operation, tensors, handle).reserve}


implement(
    Recurrent,
    RecurrentBackwardData,
    RecurrentBackwardWeights,
    launchers={"library": Launcher(library_recurrent, packed=True, room=_room, held=_held)},
    partly="what a recurrent layer keeps for its gradients stays within a plan",
)
