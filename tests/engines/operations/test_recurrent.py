"""Recurrent layers beside loops over numbers, their gradients beside differences, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cudnn_actor.engines.cpu import CpuEngine
from cudnn_actor.protocol import (
    BufferRef,
    DType,
    GraphBuilder,
    InvalidRequest,
    Recurrent,
    RecurrentBackwardData,
    RecurrentBackwardWeights,
    RecurrentMode,
    Tensor,
    TensorSpec,
)
from cudnn_actor.protocol.messages.lowering import lower

from ...in_one_test import cases_in_one_test
from ..differences import check_gradients, computed
from ..problems import normal
from ..workbench import Workbench, workbench

STEPS, BATCH, FEATURES, HIDDEN, SMALLER = 5, 3, 4, 6, 2
LENGTHS = (3, 0, 5)
F64, F32 = DType.FLOAT64, DType.FLOAT32
OF_LAYER: Any = Recurrent
OF_DATA: Any = RecurrentBackwardData


def drawn(*dims: int, seed: int = 0) -> np.ndarray:
    return np.asarray(normal(dims, F64, seed)) / 2


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def layer(mode: str, directions: int = 1, state: int = HIDDEN) -> dict[str, np.ndarray]:
    """Operands of a layer, with a projection where the state is smaller than the units."""
    rows = RecurrentMode(mode).gates * HIDDEN
    dims: dict[str, tuple[int, ...]] = {
        "x": (STEPS, BATCH, FEATURES),
        "w_ih": (directions, rows, FEATURES),
        "w_hh": (directions, rows, state),
        "bias": (directions, 2, rows),
        "h0": (directions, BATCH, state),
    }
    if mode == "lstm":
        dims["c0"] = (directions, BATCH, HIDDEN)
    if state < HIDDEN:
        dims["w_hr"] = (directions, state, HIDDEN)
    return {name: drawn(*each, seed=n) for n, (name, each) in enumerate(dims.items())}


def sequence(mode: str, given: dict[str, np.ndarray], way: int, sample: int, length: int) -> Iterator[Any]:
    """(time, h, c) behind each step of one sequence, one number after the other."""
    w, r, b = given["w_ih"][way], given["w_hh"][way], given["bias"][way]
    h = list(given["h0"][way, sample])
    c = list(given["c0"][way, sample]) if "c0" in given else [0.0] * HIDDEN
    for time in range(length)[:: -1 if way else 1]:
        x = given["x"][time, sample]

        def parts(gate: int, unit: int, x: Any = x, h: Any = h) -> tuple[float, float]:
            row = gate * HIDDEN + unit
            of_input = sum(w[row, k] * x[k] for k in range(FEATURES)) + b[0, row]
            return of_input, sum(r[row, k] * h[k] for k in range(len(h))) + b[1, row]

        new = []
        for unit in range(HIDDEN):
            sums = [sum(parts(gate, unit)) for gate in range(RecurrentMode(mode).gates)]
            if mode == "relu":
                new.append(max(sums[0], 0.0))
            elif mode == "tanh":
                new.append(math.tanh(sums[0]))
            elif mode == "gru":
                reset, update = sigmoid(sums[0]), sigmoid(sums[1])
                of_input, of_state = parts(2, unit)
                n = math.tanh(of_input + reset * of_state)
                new.append((1 - update) * n + update * h[unit])
            else:
                c[unit] = sigmoid(sums[1]) * c[unit] + sigmoid(sums[0]) * math.tanh(sums[2])
                new.append(sigmoid(sums[3]) * math.tanh(c[unit]))
        if "w_hr" in given:
            new = [sum(row[k] * new[k] for k in range(HIDDEN)) for row in given["w_hr"][way]]
        h = new
        yield time, h, c


def looped(mode: str, given: dict[str, np.ndarray], lengths: tuple[int, ...] | None) -> dict[str, np.ndarray]:
    directions, _, state = given["h0"].shape
    y = np.zeros((STEPS, BATCH, directions * state))
    h_n, c_n = given["h0"].copy(), given.get("c0", np.zeros((directions, BATCH, HIDDEN))).copy()
    for way in range(directions):
        for sample in range(BATCH):
            for time, h, c in sequence(
                mode, given, way, sample, STEPS if lengths is None else lengths[sample]
            ):
                y[time, sample, way * state : (way + 1) * state] = h
                h_n[way, sample], c_n[way, sample] = h, c
    return {"y": y, "h_n": h_n, "c_n": c_n}


CASES = [
    *(
        (mode, directions, HIDDEN, lengths)
        for mode in RecurrentMode
        for directions, lengths in ((1, None), (2, LENGTHS))
    ),
    ("lstm", 2, SMALLER, LENGTHS),
    ("lstm", 1, SMALLER, None),
]
each_case = pytest.mark.parametrize(("mode", "directions", "state", "lengths"), CASES)


@cases_in_one_test
@pytest.mark.pairwise
@each_case
def test_layers_are_what_loops_over_numbers_give(
    bench: Workbench, mode: str, directions: int, state: int, lengths: tuple[int, ...] | None
) -> None:
    given = layer(mode, directions, state)
    wanted = looped(mode, given, lengths)
    names = ("y", "h_n", "c_n") if mode == "lstm" else ("y", "h_n")
    refs = {name: bench.place(array) for name, array in given.items()}
    into = {name: bench.empty(TensorSpec.packed(wanted[name].shape, F64)) for name in names}
    bench.run(OF_LAYER(**refs, **into, mode=RecurrentMode(mode), lengths=lengths))
    for name, ref in into.items():
        np.testing.assert_allclose(bench.read(ref), wanted[name], rtol=0, atol=1e-12, err_msg=name)


@cases_in_one_test
@each_case
def test_gradients_are_differences(
    mode: str, directions: int, state: int, lengths: tuple[int, ...] | None
) -> None:
    def function(g: GraphBuilder, **operands: Tensor) -> list[Tensor]:
        also = ("h_n", "c_n") if mode == "lstm" else ("h_n",)
        return [*g.apply(OF_LAYER(**operands, mode=RecurrentMode(mode), lengths=lengths), also=also)]

    check_gradients(function, layer(mode, directions, state))


def test_gradients_of_the_last_state_alone_and_of_some_inputs() -> None:
    given = layer("gru")

    def function(g: GraphBuilder, **operands: Tensor) -> Tensor:
        found: Tensor = g.apply(OF_LAYER(**operands, mode=RecurrentMode.GRU), also=("h_n",)).h_n
        return found

    check_gradients(function, given, ("x",))
    check_gradients(function, given, ("w_hh",))


def test_a_reserve_has_no_gradient() -> None:
    g = GraphBuilder()
    given = {name: g.input(name, array.shape, F64) for name, array in layer("tanh").items()}
    made = g.apply(OF_LAYER(**given, mode=RecurrentMode.TANH), also=("reserve",))
    with pytest.raises(InvalidRequest, match="reserve"):
        g.grad(made.reserve, given["x"])


@pytest.mark.parametrize("mode", ["gru", "lstm"])
def test_a_graph_with_bytes_as_an_output_has_the_same_gradients(mode: str) -> None:
    g, layers = GraphBuilder(), layer(mode, 2, SMALLER if mode == "lstm" else HIDDEN)
    given = {name: g.input(name, array.shape, F64) for name, array in layers.items()}
    of: Any = OF_LAYER(**given, mode=RecurrentMode(mode), lengths=LENGTHS)
    like = {"reserve": g.full((20_000,), 0, "uint8")}
    made, other = g.apply(of, also=("reserve",), like=like), g.apply(of)
    slope = g.input("slope", other.dims, F64)
    names = {name: g.grad(y, [*given.values()], slope) for name, y in (("own", made.y), ("other", other))}
    results = {f"{name}{n}": each for name, several in names.items() for n, each in enumerate(several)}
    found = computed(g.build({"reserve": made.reserve, **results}), layers | {"slope": drawn(*other.dims)})
    for n in range(len(given)):
        np.testing.assert_array_equal(found[f"own{n}"], found[f"other{n}"])
    assert found["reserve"].any()


def test_what_lies_behind_the_end_of_a_sequence_changes_nothing(bench: Workbench) -> None:
    given, lengths = layer("lstm", 2), (2, 3, 1)
    outside = np.arange(STEPS)[:, None] >= np.array(lengths)

    def run() -> list[np.ndarray]:
        y = bench.empty(TensorSpec.packed((STEPS, BATCH, 2 * HIDDEN), F64))
        ends = {name: bench.empty(TensorSpec.packed((2, BATCH, HIDDEN), F64)) for name in ("h_n", "c_n")}
        refs = {name: bench.place(array) for name, array in given.items()}
        bench.run(OF_LAYER(**refs, y=y, **ends, mode=RecurrentMode.LSTM, lengths=lengths))
        return [bench.read(ref) for ref in (y, *ends.values())]

    before = run()
    given["x"][outside] = np.nan
    for one, other in zip(before, run(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert not before[0][outside].any()


def test_a_gradient_reads_nothing_behind_the_end_of_a_sequence(bench: Workbench) -> None:
    given, lengths = layer("gru", 2), (2, 0, 1)
    outside = np.arange(STEPS)[:, None] >= np.array(lengths)
    y, dy, reserve = (
        drawn(STEPS, BATCH, 2 * HIDDEN),
        drawn(STEPS, BATCH, 2 * HIDDEN),
        drawn(2, STEPS, BATCH, 4, HIDDEN),
    )
    found = []
    for nothing in (0.0, np.nan):
        for array in (y, dy):
            array[outside] = nothing
        reserve[:, outside] = nothing
        refs = {"y": y, "dy": dy, "reserve": reserve} | {n: given[n] for n in ("x", "w_ih", "w_hh", "h0")}
        placed = {name: bench.place(array) for name, array in refs.items()}
        dims = {"dx": (STEPS, BATCH, FEATURES), "dh0": (2, BATCH, HIDDEN), "slopes": reserve.shape}
        into = {name: bench.empty(TensorSpec.packed(each, F64)) for name, each in dims.items()}
        bench.run(OF_DATA(**placed, **into, mode=RecurrentMode.GRU, lengths=lengths))
        found.append([bench.read(ref) for ref in into.values()])
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)
    assert not found[0][0][outside].any()


@pytest.mark.parametrize("mode", RecurrentMode)
def test_without_a_reserve_the_steps_are_computed_again(bench: Workbench, mode: RecurrentMode) -> None:
    given, dims = layer(mode, 2), {"dx": (STEPS, BATCH, FEATURES), "dh0": (2, BATCH, HIDDEN)}
    found = OF_DATA(x=0, y=0, w_ih=0, w_hh=0, mode=mode, lengths=LENGTHS).forward(np, given)
    given |= {"y": found["y"], "dy": drawn(STEPS, BATCH, 2 * HIDDEN, seed=40)}
    results = []
    for more in ({"reserve": found["reserve"]}, {}):
        refs = {name: bench.place(array) for name, array in {**given, **more}.items()}
        into = {name: bench.empty(TensorSpec.packed(each, F64)) for name, each in dims.items()}
        bench.run(OF_DATA(**refs, **into, mode=mode, lengths=LENGTHS))
        results.append([bench.read(ref) for ref in into.values()])
    for one, other in zip(*results, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-13)


def test_a_sequence_of_ten_thousand_steps_runs() -> None:
    """As ten thousand of one step do."""
    steps, mode = 10_000, RecurrentMode.GRU
    x, w, r = drawn(steps, 1, 2), drawn(1, 9, 2), drawn(1, 9, 3)
    with workbench(CpuEngine()) as bench:
        refs = [bench.place(array.astype(np.float32)) for array in (x, w, r)]
        y = bench.empty(TensorSpec.packed((steps, 1, 3)))
        bench.run(Recurrent(x=refs[0], w_ih=refs[1], w_hh=refs[2], y=y, mode=mode))
        h = np.zeros(3)
        for now in x.astype(np.float32)[:, 0]:
            a, b = w[0] @ now, r[0] @ h
            reset, update = 1 / (1 + np.exp(-(a + b)[:3])), 1 / (1 + np.exp(-(a + b)[3:6]))
            h = (1 - update) * np.tanh(a[6:] + reset * b[6:]) + update * h
        np.testing.assert_allclose(bench.read(y)[-1, 0], h, rtol=0, atol=1e-5)


# The functions of the builder.


def of_layers(mode: str, layers: int, directions: int, state: int = HIDDEN) -> dict[str, np.ndarray]:
    """Weights by PyTorch's names, in its order."""
    rows = RecurrentMode(mode).gates * HIDDEN
    found: dict[str, np.ndarray] = {}
    for place in range(layers):
        for way in range(directions):
            dims = {
                "weight_ih": (rows, FEATURES if place == 0 else directions * state),
                "weight_hh": (rows, state),
                "bias_ih": (rows,),
                "bias_hh": (rows,),
            }
            if state < HIDDEN:
                dims["weight_hr"] = (state, HIDDEN)
            for name, each in dims.items():
                found[f"{name}_l{place}{'_reverse' * way}"] = drawn(*each, seed=len(found) + 7)
    return found


def in_groups(tensors: dict[str, Any], count: int) -> list[list[Any]]:
    values = [*tensors.values()]
    return [values[at : at + len(values) // count] for at in range(0, len(values), len(values) // count)]


@pytest.mark.parametrize(
    ("mode", "state"), [("lstm", HIDDEN), ("lstm", SMALLER), ("gru", HIDDEN), ("relu", HIDDEN)]
)
def test_layers_are_layers_above_each_other(mode: str, state: int) -> None:
    weights = of_layers(mode, 2, 2, state)
    h0 = drawn(4, BATCH, state, seed=90)
    x = drawn(BATCH, STEPS, FEATURES, seed=91)
    states = {"h0": h0, "c0": drawn(4, BATCH, HIDDEN, seed=92)} if mode == "lstm" else {"h0": h0}

    def function(g: GraphBuilder, x: Tensor, **operands: Tensor) -> list[Tensor]:
        of = {name: operands.pop(name) for name in states}
        how: dict[str, Any] = {"bidirectional": True, "batch_first": True, "lengths": LENGTHS}
        if mode == "relu":
            how["activation"] = mode
        named: Any = {"lstm": g.lstm, "gru": g.gru}.get(mode, g.rnn)
        return [*named(x, in_groups(operands, 4), **of, **how)]

    g = GraphBuilder()
    inputs = {name: g.input(name, a.shape, F64) for name, a in {"x": x, **states, **weights}.items()}
    outputs = function(g, **inputs)
    graph = g.build({f"y{n}": y for n, y in enumerate(outputs)})
    found = computed(graph, {"x": x, **states, **weights})
    y, ends = x.transpose(1, 0, 2), []
    for place in range(2):
        own = {n: a for n, a in weights.items() if f"_l{place}" in n}
        groups = in_groups(own, 2)
        given = {
            "x": y,
            "w_ih": np.stack([each[0] for each in groups]),
            "w_hh": np.stack([each[1] for each in groups]),
            "bias": np.stack([np.stack(each[2:4]) for each in groups]),
            **{name: array[2 * place : 2 * place + 2] for name, array in states.items()},
        }
        if state < HIDDEN:
            given["w_hr"] = np.stack([each[4] for each in groups])
        operation = OF_LAYER(**dict.fromkeys(given, 0), mode=RecurrentMode(mode), lengths=LENGTHS)
        made = operation.evaluate(np, given, dict.fromkeys(("y", "h_n", "c_n")))
        y = made["y"]
        ends.append(made)
    np.testing.assert_allclose(found["y0"], y.transpose(1, 0, 2), atol=1e-12)
    np.testing.assert_allclose(found["y1"], np.concatenate([made["h_n"] for made in ends]), atol=1e-12)
    if mode == "lstm":
        np.testing.assert_allclose(found["y2"], np.concatenate([made["c_n"] for made in ends]), atol=1e-12)


def test_dropout_between_layers_is_the_builder_s() -> None:
    weights, state = of_layers("gru", 3, 1), np.array([5, 0])
    x = drawn(STEPS, BATCH, FEATURES)
    found = []
    for whole in (True, False):
        g = GraphBuilder()
        given = {name: g.input(name, array.shape, F64) for name, array in weights.items()}
        one, other, last = in_groups(given, 3)
        of_x, drawn_from = g.input("x", x.shape, F64), g.input("state", (2,), "int64")
        if whole:
            y = g.gru(of_x, [one, other, last], dropout=0.5, state=drawn_from).y
        else:
            y = g.gru(g.dropout(g.gru(of_x, [one]).y, 0.5, drawn_from), [other]).y
            behind = g.advance(drawn_from, STEPS * BATCH * HIDDEN)
            y = g.gru(g.dropout(y, 0.5, behind), [last]).y
        found.append(computed(g.build(y=y), {**weights, "x": x, "state": state})["y"])
    np.testing.assert_array_equal(found[0], found[1])
    assert (found[0] != 0).any()


RECORDED: dict[str, tuple[str, int, int, int, tuple[int, ...] | None, list[float], str]] = {
    "lstm": (
        *("lstm", 2, 2, 4, (4, 1, 3)),
        [10.206311130276, 8.107045414659, 18.007947670874],
        """
        4.621755891127 5.913647764999 8.220405275728 2.950518891303 4.054398224099 5.049741318488
        5.049741318488 3.438187385342 4.273444785385 6.292023877651 6.292023877651 5.787544582118
        3.093194891661 4.440286510909 4.440286510909 6.414023997189 5.45382961588 6.323414633927
        6.323414633927
        """,
    ),
    "lstm with projections": (
        *("lstm", 1, 2, 2, (4, 1, 3)),
        [7.612090693719, 3.104524987022, 12.891885007785],
        """
        2.848656922546 0.893898012136 3.118426139196 2.010941517392 1.208548031971 2.983543381898
        2.983543381898 0.997186831127 2.393559034837 1.347147368716 3.674103818133 3.674103818133
        2.17124650136
        """,
    ),
    "gru": (
        *("gru", 2, 2, 4, (2, 4, 3)),
        [27.004385299224, 15.524921227347],
        """
        4.094182262575 4.132010506131 1.361551640361 1.37721551871 1.865339009954 0.985978685608
        2.364283293132 2.634164039856 3.793268721885 2.295340984996 6.347388949943 1.95631974037
        2.725891084321 1.402588060795 8.436129913018 3.793567380373 3.512302306347 2.218718049124
        """,
    ),
    "tanh": (
        *("tanh", 2, 1, 4, None),
        [28.555435077567, 14.571189561787],
        """
        3.824992243386 1.700975472267 1.124414012243 3.170101073967 1.77584993288 1.77584993288
        8.854544982254 9.997169436738 2.784575291591 2.784575291591
        """,
    ),
    "relu": (
        *("relu", 1, 2, 4, (1, 4, 2)),
        [32.910630434434, 13.672285572034],
        """
        7.350705292302 5.870152371213 4.383855699166 5.250259355361 2.939243277349 2.939243277349
        6.714479576117 10.736410840317 3.779179279636 3.779179279636
        """,
    ),
}
"""A mode, layers, directions, elements of a state, lengths; then sums of the magnitudes of the outputs, and
of the gradients of x, of the states and of the weights in PyTorch's order: PyTorch 2.13, CPU, float64."""


def wave(*dims: int, seed: int) -> np.ndarray:
    return np.asarray(np.sin(np.arange(math.prod(dims)) * 1.7 + seed) * 0.6).reshape(dims)


@pytest.mark.parametrize("name", RECORDED)
def test_layers_and_their_gradients_are_those_that_pytorch_gave(name: str) -> None:
    mode, layers, ways, size, lengths, outputs, slopes = RECORDED[name]
    rows = RecurrentMode(mode).gates * 4
    groups: list[list[str]] = []
    given = {"x": wave(4, 3, 3, seed=50), "h0": wave(layers * ways, 3, size, seed=60)}
    if mode == "lstm":
        given["c0"] = wave(layers * ways, 3, 4, seed=70)
    states = len(given)
    for place in range(layers * ways):
        dims = [(rows, 3 if place < ways else ways * size), (rows, size), (rows,), (rows,)]
        groups.append([])
        for each in [*dims, (size, 4)] if size < 4 else dims:
            groups[-1].append(f"w{len(given)}")
            given[groups[-1][-1]] = wave(*each, seed=len(given) - states)
    g = GraphBuilder()
    inputs = {n: g.input(n, array.shape, F64) for n, array in given.items()}
    first = [inputs[n] for n in ("x", "h0", "c0") if n in given]
    function: Any = {"lstm": g.lstm, "gru": g.gru}.get(mode, g.rnn)
    how: dict[str, Any] = {"activation": mode} if mode in ("tanh", "relu") else {}
    weights = [[inputs[n] for n in group] for group in groups]
    made = function(first[0], weights, *first[1:], bidirectional=ways == 2, lengths=lengths, **how)
    upstream = [g.input(f"slope{n}", each.dims, F64) for n, each in enumerate(made)]
    found = g.grad([*made], [*inputs.values()], upstream)
    graph = g.build({f"y{n}": each for n, each in enumerate([*made, *found])})
    given |= {f"slope{n}": wave(*each.dims, seed=80 + n) for n, each in enumerate(made)}
    sums = [np.abs(each).sum() for each in computed(graph, given).values()]
    np.testing.assert_allclose(sums, [*outputs, *map(float, slopes.split())], rtol=1e-11)


def test_sequences_are_packed_as_in_pytorch_and_padded_again() -> None:
    lengths, x = (4, 3, 3, 1), drawn(5, 4, 2)
    g = GraphBuilder()
    packed = g.pack_padded_sequence(g.input("x", x.shape, F64), lengths)
    padded = g.pad_packed_sequence(packed, lengths)
    found = computed(g.build(packed=packed, padded=padded), {"x": x})
    inside = np.arange(4)[:, None] < np.array(lengths)
    np.testing.assert_array_equal(found["packed"], x[:4][inside])
    np.testing.assert_array_equal(found["padded"], np.where(inside[..., None], x[:4], 0))


@pytest.mark.parametrize(("lengths", "field"), [((1, 3, 3, 4), "lengths"), ((4, 3, 3), "x"), ((), "lengths")])
def test_sequences_that_are_not_in_order_are_not_packed(lengths: Any, field: str) -> None:
    g = GraphBuilder()
    with pytest.raises(InvalidRequest) as caught:
        g.pack_padded_sequence(g.input("x", (5, 4, 2)), lengths)
    assert caught.value.field == field


# What is refused.


def of(*dims: int, dtype: DType = F32) -> TensorSpec:
    return TensorSpec.packed(dims, dtype)


FORWARD = {
    "x": of(5, 3, 4),
    "w_ih": of(1, 24, 4),
    "w_hh": of(1, 24, 6),
    "bias": of(1, 2, 24),
    "h0": of(1, 3, 6),
    "c0": of(1, 3, 6),
    "y": of(5, 3, 6),
    "reserve": of(1, 5, 3, 5, 6),
}
BACKWARD = {
    **{name: FORWARD[name] for name in ("x", "y", "reserve", "w_ih", "w_hh", "h0", "c0")},
    **{"dy": of(5, 3, 6), "dx": of(5, 3, 4), "dc0": of(1, 3, 6), "slopes": of(1, 5, 3, 5, 6)},
}
BYTES = of(1800, dtype=DType.UINT8)
WEIGHTS = {
    **{"x": of(5, 3, 4), "y": of(5, 3, 6), "slopes": of(1, 5, 3, 5, 6)},
    **{"dw_ih": of(1, 24, 4), "dw_hh": of(1, 24, 6), "dbias": of(1, 2, 24)},
}


@cases_in_one_test
@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"x": of(5, 3)}, "x"),
        ({"x": of(0, 3, 4)}, "x"),
        ({"x": of(5, 3, 4, dtype=DType.INT32)}, "x"),
        ({"w_ih": of(1, 23, 4)}, "w_ih"),
        ({"w_ih": of(3, 24, 4)}, "w_ih"),
        ({"w_ih": of(1, 24, 5)}, "w_ih"),
        ({"w_ih": of(1, 24, 4, dtype=F64)}, "w_ih"),
        ({"w_hh": of(1, 24, 5)}, "w_hh"),
        ({"w_hh": of(2, 24, 6)}, "w_hh"),
        ({"w_hr": of(1, 6, 6)}, "w_hh"),
        ({"w_hh": of(1, 24, 2), "w_hr": of(1, 3, 6)}, "w_hr"),
        ({"bias": of(1, 24)}, "bias"),
        ({"bias": of(1, 2, 6)}, "bias"),
        ({"h0": of(1, 3, 5)}, "h0"),
        ({"c0": of(2, 3, 6)}, "c0"),
        ({"y": of(5, 3, 12)}, "y"),
        ({"reserve": of(1, 5, 3, 6, 6)}, "reserve"),
        ({"reserve": of(0, dtype=DType.UINT8)}, "reserve"),
        ({"reserve": TensorSpec.strided((1800,), (2,), DType.UINT8)}, "reserve"),
        ({"reserve": of(1800)}, "reserve"),
        ({"reserve": of(1800, dtype=DType.INT8)}, "reserve"),
        ({"reserve": of(60, 30, dtype=DType.UINT8)}, "reserve"),
        ({"lengths": (5, 5)}, "lengths"),
        ({"lengths": (5, 5, 6)}, "lengths"),
        ({"lengths": (-1, 5, 5)}, "lengths"),
        ({"mode": RecurrentMode.GRU, "w_ih": of(1, 18, 4), "w_hh": of(1, 18, 6)}, "c0"),
        ({"mode": "other"}, "mode"),
    ],
)
def test_a_mistake_names_its_field(changes: dict[str, Any], field: str) -> None:
    refused(Recurrent, FORWARD | changes, field)


@cases_in_one_test
@pytest.mark.parametrize(
    ("kind", "changes", "field"),
    [
        (RecurrentBackwardData, {"y": of(5, 3, 7)}, "y"),
        (RecurrentBackwardData, {"reserve": of(1, 5, 3, 5, 6, dtype=F64)}, "reserve"),
        (RecurrentBackwardData, {"reserve": BYTES}, "slopes"),
        (RecurrentBackwardData, {"slopes": BYTES}, "slopes"),
        (RecurrentBackwardData, {"reserve": of(0, dtype=DType.UINT8), "slopes": BYTES}, "reserve"),
        (RecurrentBackwardData, {"reserve": BYTES, "slopes": of(0, dtype=DType.UINT8)}, "slopes"),
        (RecurrentBackwardData, {"x": of(5, 3, 5)}, "x"),
        (RecurrentBackwardData, {"bias": of(1, 24)}, "bias"),
        (RecurrentBackwardData, {"dy": of(5, 3, 5)}, "dy"),
        (RecurrentBackwardData, {"slopes": of(1, 5, 3, 6, 6)}, "slopes"),
        (RecurrentBackwardData, {"dx": of(5, 3, 5)}, "dx"),
        (RecurrentBackwardData, {"lengths": (1,)}, "lengths"),
        (RecurrentBackwardWeights, {"y": of(5, 3, 7)}, "slopes"),
        (RecurrentBackwardWeights, {"slopes": of(1, 5, 3, 4, 6)}, "slopes"),
        (RecurrentBackwardWeights, {"dw_hh": of(1, 24, 5)}, "dw_hh"),
        (RecurrentBackwardWeights, {"dw_hr": of(1, 6, 6)}, "dw_hr"),
        (RecurrentBackwardWeights, {"dbias": of(1, 24)}, "dbias"),
        (RecurrentBackwardWeights, {"slopes": of(0, dtype=DType.UINT8)}, "slopes"),
        *(
            (RecurrentBackwardWeights, {"slopes": BYTES, **changes}, field)
            for changes, field in (
                ({"y": of(5, 3, 7)}, "y"),
                ({"y": of(5, 4, 6)}, "y"),
                ({"h0": of(1, 3, 5)}, "h0"),
                ({"dw_ih": of(1, 24)}, "dw_ih"),
                ({"dw_ih": of(1, 24, 5)}, "dw_ih"),
                ({"dw_ih": of(3, 24, 4), "dw_hh": of(3, 24, 6)}, "dw_ih"),
                ({"dw_ih": of(1, 25, 4)}, "dw_ih"),
                ({"dw_ih": of(1, 24, 4, dtype=F64)}, "dw_ih"),
                ({"dw_hh": of(1, 24, 7)}, "dw_ih"),
                ({"dw_hh": of(1, 24, 5)}, "y"),
                ({"dw_hr": of(1, 6, 6)}, "dw_hr"),
                ({"dbias": of(1, 24)}, "dbias"),
                ({"lengths": (5, 5)}, "lengths"),
                ({"mode": RecurrentMode.TANH, "dw_hh": of(1, 24, 6)}, "dw_hh"),
            )
        ),
    ],
)
def test_a_mistake_in_a_gradient_names_its_field(kind: Any, changes: dict[str, Any], field: str) -> None:
    refused(kind, (BACKWARD if kind is RecurrentBackwardData else WEIGHTS) | changes, field)


def refused(kind: Any, given: dict[str, Any], field: str) -> None:
    parameters = {"mode": RecurrentMode.LSTM} | {n: v for n, v in given.items() if n in ("mode", "lengths")}
    specs = {name: spec for name, spec in given.items() if name not in parameters}
    refs = {
        name: BufferRef(slot=n, generation=1, spec=spec, device="cpu")
        for n, (name, spec) in enumerate(specs.items())
    }
    with pytest.raises(InvalidRequest) as caught:
        lower(kind(**refs, **parameters))
    assert caught.value.field == field
