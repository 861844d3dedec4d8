"""Recurrent layers trained by three messages, whose reserves are what libcudnn keeps.

Reserves of other layers, and of any bytes, give other numbers and nothing worse: `arbitrary_reserves` is a
program, because nothing on a GPU works in a process whose kernel has met an illegal address.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import pytest

from cudnn_actor import CudnnRef, Fault, FaultPlan, UnsupportedGraph, spawn
from cudnn_actor.engines.base import Engine
from cudnn_actor.engines.cuda.operations.recurrent import Call
from cudnn_actor.operations import Recurrent, RecurrentBackwardData, RecurrentBackwardWeights
from cudnn_actor.protocol import DType, GraphBuilder
from cudnn_actor.service.reserves import graph_with_own_reserve

from ..engines.cuda.operations.test_recurrent_passes import Messages
from ..engines.references import relative_error
from ..service.trained_layers import LAYERS, Arrays, Layer

BOUNDS = {DType.FLOAT64: 1e-12, DType.FLOAT32: 2e-5, DType.FLOAT16: 1e-2, DType.BFLOAT16: 6e-2}
"""Of half types, cuDNN rounds the state at each step."""
LSTM = LAYERS["lstm"]
PROJECTED = LAYERS["lstm, projection, both directions, lengths"]


def check(found: Mapping[str, np.ndarray], layer: Layer) -> None:
    for name, each in layer.results().items():
        if layer.dtype.is_half and layer.mode == "relu" and name.startswith("d"):
            continue  # a rounding may put a unit on the other side of 0
        error = relative_error(found[name], each)
        assert error < BOUNDS[layer.dtype], (name, error)


async def of_one_graph(gpu: CudnnRef, layer: Layer) -> Arrays:
    """What a graph of the layer and its gradients gives, of which the reserve stays within the plan."""
    g, values = GraphBuilder(), layer.inputs
    tensors: Any = {name: g.input(name, array.shape, array.dtype) for name, array in values.items()}
    own = {name: tensors[name] for name in Recurrent.inputs if name in tensors}
    ends = ("h_n", "c_n") if "dc_n" in values else ("h_n",)
    made = g.apply(Recurrent(**own, **layer.how), also=ends)
    found = g.grad([*made], [*own.values()], [tensors[f"d{name}"] for name in made._fields])
    results = {name: getattr(made, name) for name in made._fields}
    results |= {f"d{name}": each for name, each in zip(own, found, strict=True)}
    graph = g.build(results)
    buffers = {port.name: await gpu.upload(values[port.name]) for port in graph.inputs}
    outputs = await gpu.apply(graph, buffers)
    return {name: (await gpu.download(getattr(outputs, name))).astype(np.float64) for name in outputs._fields}


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", LAYERS)
async def test_three_messages_give_the_gradients_of_a_graph(name: str, dtype: DType) -> None:
    layer = LAYERS[name]._replace(dtype=dtype)
    async with spawn(device="cuda:0", isolation="thread") as gpu:
        on = await layer.on(gpu)
        found = await on.train()
        check(found, layer)
        for key, each in (await of_one_graph(gpu, layer)).items():
            assert relative_error(found[key], each) < BOUNDS[dtype] / 4, key
        (piece,) = (await gpu.explain(on.weights)).pieces
        assert piece.checked
        assert piece.steps == ("libcudnn",)


@pytest.mark.parametrize("name", LAYERS)
async def test_gradients_leave_what_they_read_as_it_is(name: str) -> None:
    """So the same request gives the same after a crash."""
    async with spawn(device="cuda:0", isolation="thread") as gpu:
        on = await LAYERS[name].on(gpu)
        await on.train()
        reserve, slopes = on.data.reserve, on.data.slopes
        assert reserve is not None
        assert slopes is not None
        before = [await gpu.download(each) for each in (reserve, slopes)]
        assert (before[0] != before[1]).any(), "libcudnn changes its reserve"
        await gpu.ask(on.weights)
        await gpu.ask(msgspec.structs.replace(on.data, slopes=None))
        for one, each in zip(before, (reserve, slopes), strict=True):
            np.testing.assert_array_equal(await gpu.download(each), one)
        check(await on.read(), LAYERS[name])


@pytest.mark.parametrize(("fault", "standby"), [(Fault.KILL, 0), (Fault.KILL, 1), (Fault.STICKY, 1)])
async def test_a_reserve_outlives_the_worker(fault: Fault, standby: int) -> None:
    faults = FaultPlan()
    for kind in (Recurrent, RecurrentBackwardData, RecurrentBackwardWeights):
        faults = faults.at(1, fault, of=kind)
    async with spawn(device="cuda:0", isolation="process", standby=standby, faults=faults) as gpu:
        on = await PROJECTED.on(gpu)
        for _ in range(2):
            check(await on.train(), PROJECTED)
        assert gpu.generation == 4


async def test_too_few_bytes_and_numbers_are_refused_by_name() -> None:
    async with spawn(device="cuda:0", isolation="thread") as gpu:
        on = await LSTM.on(gpu)
        reserve = on.data.reserve
        assert reserve is not None
        few = await gpu.empty((reserve.spec.size - 1,), dtype="uint8")
        with pytest.raises(UnsupportedGraph, match=f"{reserve.spec.size - 1:,} of the {reserve.spec.size:,}"):
            await gpu.ask(on.with_reserve(few).forward)
        with pytest.raises(UnsupportedGraph, match=r"reserve.*reserve_nbytes"):
            await gpu.apply(msgspec.structs.replace(on.forward, reserve=None), also=("reserve",))


async def test_a_graph_hands_on_bytes_to_a_message() -> None:
    """As training does whose loss is a graph of its own."""
    async with spawn(device="cuda:0", isolation="thread") as gpu:
        on = await PROJECTED.on(gpu)
        g, values = GraphBuilder(), PROJECTED.inputs
        tensors: Any = {
            name: g.input(name, values[name].shape, values[name].dtype)
            for name in Recurrent.inputs
            if name in values
        }
        reserve = on.data.reserve
        assert reserve is not None
        like = g.full(reserve.spec.dims, 0, "uint8")
        made = g.apply(Recurrent(**tensors, **PROJECTED.how), also=("reserve",), like={"reserve": like})
        graph = g.build(y=made.y, reserve=made.reserve, twice=made.y * 2.0)
        buffers = {port.name: await gpu.upload(values[port.name]) for port in graph.inputs}
        await gpu.ask(on.forward)
        await gpu.fill(reserve, 0)
        found = await gpu.apply(graph, buffers, reserve=reserve)
        assert found.reserve == reserve
        await gpu.ask(on.data)
        await gpu.ask(on.weights)
        check(await on.read(), PROJECTED)


async def test_a_graph_gives_bytes_and_gradients() -> None:
    """The gradients compute the layer again then."""
    async with spawn(device="cuda:0", isolation="thread") as gpu:
        on = await PROJECTED.on(gpu)
        assert on.data.reserve is not None
        g, values = GraphBuilder(), PROJECTED.inputs
        tensors: Any = {name: g.input(name, array.shape, array.dtype) for name, array in values.items()}
        own = {name: tensors[name] for name in Recurrent.inputs if name in tensors}
        like = {"reserve": g.full(on.data.reserve.spec.dims, 0, "uint8")}
        made = g.apply(Recurrent(**own, **PROJECTED.how), also=("h_n", "c_n", "reserve"), like=like)
        ends = ("y", "h_n", "c_n")
        found = g.grad(
            [getattr(made, each) for each in ends], [*own.values()], [tensors[f"d{each}"] for each in ends]
        )
        gradients = {f"d{name}": each for name, each in zip(own, found, strict=True)}
        graph = g.build({"reserve": made.reserve, **gradients})
        buffers = {port.name: await gpu.upload(values[port.name]) for port in graph.inputs}
        outputs = await gpu.apply(graph, buffers)
        for name, wanted in PROJECTED.results().items():
            if hasattr(outputs, name):
                got = await gpu.download(getattr(outputs, name))
                assert relative_error(got, wanted) < BOUNDS[DType.FLOAT32], name


async def test_plans_with_bytes_are_measured_and_tuned() -> None:
    async with spawn(device="cuda:0", isolation="thread") as gpu:
        on = await LSTM.on(gpu)
        for message in (on.forward, on.data, on.weights):
            (piece,) = (await gpu.explain(message, measure=True)).pieces
            assert piece.time is not None
            (piece,) = (await gpu.plans(message, measure=True)).pieces
            assert piece.checked
        check(await on.train(), LSTM)


@pytest.mark.parametrize("kind", [RecurrentBackwardData, RecurrentBackwardWeights])
def test_gradients_that_change_what_they_read_are_discarded(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    """They would give something else when a request is sent again."""
    question = graph_with_own_reserve(Messages(LSTM).message(Recurrent))
    plan = engine.build(question, workspace_limit=None)
    nbytes = sum(piece.reserve for piece in plan.explain(question).pieces)
    engine.build(Messages(LSTM, nbytes).graph(kind), workspace_limit=None)
    name, read = ("by_data", "reserve") if kind is RecurrentBackwardData else ("by_weights", "slopes")
    run = getattr(Call, name)

    def spoiling(call: Call, *arguments: Any) -> None:
        run(call, *arguments)
        call.device.clear(call.place(read), call.network.reserve)

    monkeypatch.setattr(Call, name, spoiling)
    with pytest.raises(UnsupportedGraph, match="of its results are wrong"):
        engine.build(Messages(LSTM, nbytes + 1).graph(kind), workspace_limit=None)


def test_any_bytes_do_no_harm() -> None:
    found = subprocess.run(
        [sys.executable, "-m", "tests.gpu.arbitrary_reserves"], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0, found.stderr
    assert "unharmed" in found.stdout
