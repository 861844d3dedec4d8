"""A recurrent layer and its two gradients as three messages, with a reserve of bytes; and what they give."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
import numpy as np

from cudnn_actor import BufferRef, CudnnRef, DType, TensorSpec
from cudnn_actor.operations import (
    Recurrent,
    RecurrentBackwardData,
    RecurrentBackwardWeights,
    RecurrentMode,
)

__all__ = ["LAYERS", "Arrays", "Layer", "OnDevice"]

Arrays = dict[str, np.ndarray]
STEPS, BATCH, FEATURES, HIDDEN, SMALLER = 5, 4, 6, 8, 3
LENGTHS = (5, 0, 3, 1)
_OF_WEIGHTS = ("x", "h0")
LSTM, GRU = RecurrentMode.LSTM, RecurrentMode.GRU


class Layer(NamedTuple):
    """What kind of a layer it is. `bare`: without a bias, and with a state that begins with 0."""

    mode: RecurrentMode
    directions: int = 1
    state: int = HIDDEN
    lengths: tuple[int, ...] | None = None
    dtype: DType = DType.FLOAT32
    bare: bool = False

    @property
    def how(self) -> dict[str, Any]:
        """The parameters of the operations."""
        return {"mode": self.mode, "lengths": self.lengths}

    @property
    def inputs(self) -> Arrays:
        """Values of what the layer reads, and of the gradients of its results."""
        rows = self.mode.gates * HIDDEN
        states = {"h": (self.directions, BATCH, self.state)}
        states |= {"c": (self.directions, BATCH, HIDDEN)} if self.mode is LSTM else {}
        dims: dict[str, tuple[int, ...]] = {
            "x": (STEPS, BATCH, FEATURES),
            "w_ih": (self.directions, rows, FEATURES),
            "w_hh": (self.directions, rows, self.state),
            "dy": (STEPS, BATCH, self.directions * self.state),
        }
        dims |= {f"d{name}_n": each for name, each in states.items()}
        if not self.bare:
            dims |= {"bias": (self.directions, 2, rows)} | {f"{name}0": each for name, each in states.items()}
        if self.state < HIDDEN:
            dims["w_hr"] = (self.directions, self.state, HIDDEN)
        rng = np.random.default_rng(7)
        return {name: (rng.standard_normal(each) / 2).astype(self.dtype.numpy) for name, each in dims.items()}

    def results(self) -> Arrays:
        """What the three messages give, by their definitions, in float64."""
        values = {name: array.astype(np.float64) for name, array in self.inputs.items()}
        operands: Any = dict.fromkeys(values, 0)
        forward: Any = Recurrent(**self._of(Recurrent, operands), **self.how)
        found = forward.evaluate(np, values, dict.fromkeys(self.ends, TensorSpec.packed(())))
        data: Any = RecurrentBackwardData(**self._of(RecurrentBackwardData, operands | found), **self.how)
        back = data.evaluate(np, values | found, dict.fromkeys(self.slopes, TensorSpec.packed(())))
        weights: Any = RecurrentBackwardWeights(x=0, y=0, slopes=0, **self.how)
        given = {name: values[name] for name in _OF_WEIGHTS if name in values}
        given |= {"y": found["y"], "slopes": back["slopes"]}
        last = weights.evaluate(np, given, dict.fromkeys(self.gradients, TensorSpec.packed(())))
        every = {**found, **back, **last}
        return {name: every[name] for name in every if name not in ("reserve", "slopes")}

    @property
    def ends(self) -> tuple[str, ...]:
        """The outputs of the layer."""
        return ("y", "h_n", *(["c_n"] if self.mode is LSTM else []), "reserve")

    @property
    def slopes(self) -> tuple[str, ...]:
        """The outputs of the gradients by data."""
        return ("dx", "dh0", *(["dc0"] if self.mode is LSTM else []), "slopes")

    @property
    def gradients(self) -> tuple[str, ...]:
        """The outputs of the gradients by weights."""
        return ("dw_ih", "dw_hh", "dbias", *(["dw_hr"] if self.state < HIDDEN else []))

    @staticmethod
    def _of(kind: Any, operands: Mapping[str, Any]) -> dict[str, Any]:
        return {name: operands[name] for name in kind.inputs if name in operands}

    async def on(self, gpu: CudnnRef) -> OnDevice:
        """The layer's messages, with all their buffers."""
        refs: Any = {name: await gpu.upload(array) for name, array in self.inputs.items()}
        layer: Any = Recurrent(**self._of(Recurrent, refs), **self.how)
        nbytes = await gpu.reserve_nbytes(layer)
        kept = {name: await gpu.empty((nbytes,), dtype="uint8") for name in ("reserve", "slopes")}
        results = self.results()
        into: Any = {
            name: await gpu.empty(array.shape, dtype=self.dtype.value) for name, array in results.items()
        }
        every = {**refs, **into, **kept}

        def message(kind: Any, outputs: tuple[str, ...]) -> Any:
            given = {name: every[name] for name in outputs}
            return kind(**self._of(kind, every), **given, **self.how)

        return OnDevice(
            gpu,
            message(Recurrent, self.ends),
            message(RecurrentBackwardData, self.slopes),
            message(RecurrentBackwardWeights, self.gradients),
            into,
        )


class OnDevice(NamedTuple):
    """The three messages, and where their results lie but for what is kept."""

    gpu: CudnnRef
    forward: Recurrent[BufferRef]
    data: RecurrentBackwardData[BufferRef]
    weights: RecurrentBackwardWeights[BufferRef]
    into: Mapping[str, BufferRef]

    async def train(self) -> Arrays:
        """Send the messages one after the other; their results."""
        for message in (self.forward, self.data, self.weights):
            await self.gpu.ask(message)
        return await self.read()

    async def read(self) -> Arrays:
        """The results, in float64 of half types."""
        found = {name: await self.gpu.download(ref) for name, ref in self.into.items()}
        return {name: array.astype(np.float64) for name, array in found.items()}

    def with_reserve(self, reserve: BufferRef) -> OnDevice:
        """The same messages, with another buffer for the reserve."""
        return self._replace(
            forward=msgspec.structs.replace(self.forward, reserve=reserve),
            data=msgspec.structs.replace(self.data, reserve=reserve),
        )


LAYERS = {
    "lstm": Layer(LSTM),
    "gru, both directions, lengths": Layer(GRU, directions=2, lengths=LENGTHS),
    "tanh, bare": Layer(RecurrentMode.TANH, bare=True),
    "relu, lengths": Layer(RecurrentMode.RELU, lengths=LENGTHS),
    "lstm, projection, both directions, lengths": Layer(LSTM, directions=2, state=SMALLER, lengths=LENGTHS),
    "lstm, projection, bare": Layer(LSTM, state=SMALLER, bare=True),
}
