"""Layers of recurrent networks, and their gradients, with errors that are followed from step to step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from cudnn_actor.engines.cpu.exact.evaluation import NumPy
from cudnn_actor.protocol import DType
from cudnn_actor.protocol.operations import (
    Recurrent,
    RecurrentBackwardData,
    RecurrentBackwardWeights,
    RecurrentMode,
    Specs,
)
from cudnn_actor.protocol.operations.recurrent_layer import walk as walked

from .errors import Off, doubled, sum_error
from .rows import BARE, FLOATS, Asked, Exact, Made, Row, Sizes

__all__ = ["EXACTNESS", "ROWS"]

EXACTNESS = """\
Each step adds to the error of the state that it reads. With e for how far that may be off, and v(L) for
max(w(L), L / 2), what gates are computed from is off by (v(I) + 4) · sum of \\|x w_ih\\| + (v(P) + 4) ·
sum of \\|h w_hh\\| + 4 · \\|bias\\| + sum of \\|e w_hh\\|; a sigmoid by a quarter of that and 4 u, a tanh by
that and 4 u. What follows is of a few products and sums, each off by at most 2 u of its terms. Gradients are
followed back in the same way. Those of the weights are sums of T · B products, as of matrices. Of float16
and bfloat16, what is carried from step to step and all gates may be rounded to the operands' type as well, as
cuDNN does: each is off by as much more.
"""

LSTM, GRU, TANH, RELU = "lstm", "gru", "tanh", "relu"
BOTH, LENGTHS, PROJECTED, SEVERAL = "both directions", "lengths", "projection", "several at once"
STEP, UNIT, LONG = "one step", "one unit", "many steps"
FORMS = (LSTM, GRU, TANH, RELU, BOTH, LENGTHS, PROJECTED, SEVERAL, STEP, UNIT, LONG)
_WEIGHTS = ("w_ih", "w_hh", "w_hr")
_OF_LSTM = ("c0", "c_n", "dc0", "dc_n")
_OF_PROJECTION = ("w_hr", "dw_hr")


def _make(asked: Asked) -> Made:
    choose = asked.choose
    steps, batch, features, hidden = _sizes(asked)
    modes = {GRU: RecurrentMode.GRU, TANH: RecurrentMode.TANH, RELU: RecurrentMode.RELU}
    mode = modes.get(asked.form or "", RecurrentMode.LSTM)
    if asked.form in (None, BARE):
        mode = choose.one(RecurrentMode)
    directions = 1 + (asked.form == SEVERAL or asked.has(BOTH, 0.5))
    gates, state = mode.gates, hidden
    if mode is RecurrentMode.LSTM and hidden > 1 and (asked.form == SEVERAL or asked.has(PROJECTED, 0.4)):
        state = int(choose.rng.integers(1, hidden))
    lengths = None
    if asked.form == SEVERAL or asked.has(LENGTHS, 0.5):
        lengths = tuple(
            int(choose.one((0, 1, steps, choose.rng.integers(0, steps + 1)))) for _ in range(batch)
        )
    kept = Recurrent(x="", w_ih="", w_hh="", mode=mode).kept_numbers(projected=state < hidden)
    h, c, y = (directions, batch, state), (directions, batch, hidden), (steps, batch, directions * state)
    inner = (directions, steps, batch, kept, hidden)
    dims = {
        "x": (steps, batch, features),
        "w_ih": (directions, gates * hidden, features),
        "w_hh": (directions, gates * hidden, state),
        "bias": (directions, 2, gates * hidden),
        "w_hr": (directions, state, hidden),
        **dict.fromkeys(("h0", "dh_n"), h),
        **dict.fromkeys(("c0", "dc_n"), c),
        **dict.fromkeys(("y", "dy"), y),
        **dict.fromkeys(("reserve", "slopes"), inner),
    }
    wide = DType.FLOAT64 if asked.dtype is DType.FLOAT64 else DType.FLOAT32
    return Made(dims, {"mode": mode, "lengths": lengths}, dict.fromkeys(("reserve", "slopes"), wide))


def _sizes(asked: Asked) -> tuple[int, int, int, int]:
    """Steps, sequences, features and units."""
    choose = asked.choose
    if asked.form is not None:
        steps, *others = (int(each) for each in choose.rng.choice(np.arange(3, 20), 4, False))
        steps, (batch, features, hidden) = 2 + steps % 4, others
        match asked.form:
            case "one step":
                steps = 1
            case "one unit":
                batch, features, hidden = 1, 1, 1
            case "many steps":
                steps = 24
        return steps, batch, features, hidden
    match asked.sizes:
        case Sizes.ONE:
            return 1, 1, 1, 1
        case Sizes.TINY:
            return choose.each(4, 1, 4)  # type: ignore[return-value]
        case Sizes.VECTOR:
            return choose.size(8), choose.size(40), 8 * choose.size(8), 8 * choose.size(4)
        case Sizes.LONG:
            return choose.size(300), choose.size(4), choose.size(12), choose.size(12)
        case _:
            return choose.size(20), choose.size(80), choose.size(60), choose.size(30)


def _settle(given: set[str], made: Made) -> set[str]:
    """Those operands that a layer of the mode has, and the weights of a projection exactly if it has one."""
    if made.attributes["mode"] is not RecurrentMode.LSTM:
        given = given.difference(_OF_LSTM)
    given = given.difference(_OF_PROJECTION)
    projected = made.dims["w_hr"][1] < made.dims["w_hr"][2]
    return given.union(_OF_PROJECTION) if projected else given


def _arrange(operation: Any, rng: np.random.Generator, values: Exact, specs: Specs) -> None:
    """Weights that let no error, and no gradient, grow without end; and a reserve as a layer leaves it."""
    scale = rng.choice((0.25, 0.5, 1.0))
    for name in _WEIGHTS:
        if name in values:
            values[name] = values[name] * (scale / max(1.0, np.abs(values[name]).sum(axis=(1, 2)).max()))
            values[name] *= 2 if name == "w_ih" else 1
    if isinstance(operation, RecurrentBackwardData):
        stored = {n: array.astype(specs[n].dtype.numpy).astype(float) for n, array in values.items()}
        found = operation.forward(NumPy(), stored)
        values |= {name: found[name] for name in ("y", "reserve") if name in values}


_AT_MOST = 1e-6
"""More than u of any dtype that is computed in."""


def _more(specs: Specs) -> float:
    """In terms of u, what a value may be off by that is rounded to the operands' type at each step."""
    dtype = next(iter(specs.values())).dtype
    return {DType.FLOAT16: 2.0**13, DType.BFLOAT16: 2.0**16}.get(dtype, 0.0)


def _beside(parts: list[Off]) -> Off:
    values, offs = ([getattr(part, name) for part in parts] for name in ("value", "off"))
    return Off(np.concatenate(values, axis=-1), np.concatenate(offs, axis=-1))


def _zeros(*dims: int) -> Off:
    return Off.exact(np.zeros(dims))


def _forward(operation: Any, values: Exact, specs: Any) -> Exact:
    x, w_hh = values["x"], values["w_hh"]
    (steps, batch, _), (directions, rows, state) = x.shape, w_hh.shape
    mode, count = operation.mode, operation.mode.gates
    hidden, within = rows // count, operation.within(NumPy(), steps, batch)
    bias = values.get("bias", np.zeros((directions, 2, rows)))
    h0 = values.get("h0", np.zeros((directions, batch, state)))
    c0 = values.get("c0", np.zeros((directions, batch, hidden)))
    found: dict[str, Any] = {"y": np.zeros((steps, batch, directions * state))}
    kept = operation.kept_numbers(projected="w_hr" in values)
    found["reserve"] = np.zeros((directions, steps, batch, kept, hidden))
    found["h_n"], found["c_n"] = np.zeros(h0.shape), np.zeros(c0.shape)
    more = _more(specs)
    for way in range(directions):
        h, c = Off.exact(h0[way]), Off.exact(c0[way])
        of_input = (Off.exact(x) @ values["w_ih"][way].T + Off.exact(bias[way, 0])).stored(more)
        for time, _ in walked(steps, way):
            a = of_input.at(time)
            b = (h @ w_hh[way].T + Off.exact(bias[way, 1])).stored(more)
            full, cells, noted = _stepped(mode, (a, b), (h, c), more)
            new = (full @ values["w_hr"][way].T).stored(more) if "w_hr" in values else full
            noted += [full] if "w_hr" in values else []
            one = within[time]
            h, c = new.where(one, h), cells.where(one, c)
            found["y"][time, :, way * state : (way + 1) * state] = np.where(one, new.off, 0)
            found["reserve"][way, time] = np.where(one[..., None], np.stack([n.off for n in noted], 1), 0)
        found["h_n"][way], found["c_n"][way] = h.off, c.off
    return {name: doubled(found[name]) for name in specs}


def _stepped(
    mode: RecurrentMode, parts: tuple[Off, Off], before: tuple[Off, Off], more: float
) -> tuple[Off, Off, list[Off]]:
    (a, b), (h, c), count = parts, before, mode.gates
    if mode is RecurrentMode.RELU:
        total = (a + b).stored(more)
        new = Off(np.maximum(total.value, 0), np.where(total.value < -_AT_MOST * total.off, 0, total.off))
        return new, c, [new]
    if mode is RecurrentMode.TANH:
        new = (a + b).tanh().stored(more, 1.0)
        return new, c, [new]
    if mode is RecurrentMode.GRU:
        r, z = ((a.part(count, n) + b.part(count, n)).sigmoid().stored(more, 1.0) for n in range(2))
        q = b.part(count, 2)
        n = (a.part(count, 2) + r * q).tanh().stored(more, 1.0)
        return (z.complement() * n + z * h).stored(more), c, [r, z, n, q]
    i, f, o = ((a.part(count, n) + b.part(count, n)).sigmoid().stored(more, 1.0) for n in (0, 1, 3))
    g = (a.part(count, 2) + b.part(count, 2)).tanh().stored(more, 1.0)
    cells = (f * c + i * g).stored(more)
    return (o * cells.tanh().stored(more, 1.0)).stored(more), cells, [i, f, g, o, cells]


def _backward(operation: RecurrentBackwardData[str], values: Exact, specs: Specs) -> Exact:
    made: Exact = {name: values[name] for name in ("y", "reserve") if name in values}
    off: Exact = dict.fromkeys(("y", "reserve"), 0.0)
    more = _more({"dx": specs["dx"]})
    if "reserve" not in values or more:  # the steps are computed again, and that rounds
        made = operation.forward(NumPy(), values)
        off = _forward(operation, values, dict.fromkeys(made, specs["dx"]))
    y, reserve = (Off(made[name], off[name] + np.zeros(made[name].shape)) for name in ("y", "reserve"))
    w_hh = values["w_hh"]
    (steps, batch, _), (directions, rows, state) = y.value.shape, w_hh.shape
    hidden, within = rows // operation.mode.gates, operation.within(NumPy(), steps, batch)
    h0 = values.get("h0", np.zeros((directions, batch, state)))
    c0 = values.get("c0", np.zeros((directions, batch, hidden)))
    dx = np.zeros((steps, batch, values["w_ih"].shape[2]))
    found: dict[str, Any] = {"dh0": np.zeros(h0.shape), "dc0": np.zeros(c0.shape)}
    found["slopes"] = np.zeros(reserve.value.shape)
    for way in range(directions):
        own = slice(way * state, (way + 1) * state)
        dh = Off.exact(values.get("dh_n", np.zeros(h0.shape))[way])
        dc = Off.exact(values.get("dc_n", np.zeros(c0.shape))[way])
        for time, before in reversed(walked(steps, way)):
            one, kept = within[time], reserve.at(way).at(time).along(1)
            h, c = Off.exact(h0[way]), Off.exact(c0[way])
            if before is not None:
                h = y.at(before).part(directions, way).where(within[before], h)
                if operation.mode is RecurrentMode.LSTM:
                    c = reserve.at(way).at(before).along(1)[4].where(within[before], c)
            total = dh + Off.exact(values["dy"][time, :, own]) if "dy" in values else dh
            full = total @ values["w_hr"][way] if "w_hr" in values else total
            of_input, of_state, direct, cells = _back(operation.mode, kept, full, (h, c), dc)
            of_input, of_state = ([each.stored(more) for each in part] for part in (of_input, of_state))
            noted = [*of_input, *of_state[2:]] if operation.mode is RecurrentMode.GRU else of_input
            for number, part in enumerate(noted):
                found["slopes"][way, time, :, number] = np.where(one, part.off, 0)
            if "w_hr" in values:
                found["slopes"][way, time, :, 4] = np.where(one, kept[5].off, 0)
                found["slopes"][way, time, :, 5, :state] = np.where(one, total.off, 0)
            dh = (_beside(of_state) @ w_hh[way] + direct).stored(more).where(one, dh)
            dc = cells.stored(more).where(one, dc)
            gates = _beside(of_input).where(one, _zeros(batch, rows)) @ values["w_ih"][way]
            dx[time] += gates.off * max(
                1.0, (sum_error(directions * rows) + 2) / (sum_error(rows) + 2)
            ) + np.abs(gates.value)
        found["dh0"][way], found["dc0"][way] = dh.off, dc.off
    found["dx"] = dx
    return {name: doubled(found[name]) for name in specs}


def _back(
    mode: RecurrentMode, kept: list[Off], dh: Off, before: tuple[Off, Off], dc: Off
) -> tuple[list[Off], list[Off], Off, Off]:
    h, c = before
    none = Off.exact(np.zeros(()))
    if mode is RecurrentMode.RELU:
        unsure = (kept[0].off > 0) & (kept[0].value <= _AT_MOST * kept[0].off)  # on which side of 0 it is
        da = dh * Off(kept[0].value > 0, unsure * 2.0**53)
        return [da], [da], none, dc
    if mode is RecurrentMode.TANH:
        da = dh * (kept[0] * kept[0]).complement()
        return [da], [da], none, dc
    if mode is RecurrentMode.GRU:
        r, z, n, q = kept
        dn = dh * z.complement() * (n * n).complement()
        dr = dn * q * (r * r.complement())
        less = h + n * Off.exact(np.full((), -1.0))
        dz = dh * less * (z * z.complement())
        return [dr, dz, dn], [dr, dz, dn * r], dh * z, dc
    i, f, g, o, cells = kept[:5]
    seen = cells.tanh()
    slope = dc + dh * o * (seen * seen).complement()
    di, df = slope * g * (i * i.complement()), slope * c * (f * f.complement())
    dg, do = slope * i * (g * g).complement(), dh * seen * (o * o.complement())
    gates = [di, df, dg, do]
    return gates, gates, none, slope * f


def _of_weights(operation: RecurrentBackwardWeights[str], values: Exact, specs: Specs) -> Exact:
    steps, batch, _ = values["x"].shape
    magnitudes = operation.evaluate(NumPy(), {name: np.abs(array) for name, array in values.items()}, specs)
    return {name: (sum_error(steps * batch) + 3) * sums for name, sums in magnitudes.items()}


def _without_kept(operation: Any) -> tuple[str, ...]:
    """All operands but those that one engine keeps within a plan."""
    return tuple(
        each for each in (*operation.inputs, *operation.outputs) if each not in ("reserve", "slopes")
    )


def _rows() -> Iterator[Row]:
    bounds: dict[Any, Any] = {
        Recurrent: _forward,
        RecurrentBackwardData: _backward,
        RecurrentBackwardWeights: _of_weights,
    }
    for operation, of in bounds.items():
        yield Row(
            operation,
            FLOATS,
            ranks=(3,),
            forms=(*FORMS, BARE),
            make=_make,
            given=tuple((form, _without_kept(operation)) for form in FORMS if form != SEVERAL),
            bounds=of,
            arrange=_arrange,
            settle=_settle,
        )


ROWS = tuple(_rows())
