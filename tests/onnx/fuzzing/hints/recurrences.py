"""Recurrent networks and spectra."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..draw import Draw
from ..versions import Version
from .parts import Hint, Parts, scalar

__all__ = ["RECURRENCES"]

_GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
_STATES = {"RNN": 1, "GRU": 2, "LSTM": 3}
_ACTIVATIONS = (
    "Sigmoid",
    "Tanh",
    "Relu",
    "HardSigmoid",
    "Softsign",
    "Softplus",
    "Elu",
    "LeakyRelu",
    "Affine",
    "ScaledTanh",
    "ThresholdedRelu",
)
"""Those whose alpha and beta have defaults, and others that need them."""


def recurrent(d: Draw, v: Version) -> Parts:
    gates, functions = _GATES[v.operator], _STATES[v.operator]
    steps, batch, inputs, hidden = d.sizes(4, 1, 3)
    direction = d.choice((None, "forward", "reverse", "bidirectional"))
    ways = 2 if direction == "bidirectional" else 1
    t, batch_first = d.dtype(v.schema, "T"), v.has("layout") and d.random() < 0.25
    x = (batch, steps, inputs) if batch_first else (steps, batch, inputs)
    state = (batch, ways, hidden) if batch_first else (ways, batch, hidden)
    dims = [x, (ways, gates * hidden, inputs), (ways, gates * hidden, hidden), (ways, 2 * gates * hidden)]
    given: list[Any] = [d.array(t, each) for each in dims]
    given += [d.whole(0 if d.seldom(0.02) else 1, steps + 1, (batch,), np.int32), d.array(t, state)]
    if v.operator == "LSTM":
        given += [d.array(t, state), d.array(t, (ways, 3 * hidden))]
    attributes: dict[str, Any] = {
        "hidden_size": hidden,
        "direction": direction,
        "layout": 1 if batch_first else None,
        "clip": d.choice((None, None, None, 0.5)),
        "activations": None,
        "activation_alpha": None,
        "activation_beta": None,
        "input_forget": None if not d.seldom(0.1) else 1,
        "output_sequence": 1,
    }
    if d.random() < 0.25:
        attributes["activations"] = d.choices(_ACTIVATIONS[:6], k=functions * ways)
    elif d.seldom(0.1):
        attributes["activations"] = d.choices(_ACTIVATIONS, k=functions * ways)
        attributes["activation_alpha"] = attributes["activation_beta"] = [0.5] * functions * ways
    return Parts(given, attributes)


def dft(d: Draw, v: Version) -> Parts:
    rank = d.choice((1, 1, 2))
    t1 = d.dtype(v.schema, "T1")
    x = d.array(t1, (d.randint(1, 2), *d.sizes(rank, 1, 6), d.choice((1, 2))))
    axis = d.randint(1, rank)
    inputs = [x, scalar(d, d.randint(1, 8), d.dtype(v.schema, "T2"))]
    if v.since >= 20:
        return Parts(
            [*inputs, np.array(axis - d.choice((0, x.ndim)))], needed=frozenset({2} if rank > 1 else ())
        )
    return Parts(inputs, {"axis": axis - d.choice((0, x.ndim))})


def stft(d: Draw, v: Version) -> Parts:
    t1, t2 = d.dtype(v.schema, "T1"), d.dtype(v.schema, "T2")
    frame, length = d.randint(1, 4), d.randint(4, 10)
    signal = d.array(
        t1, (d.randint(1, 2), length) if d.seldom(0.1) else (d.randint(1, 2), length, d.choice((1, 1, 2)))
    )
    inputs = [signal, np.array(d.randint(1, 3), t2), d.array(t1, (frame,)), np.array(frame, t2)]
    return Parts(inputs, needed=frozenset({d.choice((2, 3))}))


RECURRENCES: dict[str, Hint] = {
    "DFT": dft,
    "GRU": recurrent,
    "LSTM": recurrent,
    "RNN": recurrent,
    "STFT": stft,
}
