"""Plans of graphs: built ahead without buffers, kept in a store, tuned, quarantined and reproduced."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cudnn_actor import (
    ConvFwd,
    ConvSpec,
    Fault,
    FaultPlan,
    Graph,
    GraphBuilder,
    InvalidRequest,
    QuarantinedRequest,
    RunGraph,
    spawn,
)
from cudnn_actor.cli import main
from cudnn_actor.cli.graph_bench import graph_bench, made_up_values
from cudnn_actor.engines.cpu import CpuEngine
from cudnn_actor.messages import Warm
from cudnn_actor.protocol.graphs.reproduction import token
from cudnn_actor.service import Spawning

from ..engines.devices import why_not
from .example_graphs import GRAPHS, assert_close, bottleneck, defined, downloaded, uploaded, values_for
from .rigs import spawn_on
from .workshops import BuildingEngine, KeepingEngine, Workshop

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]


def small(name: str = "y") -> Graph:
    g = GraphBuilder()
    x, mean = g.input("x", (2, 3)), g.input("mean", (2, 3))
    return g.build({name: x * 2.0, "z": mean * -1.0}, updates={"mean": mean * 0.5 + x})


def without_updates() -> Graph:
    g = GraphBuilder()
    x, mean = g.input("x", (2, 3)), g.input("mean", (2, 3))
    return g.build(y=x * 2.0, z=mean * -1.0)


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.parametrize("device", DEVICES)
async def test_a_graph_is_warmed_without_buffers(device: str, isolation: Any) -> None:
    if (why := why_not("cpu" if device == "cpu" else "cuda")) is not None:
        pytest.skip(why)
    graph, values = bottleneck("float32"), values_for(bottleneck("float32"))
    async with spawn(device=device, isolation=isolation) as gpu:
        assert await gpu.warm(graph) == 1
        assert await gpu.warm([graph, graph]) == 0
        buffers = await uploaded(gpu, graph, values)
        got = await downloaded(gpu, graph, buffers, await gpu.apply(graph, buffers))
        assert_close(got, defined(graph, values), "float32")
        plans = (await gpu.statistics()).plans
        assert (plans.misses, plans.size) == (1, 1)


async def test_graphs_are_warmed_beside_messages_and_other_names_share_a_plan() -> None:
    async with spawn(device="cpu", isolation="process") as gpu:
        x, w, y = [await gpu.upload(np.ones((1, 1, 1, 1))) for _ in range(3)]
        message = ConvFwd(x=x, w=w, y=y, conv=ConvSpec.symmetric(2))
        g = GraphBuilder()
        other = g.build(y=g.input("x", (3,)) + 1.0)
        buffers = {port.name: await gpu.upload(np.zeros((2, 3), np.float32)) for port in small().ports}
        run = RunGraph.bind(small(), buffers)
        assert await gpu.warm([other, message, run]) == 3
        assert await gpu.warm([small(), small("another name"), other, message, run]) == 0


@pytest.mark.parametrize("wrong", [{"graphs": (3,)}, {"graphs": [small()]}, {"messages": (small(),)}])
async def test_what_is_no_graph_cannot_be_warmed(wrong: dict[str, Any]) -> None:
    async with spawn(device="cpu") as gpu:
        with pytest.raises(InvalidRequest, match="has no plan that could be built") as caught:
            await gpu.ask(Warm(**wrong))
        assert [caught.value.field] == list(wrong)


async def test_the_next_service_finds_a_warmed_graph_in_the_store(tmp_path: Path) -> None:
    workshop, graph = Workshop(), bottleneck("float32")

    def service() -> Spawning:
        return spawn_on(lambda: KeepingEngine(workshop), plan_store=tmp_path / "plans")

    async with service() as gpu:
        assert await gpu.warm(graph) == 1
    assert len(list((tmp_path / "plans").glob("*.plan"))) == workshop.building.passed == 1
    values = values_for(graph)
    async with service() as gpu:
        assert await gpu.warm(graph) == 1
        buffers = await uploaded(gpu, graph, values)
        got = await downloaded(gpu, graph, buffers, await gpu.apply(graph, buffers))
    assert_close(got, defined(graph, values), "float32")
    assert workshop.building.passed == 1


@pytest.mark.gpu
@pytest.mark.parametrize("autotune", [False, True])
@pytest.mark.parametrize("name", GRAPHS)
async def test_a_graph_is_kept_and_restored_on_a_gpu(name: str, autotune: bool, tmp_path: Path) -> None:
    if (why := why_not("cuda")) is not None:
        pytest.skip(why)
    graph, store = GRAPHS[name]("bfloat16"), tmp_path / "plans"
    values, kept = values_for(graph), []
    for _ in range(2):
        async with spawn(device="cuda:0", plan_store=store, autotune=autotune) as gpu:
            assert await gpu.warm(graph) == 1
            buffers = await uploaded(gpu, graph, values)
            got = await downloaded(gpu, graph, buffers, await gpu.apply(graph, buffers))
            assert_close(got, defined(graph, values), "bfloat16")
        kept.append({path.name: path.read_bytes() for path in store.glob("*.plan")})
    assert kept[0] == kept[1] != {}


async def test_warming_tunes_a_graph() -> None:
    workshop, graph = Workshop(), bottleneck("float32")
    async with spawn_on(lambda: BuildingEngine(workshop), autotune=True) as gpu:
        assert await gpu.warm(graph) == 1
        buffers = await uploaded(gpu, graph, values_for(graph))
        y = await gpu.empty((2, 64, 14, 14), dtype="float32", layout="NHWC")
        assert (await gpu.ask(RunGraph.bind(graph, buffers, y=y))).plan.endswith("/tuned")
        assert await gpu.warm(graph) == 0


async def test_a_quarantined_graph_is_not_warmed_and_its_token_reproduces_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    graph = small()
    values = values_for(graph)
    faults = FaultPlan().at(1, Fault.KILL, of=RunGraph, times=2)
    async with spawn(device="cpu", isolation="process", faults=faults) as gpu:
        pure = without_updates()
        buffers = await uploaded(gpu, pure, values)
        with pytest.raises(QuarantinedRequest) as caught:
            await gpu.apply(pure, buffers)
        assert await gpu.warm(pure) == 0
        assert await gpu.warm([graph, pure]) == 1
        with pytest.raises(QuarantinedRequest) as again:
            await gpu.apply(pure, buffers)
        assert again.value.reproduce == caught.value.reproduce
    assert await asyncio.to_thread(main, ["reproduce", caught.value.reproduce, "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("agrees") == len(pure.outputs) == 2


def test_a_graph_with_two_outputs_of_one_line_and_an_update_is_reproduced(
    capsys: pytest.CaptureFixture[str],
) -> None:
    graph = small().body
    assert len({graph.tensor(uid).name for uid in graph.results}) < len(graph.results)
    values = made_up_values(graph, seed=0)
    assert set(values) == {"x", "mean"}
    engine = CpuEngine(exact=True)
    engine.open()
    with graph_bench(engine, graph) as bench:
        bench.fill(values)
        runs = [bench.run(engine.build(graph, workspace_limit=None)) for _ in range(2)]
    engine.close()
    x, mean = values["x"], values["mean"]
    for run in runs:
        y, z = (run[name] for name in run if name != "mean")
        np.testing.assert_array_equal(y, x * 2)
        np.testing.assert_array_equal(z, -mean)
        mean = mean * np.float32(0.5) + x
        np.testing.assert_allclose(run["mean"], mean, rtol=1e-6)
    assert main(["reproduce", token(graph), "--device", "cpu"]) == 0
    assert capsys.readouterr().out.count("agrees") == 3
