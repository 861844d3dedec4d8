"""The base of a recurrent layer and its gradients: the computation of a step, and checks of operands."""

from __future__ import annotations

import enum
import math
from collections.abc import Callable
from typing import Any, NamedTuple

from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.operations.base import Array, Operation, Specs, T, require, require_elements
from cudnn_actor.protocol.operations.reserves import is_bytes, require_bytes
from cudnn_actor.protocol.types.checks import is_whole, require_member
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["KEPT", "LayerSizes", "RecurrentLayer", "RecurrentMode", "walk"]


class RecurrentMode(enum.StrEnum):
    """The computation of a step. For each gate, "input" is its rows of `x @ w_ih.T + bias[0]`, and "state"
    those of `h @ w_hh.T + bias[1]`.
    """

    RELU = "relu"
    """h = max(input + state, 0)"""
    TANH = "tanh"
    """h = tanh(input + state)"""
    LSTM = "lstm"
    """c = f * c + i * g and h = o * tanh(c), with gates i, f, g, o in this order: g is tanh(input + state),
    and each of the others sigmoid(input + state)"""
    GRU = "gru"
    """h = (1 - z) * n + z * h, with gates r, z, n in this order: r and z are sigmoid(input + state), and n is
    tanh(input + r * state)"""

    @property
    def gates(self) -> int:
        """How many gates there are."""
        return {RecurrentMode.LSTM: 4, RecurrentMode.GRU: 3}.get(self, 1)


KEPT = ("reserve", "slopes")
"""Operands that may be bytes."""


class LayerSizes(NamedTuple):
    """The sizes of a layer.

    Parameters
    ----------
    steps, batch, features
        Of x.
    directions
        1 or 2.
    hidden
        Units of a direction.
    state
        Elements of h: as many, or fewer if it is a projection.
    """

    steps: int
    batch: int
    features: int
    directions: int
    hidden: int
    state: int

    @property
    def has_projection(self) -> bool:
        """Whether h is a projection."""
        return self.state < self.hidden


class _Step(NamedTuple):
    """One step of a direction.

    Parameters
    ----------
    time
        Its number in the sequence.
    before
        That of the step that comes before it in this direction; None of the first one.
    """

    time: int
    before: int | None


def walk(steps: int, direction: int) -> list[_Step]:
    """The steps of a direction in the order in which they are computed: the second one begins at the end."""
    times = range(steps) if direction == 0 else range(steps - 1, -1, -1)
    return [_Step(time, None if n == 0 else times[n - 1]) for n, time in enumerate(times)]


class RecurrentLayer(Operation[T]):
    """The base of the three operations: the mode, the lengths, and checks of operands."""

    slack = 4.0
    mode: RecurrentMode
    lengths: tuple[int, ...] | None = None

    def slack_of(self, dtype: DType) -> float:
        """More for half types: each step rounds the state and the gates to the operands' type."""
        return {DType.FLOAT16: 16.0, DType.BFLOAT16: 128.0}.get(dtype, self.slack)

    def kept_numbers(self, *, projected: bool) -> int:
        """How many numbers `reserve` and `slopes` have for each unit, at each step."""
        if self.mode is RecurrentMode.LSTM:
            return 6 if projected else 5
        return 4 if self.mode is RecurrentMode.GRU else 1

    def _check_mode(self, specs: Specs, *of_lstm: str) -> None:
        require_member("mode", self.mode, RecurrentMode)
        for name in of_lstm:
            if name in specs and self.mode is not RecurrentMode.LSTM:
                raise InvalidRequest(
                    field=name,
                    value=specs[name].dims,
                    problem=f"is none of {self.mode}'s",
                    fix="leave it out: it is for LSTMs alone",
                )

    def _check_ranks(self, specs: Specs, **dims: str) -> None:
        for name, words in dims.items():
            wanted = words.count(",") + 1
            if name in KEPT and name in specs and is_bytes(specs[name]):
                require_bytes(specs, name)
            elif name in specs and specs[name].rank != wanted:
                raise InvalidRequest(
                    field=name,
                    value=specs[name].dims,
                    problem=f"has rank {specs[name].rank}, and {wanted} is needed",
                    fix=f"give it dims ({words})",
                )

    def _check_lengths(self, steps: int, batch: int) -> None:
        lengths = self.lengths
        if lengths is None:
            return
        if len(lengths) != batch:
            raise InvalidRequest(
                field="lengths",
                value=lengths,
                problem=f"are not one for each of {batch} sequences",
                fix="give as many as the batch has",
            )
        for length in lengths:
            if not is_whole(length) or not 0 <= length <= steps:
                raise InvalidRequest(
                    field="lengths",
                    value=length,
                    problem=f"is not from 0 to {steps}, which is the number of steps",
                    fix="give x as many steps as the longest sequence has",
                )

    def _of_weights(self, specs: Specs, steps: int, batch: int) -> LayerSizes:
        """The sizes that follow from the weights, which are checked."""
        self._check_ranks(
            specs, w_ih="D, gates * H, I", w_hh="D, gates * H, P", w_hr="D, P, H", h0="D, B, P", c0="D, B, H"
        )
        dtype, gates = specs["w_ih"].dtype, self.mode.gates
        directions, rows, features = specs["w_ih"].dims
        hidden, state = rows // gates, specs["w_hh"].dims[2]
        if directions not in (1, 2) or rows % gates:
            raise InvalidRequest(
                field="w_ih",
                value=specs["w_ih"].dims,
                problem=f"are no weights of {gates} gates in one or two directions",
                fix=f"give it dims (1 or 2, {gates} * H, I)",
            )
        for name in ("w_ih", "w_hh", "w_hr"):
            if name in specs:
                require_elements(specs, name, range(3), "units or features")
        require(specs, "w_hh", (directions, rows, state), dtype)
        if "w_hr" in specs:
            if not 0 < state < hidden:
                raise InvalidRequest(
                    field="w_hh",
                    value=specs["w_hh"].dims,
                    problem=f"is not of fewer elements than the {hidden} units that they are a projection of",
                    fix="give it dims (D, gates * H, P), with P < H",
                )
            require(specs, "w_hr", (directions, state, hidden), dtype)
        else:
            require(specs, "w_hh", (directions, rows, hidden), dtype)
        for name, size in (("h0", state), ("c0", hidden)):
            if name in specs:
                require(specs, name, (directions, batch, size), dtype)
        return LayerSizes(steps, batch, features, directions, hidden, state)

    def _kept_spec(self, sizes: LayerSizes, dtype: DType) -> TensorSpec:
        """The spec of `reserve` and `slopes`."""
        kept = self.kept_numbers(projected=sizes.has_projection)
        dims = (sizes.directions, sizes.steps, sizes.batch, kept, sizes.hidden)
        return TensorSpec.packed(dims, self.compute((dtype,)))

    def kept_specs(self, specs: Specs) -> dict[str, TensorSpec]:
        """For each operand that is given as bytes, the spec of the tensor that these stand for.

        `specs`: of all operands, which `check` accepts.
        """
        named = [name for name in KEPT if name in specs and is_bytes(specs[name])]
        return dict.fromkeys(named, self._kept_of(specs)) if named else {}

    def _kept_of(self, specs: Specs) -> TensorSpec:
        """The spec of the tensor that a reserve, or slopes, stand for."""
        return self._kept_spec(self._of_weights(specs, *specs["x"].dims[:2]), specs["x"].dtype)

    def _without_bytes(self, specs: Specs, name: str) -> Specs:
        """The specs without those of an output that is bytes, which are checked."""
        if name not in specs or not is_bytes(specs[name]):
            return specs
        require_bytes(specs, name)
        return {other: spec for other, spec in specs.items() if other != name}

    def within(self, xp: Any, steps: int, batch: int) -> Array:
        """Whether a sequence has a step, of dims (T, B, 1)."""
        if self.lengths is None:
            return xp.ones((steps, batch, 1), bool)
        return (xp.arange(steps)[:, None] < xp.asarray(self.lengths, dtype=xp.int64).reshape(1, -1))[
            ..., None
        ]

    def _draw_small(
        self, xp: Any, specs: Specs, draw: Callable[[TensorSpec], Array], *names: str
    ) -> dict[str, Array]:
        """Values with which no gate is at its end: others would have gradients of almost 0.

        Their mean is 0. States would grow to 1 with another one, from step to step and from layer to layer.
        Nor does a sum that a maximum is taken of come near 0, where a rounding would decide on the gradient:
        the terms of each unit have one sign, that of every other unit is below 0.
        """
        found = {}
        for name in names:
            if name in specs:
                terms = specs[name].dims[-1] if name.startswith("w_") else 1
                found[name] = (draw(specs[name]) - 0.5) * 2.0 ** -round(2 + math.log2(terms) / 2)
                if self.mode is RecurrentMode.RELU and not name.startswith("d"):
                    found[name] = self._of_one_sign(xp, name, found[name])
        return found

    def _of_one_sign(self, xp: Any, name: str, values: Array) -> Array:
        """Values away from 0: above, or of weights below for every other unit; those of the state are small
        enough that it does not grow."""
        least = 2.0 ** -round(3 + math.log2(max(1, values.shape[-1])) / 2)
        values = xp.abs(values) + least
        if name in ("x", "h0"):
            return values
        units = values.shape[-1] if name == "bias" else values.shape[1]
        signs = 1 - 2 * (xp.arange(units) % 2)
        values = values * (signs if name == "bias" else signs[:, None])
        return values * 2.0 ** -round(math.log2(values.shape[-1]) / 2) if name == "w_hh" else values
