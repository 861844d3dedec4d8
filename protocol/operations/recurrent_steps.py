"""The steps of recurrent layers with cells that cuDNN does not have: peepholes, bounds, functions by gate.

The definitions are ONNX's, of `RNN`, `GRU` and `LSTM`; the input's part of the gates is computed before.
https://onnx.ai/onnx/operators/onnx__LSTM.html

So the products with the input are one product of matrices for all steps, which every engine has, and what is
left is the walk from step to step. `Recurrent` is for the layers that cuDNN has.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.operations.base import (
    ALLOCATED,
    Array,
    Operation,
    Specs,
    T,
    require,
    require_floating,
)
from cudnn_actor.protocol.operations.example import ROUNDED, Example
from cudnn_actor.protocol.operations.functions import FUNCTIONS, PointwiseMode
from cudnn_actor.protocol.types.checks import is_finite, require_flag, require_member
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.records import Parameters
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["CellActivation", "CellFunction", "RecurrentCell", "RecurrentSteps"]


class CellFunction(enum.StrEnum):
    """A function that a gate or a state is computed with."""

    AFFINE = "affine"
    """alpha * x + beta"""
    ELU = "elu"
    """x where x > 0, else alpha * (exp(x) - 1)"""
    HARD_SIGMOID = "hard_sigmoid"
    """min(max(alpha * x + beta, 0), 1)"""
    LEAKY_RELU = "leaky_relu"
    """x where x > 0, else alpha * x"""
    RELU = "relu"
    """max(x, 0)"""
    SCALED_TANH = "scaled_tanh"
    """alpha * tanh(beta * x)"""
    SIGMOID = "sigmoid"
    """1 / (1 + exp(-x))"""
    SOFTPLUS = "softplus"
    """log(1 + exp(x))"""
    SOFTSIGN = "softsign"
    """x / (1 + abs(x))"""
    TANH = "tanh"
    """tanh(x)"""
    THRESHOLDED_RELU = "thresholded_relu"
    """x where x > alpha, else 0"""


class RecurrentCell(enum.StrEnum):
    """The computation of a step. For each gate, "input" is its part of `x`, and "state" its rows of
    `h @ w.T + bias`. f, g and k are the functions of a direction in the order of
    `RecurrentSteps.activations`.
    """

    PLAIN = "plain"
    """h = f(input + state)"""
    LSTM = "lstm"
    """With gates i, f, g, o in this order: i = f(input + state + p_i * c), f = f(input + state + p_f * c),
    g = g(input + state), c = f * c + i * g, o = f(input + state + p_o * c) and h = o * k(c)"""
    GRU = "gru"
    """A cell with gates r, z, n in this order: r and z are f(input + state), n = g(input + r * state), and
    h = (1 - z) * n + z * h"""
    GRU_RESET_FIRST = "gru_reset_first"
    """`GRU`, but the state is multiplied by r before the product: n = g(input + rows of
    (r * h) @ w.T + bias)"""

    @property
    def gates(self) -> int:
        """How many gates there are."""
        return {RecurrentCell.PLAIN: 1, RecurrentCell.LSTM: 4}.get(self, 3)

    @property
    def functions(self) -> int:
        """How many functions a direction has."""
        return {RecurrentCell.PLAIN: 1, RecurrentCell.LSTM: 3}.get(self, 2)


class CellActivation(Parameters):
    """A function with its parameters; functions that have none of them ignore them.

    Parameters
    ----------
    function
        Which it is.
    alpha, beta
        See `CellFunction`.
    """

    function: CellFunction
    alpha: float = 1.0
    beta: float = 0.0

    def __call__(self, xp: Any, x: Array) -> Array:
        """The function of an array, by a library with NumPy's interface."""
        a, b = self.alpha, self.beta
        match self.function:
            case CellFunction.AFFINE:
                return a * x + b
            case CellFunction.HARD_SIGMOID:
                return xp.minimum(xp.maximum(a * x + b, 0.0), 1.0)
            case CellFunction.SCALED_TANH:
                return a * xp.tanh(b * x)
            case CellFunction.THRESHOLDED_RELU:
                return xp.where(x > a, x, 0.0)
            case CellFunction.RELU:
                return xp.maximum(x, 0.0)
        function = FUNCTIONS[PointwiseMode(self.function)]
        given = {CellFunction.SOFTPLUS: (1.0,)}.get(self.function, (a,))
        return function(xp, [x], given[: len(function.parameters)])


_LITTLE_WORK = 1 << 18
"""Products of a step."""
_TANH, _SIGMOID = (CellActivation(function=each) for each in (CellFunction.TANH, CellFunction.SIGMOID))
_USUAL = {
    RecurrentCell.PLAIN: (_TANH,),
    RecurrentCell.LSTM: (_SIGMOID, _TANH, _TANH),
    RecurrentCell.GRU: (_SIGMOID, _TANH),
    RecurrentCell.GRU_RESET_FIRST: (_SIGMOID, _TANH),
}


class _Own(NamedTuple):
    """The parameters of a direction: its weights, its bias, and its peepholes or None."""

    w: Array
    bias: Array
    peepholes: Array | None


class RecurrentSteps(Operation[T], tag=True):
    """The steps of a recurrent layer, in one direction or in both. Answered by a `Receipt`.

    T is the number of steps, B of sequences, H of units and G of gates. D is 1, or 2 with the direction that
    begins at the end. All have x's dtype unless something else is said. The state is carried from step to
    step in float32 (float64 where x is). There are no gradients.

    Parameters
    ----------
    x
        The input's part of the gates, of a floating-point dtype, dims (T, B, D * G * H): what a layer's input
        gives times its weights, plus a bias if there is one. Gates are in the order of `RecurrentCell`.
    w
        The weights of the state, dims (D, G * H, H).
    bias
        Of the state's part of the gates, dims (D, G * H). None for 0.
    peepholes
        Of an LSTM, dims (D, 3, H): what the gates i, f and o see of its cells. None for 0.
    lengths
        How many steps each sequence has, dims (B,), int32 or int64; None for T. A number below 0 counts as 0,
        and one above T as T. The direction that begins at the end begins at a sequence's own end.
    h0, c0
        The state before the first step, and of an LSTM its cells, dims (D, B, H). None for 0.
    y
        Result, dims (T, B, D * H): the states of each step. 0 behind the end of a sequence.
    h_n, c_n
        The state behind the last step of each sequence, and of an LSTM its cells, dims (D, B, H).
    cell
        What a step computes.
    activations
        The functions of each direction, one direction behind the other: one of `PLAIN`; of a GRU that of r
        and z, and that of n; of an LSTM that of i, f and o, that of g, and that of the cells. None given are
        sigmoid for gates that others are multiplied by, and tanh.
    clip
        What the gates' functions are taken of is bounded to -clip and clip; the cells are not. None for no
        bounds.
    coupled
        Of an LSTM: whether the gate f is 1 - i. What x, w and the others have for it has no effect.
    reverse
        Of one direction: whether it begins at the end.
    """

    kind = "recurrent_steps"
    slack = 4.0
    inputs = ("x", "w", "bias", "peepholes", "lengths", "h0", "c0")
    outputs = ("y", "h_n", "c_n")
    optional = frozenset({"bias", "peepholes", "lengths", "h0", "c0", "h_n", "c_n"})
    takes_empty = True
    x: T
    w: T
    bias: T | None = None
    peepholes: T | None = None
    lengths: T | None = None
    h0: T | None = None
    c0: T | None = None
    y: T = ALLOCATED
    h_n: T | None = None
    c_n: T | None = None
    cell: RecurrentCell
    activations: tuple[CellActivation, ...] = ()
    clip: float | None = None
    coupled: bool = False
    reverse: bool = False

    def functions(self, directions: int) -> tuple[CellActivation, ...]:
        """`activations`, also where none are given."""
        return self.activations or _USUAL[self.cell] * directions

    def is_backwards(self, way: int) -> bool:
        """Whether a direction begins at the end."""
        return self.reverse or way == 1

    def infer(self, specs: Specs) -> dict[str, TensorSpec]:
        require_floating(specs, "x")
        self._check_options(specs)
        x, w = specs["x"], specs["w"]
        for name, words in (("x", "(T, B, D * G * H)"), ("w", "(D, G * H, H)")):
            if specs[name].rank != 3:
                raise InvalidRequest(
                    field=name,
                    value=specs[name].dims,
                    problem=f"has rank {specs[name].rank}, and 3 is needed",
                    fix=f"give it dims {words}",
                )
        (steps, batch, _), (directions, rows, hidden) = x.dims, w.dims
        if directions not in (1, 2) or rows != self.cell.gates * hidden:
            raise InvalidRequest(
                field="w",
                value=w.dims,
                problem=f"are no weights of {self.cell.gates} gates in one or two directions",
                fix=f"give it dims (1 or 2, {self.cell.gates} * H, H)",
            )
        self._check_directions(directions)
        require(specs, "x", (steps, batch, directions * rows))
        state = (directions, batch, hidden)
        dims = {
            "w": w.dims,
            "bias": (directions, rows),
            "peepholes": (directions, 3, hidden),
            "h0": state,
            "c0": state,
        }
        for name, wanted in dims.items():
            if name in specs:
                require(specs, name, wanted, x.dtype)
        if "lengths" in specs:
            require(specs, "lengths", (batch,), DType.INT32, DType.INT64)
        ends = ("h_n", "c_n") if self.cell is RecurrentCell.LSTM else ("h_n",)
        return {
            "y": TensorSpec.packed((steps, batch, directions * hidden), x.dtype),
            **dict.fromkeys(ends, TensorSpec.packed(state, x.dtype)),
        }

    def check(self, specs: Specs) -> None:
        self._check_options(specs)
        super().check(specs)

    def _check_options(self, specs: Specs) -> None:
        require_member("cell", self.cell, RecurrentCell)
        for name in ("coupled", "reverse"):
            require_flag(name, getattr(self, name))
        given = [name for name in ("peepholes", "c0", "c_n") if name in specs]
        if self.cell is not RecurrentCell.LSTM and (self.coupled or given):
            name = given[0] if given else "coupled"
            raise InvalidRequest(
                field=name,
                value=specs[name].dims if given else True,
                problem=f"is none of {self.cell}'s",
                fix="leave it out: it is for LSTMs alone",
            )
        if self.clip is not None and not (is_finite(self.clip) and self.clip > 0):
            raise InvalidRequest(
                field="clip",
                value=self.clip,
                problem="is no number above 0",
                fix="give the largest value of what gates are computed from, or None for no bounds",
            )

    def _check_directions(self, directions: int) -> None:
        if self.reverse and directions == 2:
            raise InvalidRequest(
                field="reverse",
                value=True,
                problem="is for one direction, and w has two",
                fix="leave it out: the second direction begins at the end",
            )
        wanted, given = directions * self.cell.functions, self.activations
        if given and len(given) != wanted:
            raise InvalidRequest(
                field="activations",
                value=len(given),
                problem=f"are not {wanted}, {self.cell.functions} for each of {directions} directions",
                fix="give as many, or none for the usual ones",
            )
        for number, each in enumerate(given):
            field = f"activations[{number}]"
            require_member(f"{field}.function", each.function, CellFunction)
            for name in ("alpha", "beta"):
                if not is_finite(value := getattr(each, name)):
                    problem, fix = "is no finite number", "give a number"
                    raise InvalidRequest(field=f"{field}.{name}", value=value, problem=problem, fix=fix)

    def work(self, specs: Specs) -> int:
        steps, batch, _ = specs["x"].dims
        return steps * batch * specs["w"].size + specs["x"].size

    def samples(self, xp: Any, specs: Specs, draw: Callable[[TensorSpec], Array]) -> dict[str, Array]:
        """Values with which no gate is at its end, and no state grows; lengths of all steps or a few less."""
        found = {}
        for name in ("x", "w", "bias", "peepholes", "h0", "c0"):
            if name in specs:
                terms = max(1, specs["w"].dims[2]) if name == "w" else 1
                found[name] = (draw(specs[name]) - 0.5) * 2.0 ** -round(3 + math.log2(terms) / 2)
        if "lengths" in specs:
            steps = specs["x"].dims[0]
            found["lengths"] = xp.maximum(steps - 3 - draw(specs["lengths"]), steps // 2)
        return found

    def evaluate(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        if hasattr(xp, "asnumpy") and values["x"].shape[1] * values["w"].size <= _LITTLE_WORK:
            # CuPy, on which a step would be many launches, which take longer than NumPy does with so little.
            given = {name: xp.asnumpy(value) for name, value in values.items()}
            return {name: xp.asarray(of) for name, of in self.evaluate(np, given, specs).items()}
        x, w = values["x"], values["w"]
        (steps, batch, _), (directions, rows, hidden) = x.shape, w.shape
        bias, peepholes = values.get("bias", xp.zeros((directions, rows))), values.get("peepholes")
        lengths = values.get("lengths", xp.full((batch,), steps))
        inside = (xp.arange(steps)[:, None] < lengths)[..., None]
        functions, count = self.functions(directions), self.cell.functions
        y = xp.zeros((steps, batch, directions * hidden))
        h_n = xp.array(values.get("h0", xp.zeros((directions, batch, hidden))))
        c_n = xp.array(values.get("c0", xp.zeros((directions, batch, hidden))))
        for way in range(directions):
            own = _Own(w[way].T, bias[way], None if peepholes is None else peepholes[way])
            of_way = functions[way * count : (way + 1) * count]
            h, c = h_n[way], c_n[way]
            for time in range(steps)[:: -1 if self.is_backwards(way) else 1]:
                of_input = x[time, :, way * rows : (way + 1) * rows]
                new, cells = self._step(xp, of_way, of_input, (h, c), own)
                one = inside[time]
                y[time, :, way * hidden : (way + 1) * hidden] = xp.where(one, new, 0.0)
                h, c = xp.where(one, new, h), xp.where(one, cells, c)
            h_n[way], c_n[way] = h, c
        found = {"y": y, "h_n": h_n, "c_n": c_n}
        return {name: found[name] for name in specs}

    def _step(
        self,
        xp: Any,
        functions: Sequence[CellActivation],
        of_input: Array,
        before: tuple[Array, Array],
        own: _Own,
    ) -> tuple[Array, Array]:
        """h and c behind a step."""
        h, c = before
        f, *others = (self._bound_gates(xp, each) for each in functions)
        hidden = h.shape[-1]
        parts = [slice(number * hidden, (number + 1) * hidden) for number in range(self.cell.gates)]
        if self.cell is RecurrentCell.GRU_RESET_FIRST:
            r, z = (f(of_input[:, at] + (h @ own.w[:, at] + own.bias[at])) for at in parts[:2])
            n = others[0](of_input[:, parts[2]] + ((r * h) @ own.w[:, parts[2]] + own.bias[parts[2]]))
            return (1 - z) * n + z * h, c
        of_state = h @ own.w + own.bias
        gates = [of_input[:, at] + of_state[:, at] for at in parts]
        if self.cell is RecurrentCell.PLAIN:
            return f(gates[0]), c
        if self.cell is RecurrentCell.GRU:
            r, z = f(gates[0]), f(gates[1])
            n = others[0](of_input[:, parts[2]] + r * of_state[:, parts[2]])
            return (1 - z) * n + z * h, c
        p = xp.zeros((3, hidden)) if own.peepholes is None else own.peepholes
        i = f(gates[0] + p[0] * c)
        forget = 1 - i if self.coupled else f(gates[1] + p[1] * c)
        cells = forget * c + i * others[0](gates[2])
        return f(gates[3] + p[2] * cells) * functions[2](xp, cells), cells

    def _bound_gates(self, xp: Any, function: CellActivation) -> Callable[[Array], Array]:
        """A function behind the bounds that there are for what gates are computed from."""
        clip = self.clip
        if clip is None:
            return lambda x: function(xp, x)
        return lambda x: function(xp, xp.minimum(xp.maximum(x, -clip), clip))


def _of_cell(cell: RecurrentCell, directions: int, *names: str, **of: Any) -> Example:
    hidden, rows = 6, 6 * cell.gates
    state = (directions, 3, hidden)
    dims = {"x": (5, 3, directions * rows), "w": (directions, rows, hidden), "bias": (directions, rows)}
    more = {"peepholes": (directions, 3, hidden), "lengths": (3,), "h0": state, "c0": state}
    dims |= {name: more[name] for name in names}
    given: dict[str, Any] = {name: name for name in dims}
    ends: dict[str, Any] = {name.replace("0", "_n"): name.replace("0", "_n") for name in names if "0" in name}
    operation: RecurrentSteps[Any] = RecurrentSteps(**given, y="y", **ends, cell=cell, **of)
    dtypes = {"lengths": DType.INT32} if "lengths" in names else {}
    return Example(dims=dims, dtypes=dtypes, operations=(operation,), tolerance=ROUNDED)


def examples() -> tuple[Example, ...]:
    """An LSTM with peepholes, a GRU that resets first, and one of bounded straight lines."""
    lines = (CellActivation(function=CellFunction.HARD_SIGMOID, alpha=0.2, beta=0.5),)
    return (
        _of_cell(RecurrentCell.LSTM, 2, "peepholes", "lengths", "h0", "c0", clip=3.0),
        _of_cell(RecurrentCell.GRU_RESET_FIRST, 2, "h0"),
        _of_cell(RecurrentCell.PLAIN, 1, "lengths", activations=lines, reverse=True),
    )
