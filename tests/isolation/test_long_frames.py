"""What we pack into one frame is cut by bytes, so that it fits, however long its parts are."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.typing import EventDict

from cudnn_actor import Explanation, Graph, GraphBuilder, InvalidRequest
from cudnn_actor.broker.warm_batches import cut
from cudnn_actor.engines.base import EngineFailure
from cudnn_actor.engines.remote.builder_messages import Build, Open
from cudnn_actor.engines.remote.connection import Connection
from cudnn_actor.isolation.process.child.decoders import FROM_PARENT
from cudnn_actor.isolation.process.child.outbox import Outbox
from cudnn_actor.isolation.process.child.task import WorkerTask
from cudnn_actor.isolation.process.status import StatusPage
from cudnn_actor.isolation.process.wire import FROM_WORKER, Refused
from cudnn_actor.messages import DeployModel, Explain, ModelGraph, RunModel
from cudnn_actor.processes.channel import Channel, channel_pair
from cudnn_actor.processes.frames import LONGEST
from cudnn_actor.protocol.graphs.explanation import PieceOfPlan
from cudnn_actor.service import GraphLimits
from tests.service.rigs import in_thread, single

from ..log_lines import line
from .crash_rigs import kill, workers

pytestmark = pytest.mark.usefixtures("a_forkserver")


def long_graph(number: int, nbytes: int) -> Graph:
    """A graph whose encoding takes about so many bytes: its input's name is in it twice."""
    g = GraphBuilder(limits=GraphLimits(nbytes=2 * nbytes + 2000))
    x = g.input("x" * (nbytes // 2), (1, 1, 1, 1))
    return g.build(y=x * float(2 + number))


GRAPHS = {size: long_graph(size, 1000 * size) for size in range(1, 41)}


async def run(gpu: Any, graph: Graph) -> float:
    x = await gpu.upload(single(3.0))
    y = await gpu.apply(graph, **{graph.inputs[0].name: x})
    return float((await gpu.download(y)).item())


async def test_a_standby_is_warmed_with_graphs_that_do_not_fit_into_one_frame(logs: list[EventDict]) -> None:
    graphs = [long_graph(number, 14 << 20) for number in range(5)]
    async with workers(standby=1, cache_limit=1 << 30) as (gpu, points):
        await line(logs, "standby.ready")
        for number, graph in enumerate(graphs):
            assert await run(gpu, graph) == 3.0 * (2 + number)
        await in_thread(lambda: points.wait_for_visits("after build", 2 * len(graphs)))
        kill(gpu)
        assert await run(gpu, graphs[0]) == 6.0
        await line(logs, "standby.ready", 2)
        await in_thread(lambda: points.wait_for_visits("after build", 3 * len(graphs)))
        assert (await gpu.statistics()).restarts == 1
        assert not [each for each in logs if each["event"] == "standby.died"]


async def test_graphs_are_warmed_that_do_not_fit_into_one_frame() -> None:
    graphs = [long_graph(number, 14 << 20) for number in range(5)]
    async with workers() as (gpu, _):
        assert await gpu.warm(graphs) == len(graphs)
        assert await gpu.warm(graphs) == 0
        assert await gpu.ping() == 1


async def test_explanations_that_do_not_fit_into_one_frame_are_all_answered() -> None:
    short = long_graph(1, 100)
    text = short.to_json().replace(b'"mul at', b'"mul at ' + b"m" * (12 << 20))
    message = Explain(graph=Graph.from_json(text).body)
    async with workers("LateBuildingEngine") as (gpu, points):
        points.hold("build")
        asked = [gpu.submit(message) for _ in range(7)]
        await in_thread(lambda: points.arrival("build"))
        await gpu.ping()
        points.let_go()
        answers = await asyncio.gather(*asked)
        assert all(isinstance(answer, Explanation) for answer in answers)
        assert await gpu.ping() == 1


def test_an_answer_that_fits_into_no_frame_is_an_error_of_its_request_alone() -> None:
    ours, theirs = channel_pair()
    page, parent = StatusPage.create(4), Channel(ours, FROM_WORKER)
    channel = Channel(theirs, FROM_PARENT)
    outbox = Outbox(channel, page)
    piece = PieceOfPlan(operations=(0,), labels=("m" * LONGEST,), steps=(), plan="p")
    message = Explain(graph=long_graph(1, 100).body)
    outbox.give(WorkerTask(message, 7, 0, None, page), Explanation(plan="p", digest="d", pieces=(piece,)))
    (answers,) = parent.receive()
    (answer,) = answers.answers
    assert (type(answer), answer.number, answer.error.kind) == (Refused, 7, "InvalidRequest")
    assert "ask about a smaller graph" in str(answer.error.to_error())
    for end in (page, parent, channel):
        end.close()


def test_a_graph_that_fits_into_no_frame_is_not_built_elsewhere() -> None:
    ours, theirs = channel_pair()

    class Access:
        def connect(self) -> Any:
            return ours

    connection = Connection(cast(Any, Access()), Open("m:n", (), 9))
    answer = connection.ask(Build(long_graph(1, 2 * LONGEST + 100).body, None), lambda *_: None, 1.0)
    assert isinstance(answer, EngineFailure)
    assert answer.status == "GRAPH_TOO_LONG"
    connection.close()
    theirs.close()


@given(sizes=st.lists(st.integers(1, 40), max_size=12), most=st.integers(1, 100))
def test_a_cut_keeps_the_order_and_no_part_is_longer_than_it_may_be(sizes: list[int], most: int) -> None:
    graphs = [GRAPHS[size] for size in sizes]
    limit = most * 1000
    parts = list(cut(graphs, limit))
    assert [graph for part in parts for graph in part] == graphs
    for part in parts:
        assert part
        assert len(part) == 1 or sum(len(graph.encoded) for graph in part) <= limit
    for part, after in itertools.pairwise(parts):
        assert sum(len(graph.encoded) for graph in (*part, after[0])) > limit


async def test_a_model_whose_graph_does_not_fit_into_a_frame_is_refused_when_it_runs() -> None:
    graph = long_graph(1, LONGEST)
    async with workers(graph_limits=GraphLimits(nbytes=1 << 30)) as (gpu, _):
        x, y = await gpu.upload(single(3.0)), await gpu.upload(single(0.0))
        one = ModelGraph(
            name="",
            graph=graph,
            buffers=(x, y),
            specs={"x": x.spec},
            inputs={"x": graph.inputs[0].name},
            outputs={"y": "y"},
        )
        model = await gpu.ask(DeployModel(graphs=(one,)))
        with pytest.raises(InvalidRequest, match="a worker accepts at most"):
            await gpu.ask(RunModel.of(model, {"x": single(1.0)}))
        assert await gpu.ping() == 1
