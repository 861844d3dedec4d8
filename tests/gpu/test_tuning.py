"""Plans of several pieces, tuned in the whole: right, kept, and never at the cost of an answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.typing import EventDict

from cudnn_actor import Explanation, Graph, GraphBuilder, Numerics, spawn
from cudnn_actor.engines.base import EngineFailure
from cudnn_actor.engines.cuda.planning import tuning
from cudnn_actor.engines.cuda.planning.cuda_builder import CudaBuilder
from cudnn_actor.engines.cuda.planning.partition import cut
from cudnn_actor.engines.cuda.planning.rivals import Candidate, all_candidates
from cudnn_actor.engines.cuda.planning.splitting import compile_split
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.engines.remote import BuilderHost, RemoteBuilder
from cudnn_actor.models import Model
from cudnn_actor.onnx import OnnxModel
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.operations import Convolution

from ..onnx.small_models import image_model
from .tuning_faults import StrayBuilder


@pytest.fixture
def builder() -> Iterator[CudaBuilder]:
    builder = CudaBuilder(0)
    builder.open()
    yield builder
    builder.close()


def network(layers: int = 3, scale: float = 1.0) -> Graph:
    """Equal layers of a convolution with its bias, and then a softmax."""
    g = GraphBuilder()
    x = g.input("x", (4, 32, 32, 32), "bfloat16", layout="NHWC")
    w = g.input("w", (32, 32, 3, 3), "bfloat16", layout="NHWC")
    b = g.input("b", (1, 32, 1, 1), "bfloat16", layout="NHWC")
    for _ in range(layers):
        x = g.relu(g.conv(x, w, pad=1) * scale + b)
    return g.build(y=g.softmax(x, axis=1))


def tuned(builder: CudaBuilder, graph: Graph) -> tuple[CudaPlan, list[int]]:
    seen: list[int] = []
    plan = builder.tune(
        graph.body, workspace_limit=None, progress=lambda done, of, _: seen.append(done) if of else None
    )
    return plan, seen


def test_equal_pieces_are_tuned_once_and_have_the_same_plan(builder: CudaBuilder) -> None:
    graph = network()
    parts = cut(graph.body)
    assert parts is not None
    different = len({piece.graph.digest() for piece in parts.pieces})
    plan, seen = tuned(builder, graph)
    assert seen == sorted(seen)
    assert max(seen) <= different * tuning._CANDIDATES
    found = plan.explain(graph.body)
    assert found.tuned is not None
    assert found.tuned.took_s > 0
    assert 0 < found.tuned.tuned_us <= found.tuned.heuristic_us
    of_layers = [piece for piece in found.pieces if any("conv" in label for label in piece.labels)]
    assert len({(piece.steps, piece.measured) for piece in of_layers[1:]}) == 1
    assert "tuned in " in str(found)


def test_what_tuning_found_is_still_told_of_a_plan_that_was_kept(builder: CudaBuilder) -> None:
    graph = network()
    plan, _ = tuned(builder, graph)
    data = builder.export(plan)
    assert data is not None
    assert builder.restore(graph.body, data).explain(graph.body) == plan.explain(graph.body)


def test_candidates_that_are_wrong_or_fail_are_left_out(
    builder: CudaBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, other = network(1), network(1, scale=2.0)
    names: list[str] = []

    def wrong() -> CudaPlan:
        plan = compile_split(convolution_in(other.body), builder.context.handle, None)
        names.append(plan.tag.split("/", 3)[3])
        return plan

    def failing() -> CudaPlan:
        raise EngineFailure("CUDNN_STATUS_INTERNAL_ERROR", "as the test says")

    def candidates(piece: OperationGraph, *given: Any, **options: Any) -> list[Candidate]:
        mine = [Candidate("failing", 1, failing)]
        mine += (
            [Candidate("wrong", 1, wrong)] if piece.digest() == convolution_in(graph.body).digest() else []
        )
        return [*mine, *all_candidates(piece, *given, **options)]

    monkeypatch.setattr(tuning, "all_candidates", candidates)
    plan, _ = tuned(builder, graph)
    assert plan.tuning is not None
    (name,) = names
    assert any(reason.startswith(f"{name}: ") for reason in plan.tuning.discarded)


def convolution_in(graph: OperationGraph) -> OperationGraph:
    """The piece with the convolution."""
    parts = cut(graph)
    assert parts is not None
    (found,) = [
        piece.graph
        for piece in parts.pieces
        if any(isinstance(operation, Convolution) for operation in piece.graph.operations)
    ]
    return found


@contextlib.contextmanager
def remote(host: BuilderHost, tries: int) -> Iterator[RemoteBuilder]:
    """A builder one of whose candidates kills the context of its process."""
    name = f"{StrayBuilder.__module__}:{StrayBuilder.__name__}"
    builder = RemoteBuilder(name, (0, host.journal, False), CudaBuilder(0), host, tries=tries)
    with contextlib.closing(builder):
        builder.open()
        yield builder


def test_the_next_process_does_without_a_candidate_that_has_killed_one() -> None:
    graph = network(1).body
    with BuilderHost() as host, remote(host, tries=2) as tunes:
        plan: Any = tunes.tune(graph, workspace_limit=None, progress=lambda *_: None)
        assert plan.checked
        assert plan.tuning is not None


def test_a_tuning_that_has_cost_its_processes_fails_and_no_build_does() -> None:
    graph = network(1).body
    with BuilderHost() as host, remote(host, tries=1) as tunes, remote(host, tries=1) as builds:
        with pytest.raises(EngineFailure, match="BUILDER_DIED"):
            tunes.tune(graph, workspace_limit=None, progress=lambda *_: None)
        assert builds.build(graph, workspace_limit=None).checked


@pytest.mark.parametrize("isolation", ["thread", "process"])
async def test_a_model_answers_rightly_while_it_is_tuned_and_afterwards(
    isolation: Any, tmp_path: Path, logs: list[EventDict]
) -> None:
    image = np.random.default_rng(0).standard_normal((2, 3, 8, 8)).astype(np.float32)
    async with spawn(device="cpu") as gpu, await gpu.load(OnnxModel(image_model())) as model:
        wanted = await model.run(image=image)

    async def check(model: Model) -> None:
        for name, values in (await model.run(image=image)).items():
            np.testing.assert_allclose(values, wanted[name], rtol=1e-4, atol=1e-5)

    for services in range(2):
        before = measurements(logs)
        async with (
            spawn(device="cuda", isolation=isolation, plan_store=tmp_path / "plans") as gpu,
            await gpu.load(OnnxModel(image_model()), tune=True) as model,
        ):
            await check(model)
            warming = asyncio.create_task(model.warm(N=2))
            while not warming.done():
                await check(model)
            await warming
            for _ in range(8):
                await check(model)
            assert (await model.explain(N=2)).tuned is not None
        assert (measurements(logs) > before) == (services == 0)


def measurements(logs: list[EventDict]) -> int:
    """How many candidates have been tried."""
    return sum(entry["event"] == "plan.tuning" for entry in logs)


@pytest.mark.parametrize("isolation", ["thread", "process"])
async def test_plans_are_listed_timed_asked_for_by_name_and_excluded(isolation: Any) -> None:
    def convolution(**options: tuple[str, ...]) -> Graph:
        g = GraphBuilder(Numerics(**options))  # type: ignore[arg-type]
        x = g.input("x", (8, 64, 28, 28), "bfloat16", layout="NHWC")
        return g.build(y=g.conv(x, g.input("w", (64, 64, 3, 3), "bfloat16", layout="NHWC"), pad=1))

    def running(listed: Explanation) -> str:
        (piece,) = listed.pieces
        (name,) = (each.name for each in piece.candidates if each.chosen)
        return name

    async with spawn(device="cuda", isolation=isolation) as gpu:
        first = running(await gpu.plans(convolution()))
        measured = await gpu.plans(convolution(), measure=True)
        timed = [each for each in measured.pieces[0].candidates if each.us is not None and each.engine]
        assert len(timed) > 1
        assert all(each.us and each.workspace is not None for each in timed)
        wanted = next(each.name for each in timed if each.name != first)
        assert running(await gpu.plans(convolution(prefer=(wanted,)))) == wanted
        assert running(await gpu.plans(convolution(exclude=(first,)))) != first
