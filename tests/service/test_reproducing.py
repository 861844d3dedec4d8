"""A plan that fails says how to see it fail again, without the service and its data."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from cudnn_actor import ExecutionFailed
from cudnn_actor.engines.base import EngineFailure
from cudnn_actor.engines.cpu import CpuEngine
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.graphs.reproduction import graph_of
from cudnn_actor.protocol.messages.lowering import lower

from .families import FORMS, Stage
from .rigs import Trio, spawn_on


class Failing(CpuEngine):
    """Fails at one kind of call, in good health."""

    def __init__(self, at: str) -> None:
        super().__init__()
        self._at = at

    def execute(self, plan: Any, buffers: Any, scalars: Any) -> None:
        self._fail_at("execute")

    def build(self, graph: OperationGraph, *, workspace_limit: int | None) -> Any:
        self._fail_at("build")
        return super().build(graph, workspace_limit=workspace_limit)

    def _fail_at(self, at: str) -> None:
        if at == self._at:
            raise EngineFailure("LIBRARY_STATUS", "the library's own words")


@pytest.mark.parametrize("at", ["build", "execute"])
async def test_the_error_carries_the_graph_the_status_and_the_plan(at: str) -> None:
    async with spawn_on(lambda: Failing(at)) as gpu:
        message = (await Trio.on(gpu)).product()
        with pytest.raises(ExecutionFailed) as caught:
            await gpu.ask(message)
        failure = caught.value
        assert failure.status == "LIBRARY_STATUS"
        assert failure.detail == "the library's own words"
        assert failure.plan.startswith("cpu/conv_fwd/")
        assert f"cudnn-actor reproduce {failure.reproduce}" in str(failure)
        assert graph_of(failure.reproduce).digest().startswith(failure.plan.split("/")[2])


@pytest.mark.parametrize("at", ["build", "execute"])
async def test_the_error_of_every_operation_carries_its_graph(at: str) -> None:
    wrong = {}
    async with spawn_on(lambda: Failing(at)) as gpu:
        for name, form in FORMS.items():
            message = (await Stage.on(gpu, form.problem)).message(form.operation)
            outcome = await asyncio.gather(gpu.ask(message), return_exceptions=True)
            if not _carries(outcome[0], lower(message).graph):
                wrong[name] = outcome
    assert not wrong


def _carries(error: object, graph: OperationGraph) -> bool:
    """Whether an error says how to repeat a graph, in its field and in its text."""
    return (
        isinstance(error, ExecutionFailed)
        and f"cudnn-actor reproduce {error.reproduce}" in str(error)
        and graph_of(error.reproduce) == graph
    )
