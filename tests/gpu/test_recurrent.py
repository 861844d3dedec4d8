"""Recurrent layers by libcudnn, and steps of other cells, beside their definitions in float64."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from cudnn_actor import UnsupportedGraph, spawn
from cudnn_actor.protocol import DType, Graph, GraphBuilder, Recurrent, RecurrentMode
from cudnn_actor.protocol.operations import RecurrentCell, RecurrentSteps

from ..engines.differences import computed
from ..engines.references import relative_error
from .test_epilogues import run

BOUNDS = {DType.FLOAT64: 1e-12, DType.FLOAT32: 2e-5, DType.FLOAT16: 1e-2, DType.BFLOAT16: 6e-2}
"""Of half types, cuDNN rounds the state at each step."""
STEPS, BATCH, FEATURES, HIDDEN = 7, 5, 16, 24


def network(
    mode: str,
    dtype: DType,
    *,
    layers: int,
    both: bool,
    size: int,
    lengths: tuple[int, ...] | None,
    states: bool,
) -> tuple[Graph, dict[str, np.ndarray]]:
    """Layers, their ends, and the gradients of everything; and values of the inputs."""
    g, ways = GraphBuilder(), 1 + both
    values: dict[str, np.ndarray] = {}
    rng = np.random.default_rng(3)

    def given(name: str, *dims: int) -> Any:
        values[name] = (rng.standard_normal(dims) / np.sqrt(dims[-1])).astype(dtype.numpy)
        return g.input(name, dims, dtype)

    rows = RecurrentMode(mode).gates * HIDDEN
    x, first = given("x", STEPS, BATCH, FEATURES), []
    if states:
        first.append(given("h0", layers * ways, BATCH, size or HIDDEN))
        if mode == "lstm":
            first.append(given("c0", layers * ways, BATCH, HIDDEN))
    weights = []
    for n in range(layers * ways):
        dims = [
            (rows, FEATURES if n < ways else ways * (size or HIDDEN)),
            (rows, size or HIDDEN),
            (rows,),
            (rows,),
        ]
        dims += [(size, HIDDEN)] if size else []
        weights.append([given(f"w{n}_{place}", *each) for place, each in enumerate(dims)])
    function: Any = {"lstm": g.lstm, "gru": g.gru}.get(mode, g.rnn)
    how: dict[str, Any] = {"activation": mode} if mode in ("tanh", "relu") else {}
    made = function(x, weights, *first, bidirectional=both, lengths=lengths, **how)
    of = [x, *first, *itertools.chain.from_iterable(weights)]
    upstream = [given(f"slope{n}", *each.dims) for n, each in enumerate(made)]
    outputs = {f"y{n}": each for n, each in enumerate(made)}
    outputs |= {f"d{n}": each for n, each in enumerate(g.grad([*made], of, upstream))}
    return g.build(outputs), values


CASES = [
    (mode, layers, both, size, lengths, states)
    for mode, (layers, both), size, lengths, states in itertools.product(
        RecurrentMode, ((1, False), (2, True)), (0, 8), (None, (7, 0, 3, 1, 5)), (False, True)
    )
    if mode is RecurrentMode.LSTM or not size
]


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("case", CASES, ids=str)
async def test_layers_and_their_gradients(dtype: DType, case: Any) -> None:
    mode, layers, both, size, lengths, states = case
    graph, values = network(mode, dtype, layers=layers, both=both, size=size, lengths=lengths, states=states)
    found, steps = await run(graph, values)
    wanted = computed(graph, values)
    for name, each in wanted.items():
        if name.startswith("d") and mode is RecurrentMode.RELU and dtype.is_half:
            continue  # a rounding may put a unit on the other side of 0
        error = relative_error(found[name], each.astype(np.float64))
        assert error < BOUNDS[dtype], (name, error, steps)


async def test_what_lies_behind_the_end_of_a_sequence_is_0_and_changes_nothing() -> None:
    graph, values = network(
        "lstm", DType.FLOAT32, layers=1, both=True, size=0, lengths=(7, 2, 3, 1, 5), states=True
    )
    outside = np.arange(STEPS)[:, None] >= np.array((7, 2, 3, 1, 5))
    first, _ = await run(graph, values)
    values["x"][outside] = 1e6
    again, _ = await run(graph, values)
    for found in (first, again):
        assert not found["y0"][outside].any()
        assert not found["d0"][outside].any()
    for name in ("y0", "y1", "y2", "d0"):
        np.testing.assert_array_equal(first[name], again[name])


async def test_a_reserve_is_refused_outside_of_a_plan() -> None:
    async with spawn(device="cuda:0", isolation="thread") as gpu:
        x, w, r = [await gpu.upload(np.ones(dims, np.float32)) for dims in ((5, 3, 4), (1, 6, 4), (1, 6, 6))]
        layer = Recurrent(x=x, w_ih=w, w_hh=r, mode=RecurrentMode.TANH)
        assert await gpu.apply(layer)
        with pytest.raises(UnsupportedGraph, match="reserve"):
            await gpu.apply(layer, also=("reserve",))


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("cell", RecurrentCell)
@pytest.mark.parametrize(("steps", "hidden"), [(2000, 24), (60, 700)], ids=["a launch", "a launch a step"])
async def test_steps_of_other_cells(cell: RecurrentCell, dtype: DType, steps: int, hidden: int) -> None:
    """By our kernels. The state is carried in float32."""
    g, rng, ways, rows = GraphBuilder(), np.random.default_rng(5), 2, cell.gates * hidden
    state = (ways, BATCH, hidden)
    dims: dict[str, tuple[int, ...]] = {"x": (steps, BATCH, ways * rows), "w": (ways, rows, hidden)}
    dims |= {"bias": (ways, rows), "h0": state}
    dims |= {"peepholes": (ways, 3, hidden), "c0": state} if cell is RecurrentCell.LSTM else {}
    values = {
        name: (rng.standard_normal(each) / (2 * np.sqrt(hidden) if name == "w" else 1)).astype(dtype.numpy)
        for name, each in dims.items()
    }
    values["lengths"] = np.array([steps, 0, 1, steps - 1, steps // 2], np.int32)
    tensors: Any = {name: g.input(name, array.shape, array.dtype) for name, array in values.items()}
    operation: RecurrentSteps[Any] = RecurrentSteps(**tensors, cell=cell, clip=2.0)
    ends = ("h_n", "c_n") if cell is RecurrentCell.LSTM else ("h_n",)
    made = g.apply(operation, also=ends)
    graph = g.build({name: getattr(made, name) for name in ("y", *ends)})
    found, _ = await run(graph, values)
    for name, each in computed(graph, values).items():
        assert relative_error(found[name], each.astype(np.float64)) < BOUNDS[dtype], name
