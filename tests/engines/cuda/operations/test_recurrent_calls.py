"""What a run of recurrent layers puts in memory, with a libcudnn that computes on NumPy."""

from __future__ import annotations

import ctypes
import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from cudnn_actor.engines.cuda.kernels import kernel
from cudnn_actor.engines.cuda.library import libcudnn
from cudnn_actor.engines.cuda.operations import IMPLEMENTATIONS, recurrent
from cudnn_actor.engines.cuda.operations.recurrent_calls import Layers, LayersBackward
from cudnn_actor.engines.cuda.planning.partition import cut
from cudnn_actor.engines.cuda.planning.recurrent_layers import replace_layers
from cudnn_actor.protocol import DType, TensorSpec
from cudnn_actor.protocol.operations import RecurrentMode
from cudnn_actor.protocol.operations.base import tensor_of

from ....whole import few
from .test_recurrent import CALLS, Recorded
from .test_recurrent_networks import Call, Named, Network, Values, backward_pass, forward_pass

_MODES = dict(enumerate((RecurrentMode.RELU, RecurrentMode.TANH, RecurrentMode.LSTM, RecurrentMode.GRU)))
_UNSET = 0xFF
"""Each byte of memory before something writes it: numbers of such bytes are NaN."""


class Memory:
    """The device's memory: operands with gaps between them, or without."""

    def __init__(self) -> None:
        self.bytes = np.empty(1 << 21, np.uint8)

    def clear(self, seed: int) -> None:
        self.bytes.fill(_UNSET)
        self._draw, self._next = random.Random(seed), 1 << 10

    def place(self, nbytes: int) -> int:
        start = self._next
        self._next += nbytes + self._draw.choice((0, 0, 256))
        return start

    def array(self, address: int, dims: Sequence[int]) -> np.ndarray:
        found: np.ndarray = self.bytes[address : address + 8 * int(np.prod(dims))].view(float).reshape(dims)
        return found

    def copy(self, into: int, source: int, nbytes: int, *_: Any) -> None:
        self.bytes[into : into + nbytes] = self.bytes[source : source + nbytes]

    def fill(self, address: int, value: int, nbytes: int, *_: Any) -> None:
        self.bytes[address : address + nbytes] = value


class Computing(Recorded):
    """A libcudnn that computes. As the real one, it writes 0 for the states of sequences without steps, may
    leave what is behind the end of a sequence, and has its own arrangement of weights."""

    def __init__(self) -> None:
        self.memory = Memory()
        self.mode: dict[str, Any] = {}
        self.kept: dict[bytes, list[Named]] = {}
        """The layers of each forward pass, by the bytes that their reserve has."""
        self.slopes: dict[bytes, Any] = {}
        """The layers, dy and the gradients of last states, by the bytes that the gradients by data make of
        the reserve."""
        super().__init__()

    def function(self, name: str, arguments: tuple[Any, ...]) -> Any:
        recorded = super().function(name, arguments)
        own = {
            "cudnnSetRNNDescriptor_v8": self.describe,
            "cudnnSetRNNDataDescriptor": self.describe_sequences,
            "cudnnRNNForward": self.forward,
            "cudnnRNNBackwardData_v8": self.by_data,
            "cudnnRNNBackwardWeights_v8": self.by_weights,
        }.get(name)
        if own is None:
            return recorded

        def called(*given: Any) -> int:
            own(
                SimpleNamespace(**dict(zip(CALLS[name].split(), given, strict=True)))
                if name in CALLS
                else given
            )
            status: int = recorded(*given)
            return status

        return ctypes.CFUNCTYPE(ctypes.c_int, *arguments)(called)

    def describe(self, given: Any) -> None:
        self.mode["mode"], self.ways = _MODES[given[2]], given[4] + 1
        self.features, self.hidden, self.state, self.layers = given[9:13]

    def describe_sequences(self, given: Any) -> None:
        self.steps, self.batch = given[3:5]
        self.mode["lengths"] = tuple(given[6][: self.batch])

    # Operands.

    def parts(self, space: int) -> Iterator[tuple[int, int, str, np.ndarray, Any]]:
        """Layer, direction, name, array and its rows in the operand, of all weights in their space."""
        gates, hidden = self.mode["mode"].gates, self.hidden
        numbers = [*range(2 * gates), *([8] if self.state < hidden else [])]
        for layer, way, number in itertools.product(range(self.layers), range(self.ways), numbers):
            at = space + 2048 * (16 * (layer * self.ways + way) + number)
            if number == 8:
                yield layer, way, "w_hr", self.memory.array(at, (self.state, hidden)), slice(None)
                continue
            rows = slice(number % gates * hidden, (number % gates + 1) * hidden)
            name, columns = ("w_hh", self.state) if number >= gates else ("w_ih", self.reads(layer))
            yield layer, way, name, self.memory.array(at, (hidden, columns)), rows
            yield layer, way, "bias", self.memory.array(at + 1024, (hidden,)), (number // gates, rows)

    def reads(self, layer: int) -> int:
        return int(self.ways * self.state if layer else self.features)

    def weights(self, space: int) -> list[Named]:
        rows = self.mode["mode"].gates * self.hidden
        found: list[Named] = [
            {
                "w_ih": np.empty((self.ways, rows, self.reads(layer))),
                "w_hh": np.empty((self.ways, rows, self.state)),
                "bias": np.empty((self.ways, 2, rows)),
            }
            for layer in range(self.layers)
        ]
        for each in found if self.state < self.hidden else ():
            each["w_hr"] = np.empty((self.ways, self.state, self.hidden))
        for layer, way, name, values, rows_of in self.parts(space):
            found[layer][name][way][rows_of] = values
        return found

    def states(self, address: int | None, size: int) -> list[np.ndarray]:
        """A state of each layer, as it lies in memory."""
        return (
            []
            if address is None
            else [*self.memory.array(address, (self.layers, self.ways, self.batch, size))]
        )

    def named(self, **addresses: int | None) -> list[Named]:
        """The states of each layer, by name: those of cells begin with c or dc."""
        found: list[Named] = [{} for _ in range(self.layers)]
        for name, address in addresses.items():
            size = self.hidden if "c" in name else self.state
            for own, value in zip(found, self.states(address, size), strict=False):
                own[name] = value.copy()
        return found

    def write(self, address: int | None, found: Sequence[Named], name: str) -> None:
        """Write a state of each layer: 0 for sequences without a step."""
        some = np.array(self.mode["lengths"]) > 0
        for into, each in zip(
            self.states(address, self.hidden if "c" in name else self.state), found, strict=False
        ):
            into[:] = each[name] * some[:, None]

    def sequences(self, address: int, features: int) -> np.ndarray:
        return self.memory.array(address, (self.steps, self.batch, features))

    # Calls.

    def forward(self, at: Any) -> None:
        self.memory.fill(at.work, _UNSET, at.work_bytes)
        given = [
            one | two
            for one, two in zip(self.weights(at.weights), self.named(h0=at.hx, c0=at.cx), strict=True)
        ]
        layers = forward_pass(self.mode, self.sequences(at.x, self.features).copy(), given)
        self.sequences(at.y, self.ways * self.state)[:] = layers[-1]["y"]
        self.write(at.hy, layers, "h_n")
        self.write(at.cy, layers, "c_n")
        if at.reserve_bytes:
            self.memory.fill(at.reserve, len(self.kept) + 1, at.reserve_bytes)
            self.kept[self.reserve_at(at)] = layers

    def reserve_at(self, at: Any) -> bytes:
        return self.memory.bytes[at.reserve : at.reserve + at.reserve_bytes].tobytes()

    def by_data(self, at: Any) -> None:
        self.memory.fill(at.work, _UNSET, at.work_bytes)
        layers, wide = self.kept[self.reserve_at(at)], self.ways * self.state
        for own, weights in zip(layers, self.weights(at.weights), strict=True):
            for name, value in weights.items():
                np.testing.assert_array_equal(value, own[name])
        np.testing.assert_array_equal(self.sequences(at.y, wide), layers[-1]["y"])
        ends = self.named(dh_n=at.dhy, dc_n=at.dcy)
        dy = self.sequences(at.dy, wide).copy()
        found = backward_pass(self.mode, layers, dy, ends, None)
        self.memory.fill(at.reserve, 128 + len(self.slopes), at.reserve_bytes)
        self.slopes[self.reserve_at(at)] = layers, dy, ends
        for number, length in enumerate(self.mode["lengths"]):
            self.sequences(at.dx, self.features)[:length, number] = found[0]["dx"][:length, number]
        self.write(at.dhx, found, "dh0")
        self.write(at.dcx, found, "dc0")

    def by_weights(self, at: Any) -> None:
        self.memory.fill(at.work, _UNSET, at.work_bytes)
        layers, dy, ends = self.slopes[self.reserve_at(at)]
        y = self.sequences(at.y, self.ways * self.state).copy()
        found = backward_pass(self.mode, layers, dy, ends, y)
        for layer, way, name, values, rows in self.parts(at.weights):
            np.add(values, found[layer][f"d{name}"][way][rows], out=values)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Computing:
    """Stands for libcudnn and CuPy."""
    found = Computing()
    runtime = SimpleNamespace(
        memcpyAsync=found.memory.copy,
        memsetAsync=found.memory.fill,
    )
    stream = SimpleNamespace(ptr=5, synchronize=lambda: None)
    cupy = SimpleNamespace(
        asarray=lambda _: SimpleNamespace(data=SimpleNamespace(ptr=77)),
        cuda=SimpleNamespace(get_current_stream=lambda: stream),
    )
    for module in (libcudnn, recurrent):
        monkeypatch.setattr(module, "libcudnn", lambda: found)
    for module in (kernel, recurrent):
        monkeypatch.setattr(module, "libraries", lambda: SimpleNamespace(runtime=runtime, cupy=cupy))
    return found


class Run:
    """Runs calls in one memory."""

    def __init__(
        self, library: Computing, seed: int, buffers: Values, dims: Mapping[int, Sequence[int]]
    ) -> None:
        self.memory = library.memory
        self.memory.clear(seed)
        library.kept.clear()  # no more of them than a byte numbers
        library.slopes.clear()
        self.dims, self.buffers = dims, buffers
        self.at: dict[int, int] = {}
        self.held: dict[int, int] = {}
        """The bytes of what is in no buffer."""

    def run(self, *operations: Any) -> Values:
        """What the last of these calls writes, by uid, but for what only the library understands."""
        *before, operation = operations
        for each in before:
            self.run(each)
        launcher, named = IMPLEMENTATIONS[type(operation)].launchers["library"], [*operation.named()]
        node = operation.with_operands({name: number for number, (name, _) in enumerate(named)}.__getitem__)
        opaque = {name: uid for name, uid in named if name in ("reserve", "space", "slopes")}
        own = {uid: self.dims.get(uid, (self.held.get(uid, 0),)) for uid in opaque.values()}
        tensors = [
            tensor_of(
                n,
                TensorSpec.packed(own[uid], DType.UINT8)
                if uid in own
                else TensorSpec.packed(self.dims[uid], DType.FLOAT64),
            )
            for n, (_, uid) in enumerate(named)
        ]
        handle: Any = SimpleNamespace(backend_handle=9)
        assert launcher.asked is not None
        asked = launcher.asked(node, tensors, handle)
        self.held |= {opaque[name]: nbytes for name, nbytes in asked.held.items()}
        for uid in dict.fromkeys(uid for _, uid in named if uid not in self.at):
            nbytes = self.held.get(uid, own[uid][0]) if uid in own else 8 * int(np.prod(self.dims[uid]))
            self.at[uid] = self.memory.place(nbytes)
            if uid in self.buffers:
                self.memory.array(self.at[uid], self.dims[uid])[:] = self.buffers[uid]
        workspace = self.memory.place(asked.workspace)
        launcher.make(node, tensors, handle)([*(self.at[uid] for _, uid in named), workspace], ())
        written = (uid for uid in operation.writes if uid not in own)
        return {uid: self.memory.array(self.at[uid], self.dims[uid]).copy() for uid in written}


def forward_of(operation: LayersBackward[int], y: int) -> Layers[int]:
    """The layers of which these are the gradients."""
    names = ("x", "w_ih", "w_hh", "bias", "w_hr", "h0", "c0", "reserve", "mode", "lengths")
    return Layers(**{name: getattr(operation, name) for name in names}, y=y)


@pytest.mark.parametrize("first", few(range(0, 90, 30), 1))
def test_a_run_computes_in_memory_what_its_operation_says(library: Computing, first: int) -> None:
    for seed in range(first, first + 30):
        print(f"Network({seed})")  # noqa: T201 - shown if it fails
        body = Network(seed).graph().body
        parts = cut(body)
        for piece in () if parts is None else (each.graph for each in parts.pieces):
            *before, operation = replace_layers(piece)
            if not isinstance(operation, Layers | LayersBackward):
                continue
            rng = np.random.default_rng(seed)
            dims = {tensor.uid: tensor.dims for tensor in piece.tensors}
            buffers = {uid: rng.normal(size=dims[uid]) for uid in piece.bound if uid not in piece.written}
            wanted = Call(operation, buffers).run()
            compare(Run(library, seed, buffers, dims).run(*before, operation), wanted)
            if isinstance(operation, LayersBackward) and operation.y is None:
                y = 1 + operation.reserve
                width = dims[operation.w_hh[0]]
                of_y = (*dims[operation.x][:2], width[0] * width[2])
                run = Run(library, seed, buffers, dims | {y: of_y})
                run.run(forward_of(operation, y))
                compare(run.run(msgspec.structs.replace(operation, y=y, again=False)), wanted)


def compare(found: Values, wanted: Values) -> None:
    assert found.keys() == wanted.keys()
    for uid, value in found.items():
        np.testing.assert_array_equal(value, wanted[uid])
