"""Runs recurrent layers one above the other by libcudnn, which computes them together.

libcudnn wants all weights in one space. They are first copied into that space; weights that are neighbours in
both places take one copy. This is a step of its own (`LayerWeights`), which a deployed model runs only once.
Layers with gradients copy the weights themselves. Only libcudnn understands its reserve. Within a plan, the
gradients compute the layers again, unless an earlier step of the same plan has kept its reserve. Where a
reserve lies in a buffer, as bytes, a layer and its two gradients are steps of their own: `recurrent_passes`.
https://docs.nvidia.com/deeplearning/cudnn/backend/latest/api/cudnn-adv-library.html
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from ctypes import c_size_t, c_void_p
from typing import Any, NamedTuple, TypeVar

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
from cudnn_actor.engines.cuda.library.libraries import ON_DEVICE, libraries
from cudnn_actor.engines.cuda.operations.implementation import Asked, Launcher, implement
from cudnn_actor.engines.cuda.operations.recurrent_calls import (
    LayerBackwardData,
    LayerBackwardWeights,
    Layers,
    LayersBackward,
    LayerWeights,
)
from cudnn_actor.protocol.operations import (
    GraphTensor,
    Recurrent,
    RecurrentBackwardData,
    RecurrentBackwardWeights,
    RecurrentMode,
)
from cudnn_actor.protocol.operations.reserves import lack_of_bytes
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import packed_strides

__all__ = [
    "Call",
    "Network",
    "Span",
    "join_spans",
    "library_layers",
    "room_for_reserve",
    "spans_of",
]

_MODES = {RecurrentMode.RELU: 0, RecurrentMode.TANH: 1, RecurrentMode.LSTM: 2, RecurrentMode.GRU: 3}
"""cudnnRNNMode_t."""
_STANDARD, _TWO_BIASES, _MULTIPLIED_INPUT, _PADDED = 0, 2, 0, 1
"""CUDNN_RNN_ALGO_STANDARD, _DOUBLE_BIAS, _LINEAR_INPUT, and CUDNN_RNN_PADDED_IO_ENABLED."""
_DEFAULT_MATH, _TENSOR_CORES, _FULL = 0, 1, 3
"""cudnnMathType_t. The last one multiplies float32 in full."""
_INFERENCE, _TRAINING = 0, 1
"""cudnnForwardMode_t."""
_ADDED = 0
"""cudnnWgradMode_t: libcudnn adds the gradients to the numbers that are there."""
_PROJECTION = 8
"""The number that cudnnGetRNNWeightParams has for the weights of a projection."""
_BFLOAT16_SINCE = 91300
_LINE = 256
"""The bytes at whose multiples parts of the workspace begin."""
_BASE = 1 << 32
"""An address that stands for the space of the weights when libcudnn is asked for their offsets in it."""

V = TypeVar("V")
_STATES = ("h0", "c0", "h_n", "c_n")
_STATES_BACKWARD = ("h0", "c0", "dh_n", "dc_n", "dh0", "dc0")
"""States of all layers, which libcudnn takes one behind the other."""


AnyLayers = Layers[int] | LayersBackward[int] | LayerBackwardData[int] | LayerBackwardWeights[int]
_Any = AnyLayers | LayerWeights[int]


class Span(NamedTuple):
    """Bytes of an operand, from `start` on, and where they lie in the space of the weights."""

    name: str
    start: int
    place: int
    nbytes: int


class _Sizes(NamedTuple):
    """The sizes of the weights of a network. `features`: the features that its first layer reads."""

    features: int
    directions: int
    hidden: int
    state: int

    def of_layer(self, layer: int) -> _Sizes:
        """The sizes of one layer. An upper layer reads as many features as the one below it writes."""
        return self if layer == 0 else self._replace(features=self.directions * self.state)


class _Weights:
    """The descriptor that tells libcudnn of a network, and the space of its weights.

    Raises `Refused`, and `EngineFailure` if libcudnn does not take it.

    Parameters
    ----------
    operation
        Layers, their gradients or their weights.
    given
        Its operands by name.
    handle
        A handle of cuDNN's.
    """

    def __init__(self, operation: _Any, given: Mapping[str, GraphTensor], handle: Any) -> None:
        self._operation, self._given, self._handle = operation, given, handle.backend_handle
        of = "" if "w_hh[0]" in given else "d"  # the gradients by weights do not read the weights
        self.layers = sum(name.startswith(f"{of}w_hh[") for name in given)
        self.dtype, (directions, rows, state) = given[f"{of}w_hh[0]"].dtype, given[f"{of}w_hh[0]"].dims
        hidden = rows // operation.mode.gates
        self.sizes = sizes = _Sizes(given[f"{of}w_ih[0]"].dims[-1], directions, hidden, state)
        library, dtype = libcudnn(), self.dtype
        if dtype is DType.BFLOAT16 and library.cudnnGetVersion() < _BFLOAT16_SINCE:
            raise Refused("cuDNN has recurrent layers of bfloat16 from version 9.13 on")
        self._dropout, self.rnn = Descriptor("Dropout"), Descriptor("RNN")
        library.cudnnSetDropoutDescriptor(self._dropout.pointer, self._handle, 0.0, None, 0, 0)
        wide = data_type(DType.FLOAT64 if dtype is DType.FLOAT64 else DType.FLOAT32)
        library.cudnnSetRNNDescriptor_v8(
            *(self.rnn.pointer, _STANDARD, _MODES[operation.mode], _TWO_BIASES, sizes.directions - 1),
            *(_MULTIPLIED_INPUT, data_type(dtype), wide, self._math()),
            *(sizes.features, sizes.hidden, sizes.state, self.layers, self._dropout.pointer, _PADDED),
        )
        (self.nbytes,) = _sizes_of("cudnnGetRNNWeightSpaceSize", self._handle, self.rnn.pointer)

    def _math(self) -> int:
        if self.dtype.is_half:
            return _TENSOR_CORES
        if self.dtype is DType.FLOAT64:
            return _DEFAULT_MATH
        numerics = self._operation.numerics
        return _TENSOR_CORES if numerics is not None and numerics.tf32 else _FULL

    def spans(self, *, gradients: bool) -> list[Span]:
        """The places in the space of the weights of the weights, or gradients, that are operands."""
        found: list[Span] = []
        for layer, way in itertools.product(range(self.layers), range(self.sizes.directions)):
            for number in range(2 * self._operation.mode.gates + (self.sizes.state < self.sizes.hidden)):
                places = self._of_weights(layer * self.sizes.directions + way, self._number(number))
                of_gate = spans_of(self._operation.mode, self.sizes.of_layer(layer), way, number, places)
                found += [each._replace(name=f"{each.name}[{layer}]") for each in of_gate]
        itemsize, prefix = self.dtype.itemsize, "d" if gradients else ""
        named = [
            Span(prefix + each.name, each.start * itemsize, each.place, each.nbytes * itemsize)
            for each in found
            if prefix + each.name in self._given
        ]
        if any(each.place < 0 or each.place + each.nbytes > self.nbytes for each in named):
            raise Refused("cuDNN's weights lie outside of their space")
        return join_spans(named)

    def _number(self, number: int) -> int:
        """The number of weights in cudnnGetRNNWeightParams."""
        return _PROJECTION if number == 2 * self._operation.mode.gates else number

    def _of_weights(self, layer: int, number: int) -> tuple[int, int]:
        """The offsets of a matrix and of its bias in the space of the weights. `layer`: a layer in one
        direction."""
        of_matrix, of_bias = Descriptor("Tensor"), Descriptor("Tensor")
        matrix, bias = c_void_p(), c_void_p()
        libcudnn().cudnnGetRNNWeightParams(
            *(self._handle, self.rnn.pointer, layer, self.nbytes, c_void_p(_BASE), number),
            *(of_matrix.pointer, ctypes.byref(matrix), of_bias.pointer, ctypes.byref(bias)),
        )
        return (matrix.value or 0) - _BASE, (bias.value or 0) - _BASE


class Network:
    """The descriptors that tell libcudnn of layers, and the parts of the workspace.

    Raises `Refused`, and `EngineFailure` if libcudnn does not take them.
    """

    def __init__(self, operation: AnyLayers, tensors: Sequence[GraphTensor], handle: Any) -> None:
        self.operation, self.handle = operation, handle.backend_handle
        self.given = _by_name(operation, tensors)
        self.weights = weights = _Weights(operation, self.given, handle)
        self.layers, self.dtype, self.rnn = weights.layers, weights.dtype, weights.rnn
        sizes, (steps, batch, _) = weights.sizes, self.given["x"].dims
        wide, lengths = sizes.directions * sizes.state, operation.lengths or (steps,) * batch
        self.x = sequences_descriptor((steps, batch, sizes.features), lengths, self.dtype)
        self.y = sequences_descriptor((steps, batch, wide), lengths, self.dtype)
        self.lengths = on_device(np.asarray(lengths, np.int32))  # behind the descriptors, which check them
        self.h, self.c = (self._states(size) for size in (sizes.state, sizes.hidden))
        kept = not self.given.keys().isdisjoint(("reserve", "slopes"))
        forward = _TRAINING if kept else _INFERENCE
        self.temporary, self.reserve = _sizes_of(
            "cudnnGetRNNTempSpaceSizes", self.handle, self.rnn.pointer, forward, self.x.pointer, count=2
        )
        self.kept_weights = -(-self.reserve // _LINE) * _LINE
        """The offset of the space of the weights in the operand `reserve`, in bytes."""
        of_y = math.prod((steps, batch, wide)) * self.dtype.itemsize
        self.bytes_of_x, self.bytes_of_y = math.prod(self.given["x"].dims) * self.dtype.itemsize, of_y
        whole = isinstance(operation, LayersBackward)
        by_data, by_weights = ("dx" in self.given), (whole or "dw_ih[0]" in self.given)
        self.parts = dict[str, int]()
        start = 0
        for name, nbytes in (
            ("weights", weights.nbytes if by_weights else 0),
            *(("temporary", self.temporary), ("y", of_y if whole else 0)),
            ("dy", of_y if by_data and "dy" not in self.given else 0),
            ("slopes", self.reserve if by_data and not whole and "slopes" not in self.given else 0),
            *((name, self._bytes_of(name)) for name in (_STATES_BACKWARD if by_data else _STATES)),
        ):
            self.parts[name] = start
            start += -(-nbytes // _LINE) * _LINE
        self.room = start

    def of_layers(self, name: str) -> list[str]:
        """The names of an operand of all layers."""
        return [f"{name}[{layer}]" for layer in range(self.layers) if f"{name}[{layer}]" in self.given]

    def _bytes_of(self, name: str) -> int:
        """Bytes of a state of all layers together."""
        return sum(self.given[each].spec.nbytes for each in self.of_layers(name))

    def _states(self, size: int) -> Descriptor:
        dims = (self.layers * self.weights.sizes.directions, self.given["x"].dims[1], size)
        return tensor_descriptor(dims, packed_strides(dims), self.dtype)

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
        """The parts of an operand with the states of sequences without a step: starts and sizes in bytes."""
        directions, batch, size = self.given[name].dims
        line = size * self.dtype.itemsize
        return [
            ((way * batch + several.start) * line, len(several) * line)
            for several in self._without_steps
            for way in range(directions)
        ]


def _by_name(operation: _Any, values: Sequence[V]) -> dict[str, V]:
    """The value for each operand, by the operand's name."""
    return dict(zip((name for name, _ in operation.named()), values, strict=False))


def _sizes_of(function: str, *arguments: Any, count: int = 1) -> list[int]:
    """Sizes in bytes that a function of the library gives."""
    found = [c_size_t() for _ in range(count)]
    getattr(libcudnn(), function)(*arguments, *map(ctypes.byref, found))
    return [each.value for each in found]


def spans_of(
    mode: RecurrentMode, sizes: Any, way: int, number: int, places: tuple[int, int]
) -> Iterator[Span]:
    """Yields the spans of one gate's weights and bias, with starts and sizes in elements, places in bytes.

    `number`: first count the gates of the input, then those of the state, then the projection. `places`: of
    the matrix and of the bias in the space of the weights, in bytes.
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


def join_spans(spans: Sequence[Span]) -> list[Span]:
    """The spans, sorted; neighbours both in their operand and in the space of the weights become one."""
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


class _Device:
    """The device's memory, on the stream of a run."""

    def __init__(self) -> None:
        self._runtime = libraries().runtime
        self._stream = libraries().cupy.cuda.get_current_stream().ptr

    def clear(self, address: int, nbytes: int) -> None:
        """Enqueue filling memory with 0."""
        self._runtime.memsetAsync(address, 0, nbytes, self._stream)

    def copy(self, into: int, source: int, nbytes: int) -> None:
        """Enqueue a copy."""
        self._runtime.memcpyAsync(into, source, nbytes, ON_DEVICE, self._stream)

    def gather(self, weights: _Weights, spans: Sequence[Span], at: Mapping[str, int], space: int) -> None:
        """Enqueue copies of weights into their space. `at`: the addresses of the operands."""
        if "bias[0]" not in at:  # libcudnn has biases all the same: they are 0
            self.clear(space, weights.nbytes)
        for span in spans:
            self.copy(space + span.place, at[span.name] + span.start, span.nbytes)


class Call:
    """A run of the layers, with the addresses of its operands and of the parts of its workspace."""

    def __init__(self, network: Network, addresses: Sequence[int]) -> None:
        self.network, self.device = network, _Device()
        self._at, self._workspace = _by_name(network.operation, addresses), addresses[-1]
        self._library = libcudnn()

    def at(self, name: str) -> int | None:
        """The address of an operand; None if it is left out."""
        return self._at.get(name)

    def place(self, name: str) -> int:
        """The address of an operand, or of the part of the workspace in its place."""
        found = self.at(name)
        return self.part(name) if found is None else found

    def part(self, name: str) -> int:
        """The address of a part of the workspace."""
        return self._workspace + self.network.parts[name]

    @functools.cached_property
    def weights(self) -> int:
        """The address of the space of the weights: the operand `space`, if there is one.

        Else it is in the operand `reserve`, where the step of the gradients finds the weights, too.
        """
        space = self.at("space")
        return self._at["reserve"] + self.network.kept_weights if space is None else space

    def gather_weights(self, spans: Sequence[Span]) -> None:
        """Copy the weights into their space."""
        self.device.gather(self.network.weights, spans, self._at, self.weights)

    def _scatter_weights(self, spans: Sequence[Span]) -> None:
        """Copy the gradients of the weights out of their space."""
        space = self.part("weights")
        for span in spans:
            self.device.copy(self._at[span.name] + span.start, space + span.place, span.nbytes)

    def _apart(self, name: str) -> list[tuple[int, int, int]]:
        """The address of each layer's state, its place in the workspace, and its bytes.

        Empty if the states of all layers lie one behind the other already, as the library wants them.
        """
        found, place = [], self.part(name)
        for each in self.network.of_layers(name):
            nbytes = self.network.given[each].spec.nbytes
            found.append((self.at(each) or 0, place, nbytes))
            place += nbytes
        together = all(own - found[0][0] == place - found[0][1] for own, place, _ in found)
        return [] if together else found

    def state(self, name: str) -> int | None:
        """The address at which the library reads or writes a state of all layers; None if it is left out.

        It is the first layer's operand, or a part of the workspace if the layers' operands lie apart.
        """
        return self.part(name) if self._apart(name) else self.at(f"{name}[0]")

    def gather_states(self, *names: str) -> None:
        """Copy states into the workspace if the layers' operands lie apart."""
        for name in names:
            for own, place, nbytes in self._apart(name):
                self.device.copy(place, own, nbytes)

    def scatter_states(self, *pairs: tuple[str, str]) -> None:
        """Copy states out of the workspace if the layers' operands lie apart.

        `pairs`: the names of a state before the steps and of that behind them. A sequence without a step has
        the same state before and behind: it is copied, since libcudnn writes 0.
        """
        for before, name in pairs:
            for own, place, nbytes in self._apart(name):
                self.device.copy(own, place, nbytes)
            for layer in range(self.network.layers):
                source, into = self.at(f"{before}[{layer}]"), self.at(f"{name}[{layer}]")
                if source is not None and into is not None:
                    for start, nbytes in self.network.without_steps(f"{before}[{layer}]"):
                        self.device.copy(into + start, source + start, nbytes)

    def forward(self, mode: int, y: int | None, reserve: Sequence[Any]) -> None:
        """cudnnRNNForward. `reserve`: its bytes and its address."""
        network, back = self.network, isinstance(self.network.operation, LayersBackward)
        h_n, c_n = (None, None) if back else (self.state("h_n"), self.state("c_n"))
        self._library.cudnnRNNForward(
            *(network.handle, network.rnn.pointer, mode, network.lengths.data.ptr),
            *(network.x.pointer, self.at("x"), network.y.pointer, y),
            *(network.h.pointer, self.state("h0"), h_n, network.c.pointer, self.state("c0"), c_n),
            *(network.weights.nbytes, self.weights, network.temporary, self.part("temporary"), *reserve),
        )

    def by_data(self, y: int, reserve: Sequence[Any]) -> None:
        """cudnnRNNBackwardData_v8. `reserve`: its bytes and its address. The library changes it."""
        network, state, dy = self.network, self.state, self.at("dy")
        if dy is None:
            dy = self.part("dy")
            self.device.clear(dy, network.bytes_of_y)
        if network.operation.lengths is not None:  # libcudnn may not write behind the end of a sequence
            self.device.clear(self._at["dx"], network.bytes_of_x)
        self._library.cudnnRNNBackwardData_v8(
            *(network.handle, network.rnn.pointer, network.lengths.data.ptr),
            *(network.y.pointer, y, dy, network.x.pointer, self.at("dx")),
            *(network.h.pointer, state("h0"), state("dh_n"), state("dh0")),
            *(network.c.pointer, state("c0"), state("dc_n"), state("dc0")),
            *(network.weights.nbytes, self.weights, network.temporary, self.part("temporary"), *reserve),
        )

    def by_weights(self, y: int, reserve: Sequence[Any], gradients: Sequence[Span]) -> None:
        """cudnnRNNBackwardWeights_v8, on a space of weights that is cleared, since the library adds to it.

        `gradients`: their places in that space, from which they are copied.
        """
        network = self.network
        self.device.clear(self.part("weights"), network.weights.nbytes)
        self._library.cudnnRNNBackwardWeights_v8(
            *(network.handle, network.rnn.pointer, _ADDED, network.lengths.data.ptr),
            *(network.x.pointer, self.at("x"), network.h.pointer, self.state("h0"), network.y.pointer, y),
            *(
                network.weights.nbytes,
                self.part("weights"),
                network.temporary,
                self.part("temporary"),
                *reserve,
            ),
        )
        self._scatter_weights(gradients)


def _forward(network: Network) -> Callable[[Call], None]:
    """The run of the layers."""
    spans = network.weights.spans(gradients=False)

    def run(call: Call) -> None:
        kept = call.at("reserve")
        if call.at("space") is None:
            call.gather_weights(spans)
        call.gather_states("h0", "c0")
        reserve = (0, None) if kept is None else (network.reserve, kept)
        call.forward(_INFERENCE if kept is None else _TRAINING, call.at("y"), reserve)
        call.scatter_states(("h0", "h_n"), ("c0", "c_n"))

    return run


def _backward(network: Network, *, again: bool) -> Callable[[Call], None]:
    """The run of the gradients of the layers."""
    weights = network.weights
    spans, gradients = weights.spans(gradients=False), weights.spans(gradients=True)

    def run(call: Call) -> None:
        call.gather_states("h0", "c0", "dh_n", "dc_n")
        y, reserve = call.part("y"), (network.reserve, call.at("reserve"))
        given = call.at("y")
        if again:
            call.gather_weights(spans)
            call.forward(_TRAINING, y, reserve)
        elif given is not None:
            y = given
        call.by_data(y, reserve)
        call.scatter_states(("dh_n", "dh0"), ("dc_n", "dc0"))
        if gradients:
            call.by_weights(y if given is None else given, reserve, gradients)

    return run


def library_layers(operation: AnyLayers, tensors: Sequence[GraphTensor], handle: Any) -> Run:
    """The run of layers, or of their gradients, by libcudnn. Raises `Refused` and `EngineFailure`."""
    network = Network(operation, tensors, handle)
    if isinstance(operation, LayersBackward):
        run = _backward(network, again=operation.again)
    else:
        run = _forward(network)
    return lambda addresses, _: run(Call(network, addresses))


def _ask_for_memory(operation: AnyLayers, tensors: Sequence[GraphTensor], handle: Any) -> Asked:
    """Bytes of the workspace, and of the reserve, perhaps with the weights."""
    network = Network(operation, tensors, handle)
    if "space" in network.given:
        return Asked(network.room, room_for_reserve(network, "reserve"))
    reserve = network.kept_weights + network.weights.nbytes
    return Asked(network.room, {"reserve": reserve} if "reserve" in network.given else {})


def room_for_reserve(network: Network, *names: str) -> dict[str, int]:
    """Bytes of a reserve, for each of these operands that is in no buffer, by name.

    Raises `Refused` if the buffer of one has fewer bytes.
    """
    held = dict[str, int]()
    for name in names:
        if name in network.given:
            nbytes = network.given[name].spec.nbytes
            if not nbytes:
                held[name] = network.reserve
            elif nbytes < network.reserve:
                raise Refused(lack_of_bytes(name, nbytes, network.reserve))
    return held


def _library_weights(operation: LayerWeights[int], tensors: Sequence[GraphTensor], handle: Any) -> Run:
    """The run that copies weights into their space. Raises `Refused` and `EngineFailure`."""
    weights = _Weights(operation, _by_name(operation, tensors), handle)
    spans = weights.spans(gradients=False)

    def run(addresses: Sequence[int], _: Sequence[float]) -> None:
        at = _by_name(operation, addresses)
        _Device().gather(weights, spans, at, at["space"])

    return run


def _asked_of_weights(operation: LayerWeights[int], tensors: Sequence[GraphTensor], handle: Any) -> Asked:
    """Bytes of the space of the weights."""
    return Asked(0, {"space": _Weights(operation, _by_name(operation, tensors), handle).nbytes})


implement(
    Recurrent,
    RecurrentBackwardData,
    RecurrentBackwardWeights,
    partly="what a recurrent layer keeps for its gradients leaves a plan only as bytes",
)
implement(
    Layers,
    LayersBackward,
    launchers={"library": Launcher(library_layers, packed=True, asked=_ask_for_memory)},
)
implement(
    LayerWeights,
    launchers={"library": Launcher(_library_weights, packed=True, asked=_asked_of_weights)},
)
