"""Runs of models at crashes: sent again, quarantined, or told of the crash."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from cudnn_actor import (
    ConvFwd,
    CudnnRef,
    ExecutionFailed,
    Fault,
    FaultPlan,
    GraphBuilder,
    InvalidRequest,
    OutcomeUnknown,
    QuarantinedRequest,
    StaleBufferError,
    UnsupportedGraph,
)
from cudnn_actor.errors import NotDeployed
from cudnn_actor.messages import (
    DeployModel,
    Download,
    ModelGraph,
    RunModel,
    UnloadModel,
    WarmModel,
)

from .rigs import Trio, spawn
from .test_deployed_models import W, check, deployed, images, placed, run

pytestmark = pytest.mark.usefixtures("isolation")


def _frees(graph: ModelGraph) -> list[Any]:
    from cudnn_actor.messages import Free

    return [Free(buffer=ref) for ref in graph.buffers]


@pytest.mark.parametrize("when", [1, 2, 3])
async def test_a_crash_loses_no_run(when: int) -> None:
    faults = FaultPlan().at(when, Fault.STICKY, of=RunModel)
    async with deployed(1, 4, faults=faults) as (gpu, model):
        xs = [images(1 + 3 * (number % 2), number) for number in range(40)]
        for x, answer in zip(xs, await asyncio.gather(*(run(gpu, model, x) for x in xs)), strict=True):
            check(answer, x)
        assert gpu.generation == 2


async def test_a_run_that_ends_two_incarnations_is_quarantined() -> None:
    faults = FaultPlan().at(1, Fault.STICKY, of=RunModel).at(2, Fault.STICKY, of=RunModel)
    async with deployed(1, 4, faults=faults) as (gpu, model):
        with pytest.raises(QuarantinedRequest):
            await run(gpu, model, images(4))
        with pytest.raises(QuarantinedRequest):
            await run(gpu, model, images(4))
        check(await run(gpu, model, images(1)), images(1))


async def test_a_run_that_shall_not_run_again_is_told_of_the_crash() -> None:
    faults = FaultPlan().at(2, Fault.STICKY, of=RunModel)
    async with deployed(faults=faults) as (gpu, model):
        check(await run(gpu, model, images(4)), images(4))
        with pytest.raises(OutcomeUnknown, match=r"with again=False; .* none is torn"):
            await gpu.ask(RunModel(model=model, arrays={"image": images(4)}, again=False))
        check(await run(gpu, model, images(4)), images(4))
        assert gpu.generation == 2


async def test_inputs_that_were_at_a_crash_are_quarantined_at_the_next_and_their_graph_is_not() -> None:
    faults = FaultPlan().at(2, Fault.STICKY, of=RunModel)
    async with deployed(faults=faults) as (gpu, model):
        check(await run(gpu, model, images(4)), images(4))
        with pytest.raises(QuarantinedRequest, match="running at two crashes"):
            await gpu.ask(RunModel(model=model, arrays={"image": images(4)}, crashes=1))
        check(await run(gpu, model, images(4)), images(4))
        again = RunModel(model=model, arrays={"image": images(4)}, crashes=1)
        check(await gpu.ask(again), images(4))
        assert gpu.generation == 2


async def test_a_graph_that_has_finished_a_run_is_not_quarantined_with_the_next() -> None:
    faults = FaultPlan()
    for number in (2, 3, 5):
        faults = faults.at(number, Fault.STICKY, of=RunModel)
    async with deployed(faults=faults) as (gpu, model):
        check(await run(gpu, model, images(4)), images(4))
        with pytest.raises(QuarantinedRequest):
            await run(gpu, model, images(4))
        for seed in range(2):  # the second of these is interrupted, too: what has finished between counts
            check(await run(gpu, model, images(4, seed)), images(4, seed))
        assert gpu.generation == 4


async def test_a_graph_that_finishes_no_run_any_more_is_quarantined_before_the_service_ends() -> None:
    faults = FaultPlan()
    for number in (2, 3, 4):
        faults = faults.at(number, Fault.STICKY, of=RunModel)
    async with deployed(1, 4, faults=faults) as (gpu, model):
        check(await run(gpu, model, images(4)), images(4))
        for _ in range(3):
            with pytest.raises(QuarantinedRequest):
                await run(gpu, model, images(4))
        check(await run(gpu, model, images(1)), images(1))
        assert gpu.generation == 4


async def test_an_error_of_one_run_is_its_own() -> None:
    faults = FaultPlan().at(2, Fault.FAIL_EXECUTION, of=RunModel).at(3, Fault.REJECT_BUILD, of=RunModel)
    async with deployed(faults=faults) as (gpu, model):
        check(await run(gpu, model, images(4)), images(4))
        with pytest.raises(ExecutionFailed):
            await run(gpu, model, images(4))
        with pytest.raises(UnsupportedGraph):
            await run(gpu, model, images(4))
        check(await run(gpu, model, images(4)), images(4))


async def test_a_message_that_is_sent_again_finds_that_its_buffer_was_freed() -> None:
    async with deployed() as (gpu, model):
        x, into = await gpu.upload(images(4)), await gpu.empty((4, 2))
        message = RunModel.of(model, {"image": x}, {"logits": into})
        for _ in range(3):
            np.testing.assert_allclose((await gpu.ask(message))["scores"], np.maximum(images(4) @ W, 0), 1e-5)
        np.testing.assert_allclose(await gpu.download(into), images(4) @ W, 1e-5)
        await gpu.free(x)
        with pytest.raises(StaleBufferError):
            await gpu.ask(message)
        other = await gpu.upload(images(4, 3))  # it may get the place of the freed one
        with pytest.raises(StaleBufferError):
            await gpu.ask(message)
        check(await run(gpu, model, other), images(4, 3))


async def test_a_run_that_was_sent_before_a_crash_finds_that_its_input_was_torn() -> None:
    async with spawn(faults=FaultPlan().at(1, Fault.STICKY, of=ConvFwd)) as gpu:
        trio = await Trio.on(gpu)
        g = GraphBuilder()
        graph = g.build(y=g.relu(g.input("x", (1, 1, 1, 1))))
        x, y = [await gpu.empty((1, 1, 1, 1)) for _ in range(2)]
        given = ModelGraph(
            name="",
            graph=graph,
            buffers=(x, y),
            specs={"image": x.spec},
            inputs={"image": "x"},
            outputs={"scores": "y"},
        )
        model = await gpu.ask(DeployModel(graphs=(given,)))
        assert (await run(gpu, model, trio.y))["scores"].item() == 1
        tearing = gpu.submit(trio.sum())
        behind = [gpu.submit(RunModel.of(model, {"image": ref})) for ref in (trio.y, trio.x)]
        with pytest.raises(OutcomeUnknown, match="torn"):
            await tearing
        with pytest.raises(StaleBufferError, match="a crash interrupted a write"):
            await behind[0]
        assert (await behind[1])["scores"].item() == 3


async def sent_twice(gpu: CudnnRef, message: RunModel) -> np.ndarray:
    """What a message's run has written to its buffer for the logits, the second time."""
    for _ in range(2):
        await gpu.ask(message)
    logits: np.ndarray = await gpu.download(message.into["logits"])
    return logits


async def test_a_message_that_is_sent_again_runs_the_graph_that_is_there_then() -> None:
    async with deployed() as (gpu, model):
        x, into = await gpu.upload(images(4)), await gpu.empty((4, 2))
        message = RunModel.of(model, {"image": x}, {"logits": into})
        np.testing.assert_allclose(await sent_twice(gpu, message), images(4) @ W, 1e-5)
        other = await placed(gpu, await gpu.upload(W * 3), 4, name="another")
        await gpu.ask(WarmModel(model=model, graphs=(other,)))
        np.testing.assert_allclose(await sent_twice(gpu, message), images(4) @ (W * 3), 1e-5)
        await gpu.ask(UnloadModel(model=model, graphs=("another",)))
        np.testing.assert_allclose(await sent_twice(gpu, message), images(4) @ W, 1e-5)
        await gpu.ask(UnloadModel(model=model))
        with pytest.raises(NotDeployed):
            await gpu.ask(message)


async def test_a_message_that_was_changed_is_sent_again_as_it_is_then() -> None:
    async with deployed() as (gpu, model):
        refs = [await gpu.upload(images(4, seed)) for seed in range(2)]
        first, second = await gpu.empty((4, 2)), await gpu.empty((4, 2))
        message = RunModel.of(model, {"image": refs[0]}, {"logits": first})
        np.testing.assert_allclose(await sent_twice(gpu, message), images(4, 0) @ W, 1e-5)
        message.buffers["image"] = refs[1]
        np.testing.assert_allclose(await sent_twice(gpu, message), images(4, 1) @ W, 1e-5)
        message.into["logits"] = second
        np.testing.assert_allclose(await sent_twice(gpu, message), images(4, 1) @ W, 1e-5)
        message.arrays["image"] = images(4)
        with pytest.raises(InvalidRequest, match="given twice"):
            await gpu.ask(message)


async def test_a_run_that_fails_says_that_it_may_be_sent_again() -> None:
    faults = FaultPlan().at(1, Fault.FAIL_EXECUTION, of=RunModel).at(1, Fault.FAIL_EXECUTION, of=Download)
    async with deployed(faults=faults) as (gpu, model):
        with pytest.raises(
            ExecutionFailed, match=r"a run of a model.* failed .* no outputs, and it may be"
        ) as caught:
            await run(gpu, model, images(4))
        assert caught.value.of_model
        assert caught.value.retry_safe
        check(await run(gpu, model, images(4)), images(4))
        buffer = await gpu.upload(W)
        with pytest.raises(ExecutionFailed, match="request download failed with INJECTED") as caught:
            await gpu.download(buffer)
        assert not caught.value.of_model
        assert not caught.value.retry_safe
