"""Graphs through the service on a GPU: what they compute, and what a crash does to them."""

from __future__ import annotations

import numpy as np
import pytest

from cudnn_actor import Fault, FaultPlan, OutcomeUnknown, RunGraph, StaleBufferError, spawn
from cudnn_actor.protocol.dtypes import DTypeName

from ..service.example_graphs import (
    GRAPHS,
    assert_close,
    bottleneck,
    defined,
    downloaded,
    updated,
    uploaded,
    values_for,
)

DEVICE = "cuda:0"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", GRAPHS)
async def test_a_graph_computes_what_its_operations_define(name: str, dtype: DTypeName) -> None:
    graph = GRAPHS[name](dtype)
    values = values_for(graph)
    wanted = defined(graph, values)
    async with spawn(device=DEVICE, isolation="thread") as gpu:
        buffers = await uploaded(gpu, graph, values)
        got = await downloaded(gpu, graph, buffers, await gpu.apply(graph, buffers))
    assert_close(got, wanted, dtype)


@pytest.mark.parametrize("standby", [0, 1])
async def test_a_graph_is_run_again_after_a_crash(standby: int) -> None:
    graph = bottleneck("float32")
    values = values_for(graph)
    faults = FaultPlan().at(3, Fault.KILL, of=RunGraph)
    async with spawn(device=DEVICE, isolation="process", standby=standby, faults=faults) as gpu:
        buffers = await uploaded(gpu, graph, values)
        results = [await gpu.download(await gpu.apply(graph, buffers)) for _ in range(5)]
        assert gpu.generation == 2
    for result in results:
        np.testing.assert_array_equal(result, results[0])


async def test_a_graph_with_an_update_is_not_run_twice() -> None:
    graph = updated("float32")
    values = values_for(graph)
    faults = FaultPlan().at(2, Fault.KILL, of=RunGraph)
    async with spawn(device=DEVICE, isolation="process", faults=faults) as gpu:
        buffers = await uploaded(gpu, graph, values)
        await gpu.apply(graph, buffers)
        with pytest.raises(OutcomeUnknown):
            await gpu.apply(graph, buffers)
        with pytest.raises(StaleBufferError):
            await gpu.download(buffers["mean"])
        np.testing.assert_array_equal(await gpu.download(buffers["x"]), values["x"])
