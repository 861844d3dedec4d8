"""Loops of the graph fuzzer's graphs: a turn gives what the graph gives for its row."""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np
import pytest

from cudnn_actor import BufferRef, CudnnRef, Loop, TensorSpec, spawn
from cudnn_actor.messages import Allocate
from cudnn_actor.protocol.types.tensor import MAX_RANK

from ..engines.devices import why_not
from ..gpu.graphs.drawing import draw
from ..gpu.graphs.programs import Built

_TURNS = 3


@pytest.fixture(params=["cpu", "exact", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def options(request: pytest.FixtureRequest) -> dict[str, Any]:
    device: str = request.param
    if (why := why_not("cuda" if device == "cuda:0" else "cpu")) is not None:
        pytest.skip(why)
    return {"device": "cpu", "exact": device == "exact"} if device != "cuda:0" else {"device": device}


async def test_a_turn_gives_what_the_graph_gives_for_its_row(options: dict[str, Any]) -> None:
    seed, ran = secrets.randbelow(1 << 32), 0
    async with spawn(**options) as gpu:
        for number in range(16):
            built = draw(seed, number).build()
            if _fits(built):
                ran += 1
                await _check(gpu, built, f"seed {seed}, graph {number}", exactly=options["device"] == "cpu")
    assert ran > 6


def _fits(built: Built) -> bool:
    return built.graph.body.pure and all(port.spec.rank < MAX_RANK for port in built.graph.ports)


async def _check(gpu: CudnnRef, built: Built, told: str, *, exactly: bool) -> None:
    """Every second input has other values in each turn."""
    graph = built.graph
    loop = Loop(body=graph, scanned=tuple(port.name for port in graph.inputs[::2]))
    rows = {name: [_scaled(built.values[name], turn) for turn in range(_TURNS)] for name in loop.scanned}
    refs = {port.name: await _placed(gpu, port.spec, built.values[port.name]) for port in graph.inputs}
    stacked = {name: await gpu.upload(np.array(several)) for name, several in rows.items()}
    outputs = _named(graph.outputs, await gpu.loop(loop, {**refs, **stacked}, turns=_TURNS))
    found = {name: await gpu.download(ref) for name, ref in outputs.items()}
    specs = {port.name: port.spec for port in graph.inputs}
    for turn in range(_TURNS):
        given = {name: await _placed(gpu, specs[name], several[turn]) for name, several in rows.items()}
        wanted = _named(graph.outputs, await gpu.apply(graph, {**refs, **given}))
        for name, ref in wanted.items():
            one, other = found[name][turn], await gpu.download(ref)
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            # NaN too are the same; on a GPU, sums may be in another order each time.
            assert one.tobytes() == other.tobytes() or not exactly, f"{told}, {name}, turn {turn}"
        for ref in {*given.values(), *wanted.values()}:
            await gpu.free(ref)
    for ref in {*refs.values(), *stacked.values(), *outputs.values()}:
        await gpu.free(ref)


def _scaled(values: np.ndarray, turn: int) -> np.ndarray:
    """Other values in each turn, if they are floats: whole numbers may be indices."""
    return values if values.dtype.kind in "iub" else (values * 0.5**turn).astype(values.dtype)


async def _placed(gpu: CudnnRef, spec: TensorSpec, values: np.ndarray) -> BufferRef:
    return await gpu.ask(Allocate(spec=spec, data=np.asarray(values)))


def _named(ports: Any, outputs: Any) -> dict[str, BufferRef]:
    several = outputs if isinstance(outputs, tuple) else (outputs,)
    return dict(zip([port.name for port in ports], several, strict=True))
