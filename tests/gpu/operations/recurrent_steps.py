"""The steps of recurrent layers with peepholes, bounds and functions by gate, with errors that are followed
from step to step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from cudnn_actor.engines.cpu.exact.evaluation import NumPy
from cudnn_actor.protocol import DType
from cudnn_actor.protocol.operations import (
    CellActivation,
    CellFunction,
    RecurrentCell,
    RecurrentSteps,
    Specs,
)
from cudnn_actor.protocol.operations.base import Array

from .errors import Off, doubled
from .rows import BARE, FLOATS, Asked, Exact, Made, Row, Sizes

__all__ = ["EXACTNESS", "ROWS"]

EXACTNESS = """\
Each step adds to the error of the state that it reads. With e for how far that may be off, and v(L) for
max(w(L), L / 2), what gates are computed from is off by (v(H) + 2) · sum of \\|h w\\| + sum of \\|e w\\|
and the roundings of the sums that follow. A function is off by its steepest slope times that, and by
4 (1 + \\|alpha\\| + \\|beta\\|) (1 + \\|x\\|) u. What follows is of a few products and sums, each off by at
most 2 u of its terms.
"""

PLAIN, LSTM, GRU, FIRST = "plain", "lstm", "gru", "gru that resets first"
FUNCTIONS, CLIP, COUPLED, BOTH, BACKWARDS = "functions", "clip", "coupled", "both directions", "reverse"
STEP, UNIT, LONG = "one step", "one unit", "many steps"
FORMS = (PLAIN, LSTM, GRU, FIRST, FUNCTIONS, CLIP, COUPLED, BOTH, BACKWARDS, STEP, UNIT, LONG)
_OF_LSTM = ("peepholes", "c0", "c_n")
_SMOOTH = tuple(each for each in CellFunction if each is not CellFunction.THRESHOLDED_RELU)
"""An error decides which side of a threshold a value is on."""
_FRACTIONS = CellFunction.SIGMOID, CellFunction.HARD_SIGMOID
"""Functions for gates of many steps: a gate that is over 1, or below 0, lets a state grow with each step."""
_FEW_STEPS = 8


def _make(asked: Asked) -> Made:
    choose = asked.choose
    steps, batch, hidden = _sizes(asked)
    cells = {PLAIN: RecurrentCell.PLAIN, GRU: RecurrentCell.GRU, FIRST: RecurrentCell.GRU_RESET_FIRST}
    cell = cells.get(asked.form or "", RecurrentCell.LSTM)
    if asked.form in (None, BARE):
        cell = choose.one(RecurrentCell)
    reverse = asked.has(BACKWARDS, 0.2)
    directions = 1 if reverse else 1 + asked.has(BOTH, 0.5)
    activations: tuple[CellActivation, ...] = ()
    if asked.has(FUNCTIONS, 0.5):
        parameters = (0.5, 0.25, 1.0, -0.5)
        lasts = steps > _FEW_STEPS and cell is not RecurrentCell.PLAIN
        of_gates = _FRACTIONS if lasts else _SMOOTH
        activations = tuple(
            CellActivation(
                function=choose.one(_SMOOTH if place % cell.functions else of_gates),
                alpha=choose.one(parameters),
                beta=choose.one(parameters),
            )
            for place in range(directions * cell.functions)
        )
    dims = {
        "x": (steps, batch, directions * cell.gates * hidden),
        "w": (directions, cell.gates * hidden, hidden),
        "bias": (directions, cell.gates * hidden),
        "peepholes": (directions, 3, hidden),
        "lengths": (batch,),
        **dict.fromkeys(("h0", "c0"), (directions, batch, hidden)),
    }
    attributes = {
        "cell": cell,
        "activations": activations,
        "clip": choose.one((0.25, 1.0, 3.0)) if asked.has(CLIP, 0.3) else None,
        "coupled": cell is RecurrentCell.LSTM and asked.has(COUPLED, 0.3),
        "reverse": reverse,
    }
    return Made(dims, attributes, {"lengths": choose.one((DType.INT32, DType.INT64))})


def _sizes(asked: Asked) -> tuple[int, int, int]:
    """Steps, sequences and units."""
    choose = asked.choose
    if asked.form is None:
        tiny, long = (choose.size(4), choose.size(3), choose.size(4)), (choose.size(300), 2, choose.size(12))
        of = {
            Sizes.ONE: (1, 1, 1),
            Sizes.TINY: tiny,
            Sizes.VECTOR: (choose.size(8), choose.size(40), 8 * choose.size(6)),
            Sizes.LONG: long,
        }
        return of.get(asked.sizes, (choose.size(20), choose.size(60), choose.size(30)))
    steps, batch, hidden = (int(each) for each in choose.rng.choice(np.arange(3, 20), 3, False))
    of_form = {STEP: (1, batch, hidden), UNIT: (2 + steps % 4, 1, 1), LONG: (24, batch, hidden)}
    return of_form.get(asked.form, (2 + steps % 4, batch, hidden))


def _settle(given: set[str], made: Made) -> set[str]:
    """Those operands that a layer of the cell has."""
    return given if made.attributes["cell"] is RecurrentCell.LSTM else given.difference(_OF_LSTM)


def _arrange(operation: Any, rng: np.random.Generator, values: Exact, specs: Specs) -> None:
    """Weights that let no error and no state grow without end; lengths that are mostly in range."""
    del operation
    for name in ("w", "peepholes"):
        if name in values and values[name].size:
            most = np.abs(values[name]).sum(axis=(1, 2)).max() if name == "w" else np.abs(values[name]).max()
            values[name] = values[name] * (rng.choice((0.125, 0.25)) / max(1.0, most))
    for name in ("x", "bias", "h0", "c0"):
        if name in values and values[name].size:
            values[name] = values[name] * (2.0 / max(2.0, np.abs(values[name]).max()))
    if "lengths" in values:
        (steps, batch, _), lengths = specs["x"].dims, values["lengths"]
        lengths[...] = rng.integers(0, steps + 1, batch)
        wrong = rng.random(batch) < 0.2
        lengths[wrong] = rng.choice([-1, -(2**31), 2**31 - 1, 0, steps, steps + 1], int(wrong.sum()))


_SLOPES: dict[CellFunction, Callable[[float, float], float]] = {
    CellFunction.AFFINE: lambda a, b: abs(a),
    CellFunction.HARD_SIGMOID: lambda a, b: abs(a),
    CellFunction.SCALED_TANH: lambda a, b: abs(a * b),
    CellFunction.ELU: lambda a, b: max(1.0, abs(a)),
    CellFunction.LEAKY_RELU: lambda a, b: max(1.0, abs(a)),
    CellFunction.SIGMOID: lambda a, b: 0.25,
}
"""How steep functions are at most; others are no steeper than 1."""


def _of(function: CellActivation, x: Off) -> Off:
    a, b = function.alpha, function.beta
    steepest = _SLOPES.get(function.function)
    slope = 1.0 if steepest is None else steepest(a, b)
    own = 4 * (1 + abs(a) + abs(b)) * (1 + np.abs(x.value))
    return Off(function(NumPy(), x.value), np.minimum(slope * x.off, 1e9) + own)


def _bounds(operation: RecurrentSteps[str], values: Exact, specs: Specs) -> Exact:
    x, w = values["x"], values["w"]
    (steps, batch, _), (directions, rows, hidden) = x.shape, w.shape
    count, every = operation.cell.functions, operation.functions(directions)
    zeros = np.zeros((directions, batch, hidden))
    inside = np.arange(steps)[:, None] < values.get("lengths", np.full(batch, steps))
    found = {"y": np.zeros((steps, batch, directions * hidden)), "h_n": zeros.copy(), "c_n": zeros.copy()}
    for way in range(directions):
        own: dict[str, Array] = {name: values[name][way] for name in ("bias", "peepholes") if name in values}
        own["w"] = w[way].T
        h, c = (Off.exact(values.get(name, zeros)[way]) for name in ("h0", "c0"))
        functions = every[way * count : (way + 1) * count]
        for time in range(steps)[:: -1 if operation.is_backwards(way) else 1]:
            of_input = Off.exact(x[time, :, way * rows : (way + 1) * rows])
            new, cells = _stepped(operation, functions, of_input, (h, c), own)
            one = inside[time][:, None]
            found["y"][time, :, way * hidden : (way + 1) * hidden] = np.where(one, new.off, 0)
            h, c = new.where(one, h), cells.where(one, c)
        found["h_n"][way], found["c_n"][way] = h.off, c.off
    return {name: doubled(found[name]) for name in specs}


def _stepped(
    operation: RecurrentSteps[str],
    functions: tuple[CellActivation, ...],
    of_input: Off,
    before: tuple[Off, Off],
    own: dict[str, Array],
) -> tuple[Off, Off]:
    (h, c), cell, (f, *others) = before, operation.cell, functions
    gates = cell.gates

    def gate(function: CellActivation, x: Off) -> Off:
        clip = operation.clip
        return _of(function, x if clip is None else Off(np.clip(x.value, -clip, clip), x.off))

    def products(state: Off) -> Off:
        made: Off = state @ own["w"]
        return made + Off.exact(np.broadcast_to(own["bias"], made.value.shape)) if "bias" in own else made

    of_state = products(h)
    parts = [of_input.part(gates, n) + of_state.part(gates, n) for n in range(gates)]
    if cell is RecurrentCell.PLAIN:
        return gate(f, parts[0]), c
    if cell is not RecurrentCell.LSTM:
        r, z = gate(f, parts[0]), gate(f, parts[1])
        inner = r * of_state.part(3, 2) if cell is RecurrentCell.GRU else products(r * h).part(3, 2)
        n = gate(others[0], of_input.part(3, 2) + inner)
        return z.complement() * n + z * h, c
    p = [Off.exact(np.zeros(()) if "peepholes" not in own else own["peepholes"][n]) for n in range(3)]
    i = gate(f, parts[0] + p[0] * c)
    forget = i.complement() if operation.coupled else gate(f, parts[1] + p[1] * c)
    cells = forget * c + i * gate(others[0], parts[2])
    return gate(f, parts[3] + p[2] * cells) * _of(others[1], cells), cells


ROWS = (
    Row(
        RecurrentSteps,
        FLOATS,
        ranks=(3,),
        forms=(*FORMS, BARE),
        make=_make,
        bounds=_bounds,
        arrange=_arrange,
        settle=_settle,
        sampled=False,
    ),
)
