"""Models that the service knows: deployed, warmed, run and unloaded by messages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

from cudnn_actor import (
    BufferRef,
    CudnnRef,
    DeadlineExceeded,
    DType,
    Fault,
    FaultPlan,
    Graph,
    GraphBuilder,
    InvalidRequest,
    OutcomeUnknown,
    StaleBufferError,
)
from cudnn_actor.errors import NotDeployed
from cudnn_actor.messages import (
    DeployModel,
    Draws,
    Free,
    ModelGraph,
    ModelRef,
    RunModel,
    UnloadModel,
    WarmModel,
)
from cudnn_actor.models import Feature

from .rigs import AsynchronousEngine, Device, Gate, in_thread, spawn, spawn_gated, spawn_on

pytestmark = pytest.mark.usefixtures("isolation")
W = np.arange(6, dtype=np.float32).reshape(3, 2) - 2


def dense(count: int) -> Graph:
    g = GraphBuilder()
    x = g.input("x", (count, 3))
    w = g.input("w", (3, 2))
    y = g.matmul(x, w)
    return g.build(y=g.relu(y), z=y)


def images(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, 3)).astype(np.float32)


def check(results: dict[str, np.ndarray], x: np.ndarray) -> None:
    np.testing.assert_allclose(results["scores"], np.maximum(x @ W, 0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(results["logits"], x @ W, rtol=1e-5, atol=1e-6)


async def placed(gpu: CudnnRef, w: BufferRef, count: int, **changes: Any) -> ModelGraph:
    graph = dense(count)
    x, y, z = [await gpu.empty(dims) for dims in ((count, 3), (count, 2), (count, 2))]
    fields: dict[str, Any] = {
        "name": f"of {count}",
        "graph": graph,
        "buffers": (x, w, y, z),
        "specs": {"image": x.spec},
        "inputs": {"image": "x"},
        "outputs": {"scores": "y", "logits": "z"},
    }
    return ModelGraph(**(fields | changes))


@asynccontextmanager
async def deployed(*counts: int, **options: Any) -> AsyncIterator[tuple[CudnnRef, ModelRef]]:
    async with spawn(**options) as gpu:
        w = await gpu.upload(W)
        graphs = tuple([await placed(gpu, w, count) for count in counts or (4,)])
        model = await gpu.ask(DeployModel(graphs=graphs))
        yield gpu, model


async def run(gpu: CudnnRef, model: ModelRef, x: np.ndarray | BufferRef, **into: BufferRef) -> Any:
    return await gpu.ask(RunModel.of(model, {"image": x}, into))


async def test_a_run_is_one_message_and_allocates_nothing() -> None:
    async with deployed() as (gpu, model):
        check(await run(gpu, model, images(4)), images(4))
        before = await gpu.statistics()
        for seed in range(5):
            check(await run(gpu, model, images(4, seed)), images(4, seed))
        after = await gpu.statistics()
        assert after.finished - before.finished == 5 + 1  # the runs, and the first of the two statistics
        assert (after.live_buffers, after.arena_bytes) == (before.live_buffers, before.arena_bytes)


async def test_the_graph_is_chosen_by_the_inputs() -> None:
    async with deployed(1, 4, 6) as (gpu, model):
        for count in (6, 1, 4, 1):
            check(await run(gpu, model, images(count)), images(count))
        with pytest.raises(NotDeployed, match=r"no graph is deployed for image: float32 \(2, 3\)"):
            await run(gpu, model, images(2))
        with pytest.raises(NotDeployed, match="float64"):
            await run(gpu, model, images(4).astype(np.float64))


async def test_inputs_may_lie_in_buffers_and_outputs_go_to_others() -> None:
    async with deployed() as (gpu, model):
        x, into = await gpu.upload(images(4)), await gpu.empty((4, 2))
        results = await run(gpu, model, x, scores=into)
        assert list(results) == ["logits"]
        np.testing.assert_allclose(results["logits"], images(4) @ W, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(await gpu.download(into), np.maximum(images(4) @ W, 0), rtol=1e-5)
        np.testing.assert_array_equal(await gpu.download(x), images(4))


async def test_runs_in_buffers_alternate_between_those_that_each_names() -> None:
    async with deployed() as (gpu, model):
        inputs = [await gpu.upload(images(4, seed)) for seed in range(2)]
        outputs = [[await gpu.empty((4, 2)) for _ in range(2)] for _ in range(2)]
        for number, seed, pair, swapped in [
            (0, 0, 0, 0),
            (1, 0, 0, 0),
            (2, 1, 0, 0),
            (3, 1, 1, 0),
            (4, 1, 1, 1),
        ]:
            for ref in (*outputs[0], *outputs[1]):
                await gpu.fill(ref, float(number))
            scores, logits = reversed(outputs[pair]) if swapped else outputs[pair]
            assert await run(gpu, model, inputs[seed], scores=scores, logits=logits) == {}
            check(
                {"scores": await gpu.download(scores), "logits": await gpu.download(logits)}, images(4, seed)
            )
            for other in outputs[1 - pair]:
                assert (await gpu.download(other) == number).all()


async def test_a_message_that_was_changed_is_looked_up_again() -> None:
    async with deployed() as (gpu, model):
        inputs = [await gpu.upload(images(4, seed)) for seed in range(2)]
        into = {name: await gpu.empty((4, 2)) for name in ("scores", "logits")}
        message = RunModel.of(model, {"image": inputs[0]}, into)
        for seed in (0, 0, 1, 1, 0):
            message.buffers["image"] = inputs[seed]
            assert await gpu.ask(message) == {}
            check({name: await gpu.download(ref) for name, ref in into.items()}, images(4, seed))
        instead = await gpu.empty((4, 2))
        message.into["scores"] = instead
        assert await gpu.ask(message) == {}
        np.testing.assert_allclose(await gpu.download(instead), np.maximum(images(4) @ W, 0), rtol=1e-5)
        message.arrays["image"] = images(4)
        with pytest.raises(InvalidRequest):
            await gpu.ask(message)


async def test_a_run_in_a_buffer_that_took_the_place_of_another_one_uses_that() -> None:
    async with deployed() as (gpu, model):
        into = [await gpu.empty((4, 2)) for _ in range(2)]
        for seed in range(3):
            x = await gpu.upload(images(4, seed))
            await run(gpu, model, x, scores=into[0], logits=into[1])
            check(
                {"scores": await gpu.download(into[0]), "logits": await gpu.download(into[1])},
                images(4, seed),
            )
            await gpu.free(x)
            with pytest.raises(StaleBufferError):
                await run(gpu, model, x, scores=into[0], logits=into[1])


async def test_a_graph_is_added_and_its_plan_built() -> None:
    async with deployed(4) as (gpu, model):
        w = await gpu.upload(W)
        assert await gpu.ask(WarmModel(model=model, graphs=(await placed(gpu, w, 9),))) == 1
        check(await run(gpu, model, images(9)), images(9))
        assert (await gpu.statistics()).plans.misses == 1


async def test_a_graph_of_the_same_name_replaces_the_earlier_one() -> None:
    async with deployed(4) as (gpu, model):
        other = await gpu.upload(-W)
        await gpu.ask(WarmModel(model=model, graphs=(await placed(gpu, other, 4),)))
        results = await run(gpu, model, images(4))
        np.testing.assert_allclose(results["logits"], -images(4) @ W, rtol=1e-5, atol=1e-6)


async def test_the_model_keeps_weights_that_were_freed() -> None:
    async with spawn() as gpu:
        w = await gpu.upload(W)
        graph = await placed(gpu, w, 4)
        model = await gpu.ask(DeployModel(graphs=(graph,)))
        for ref in graph.buffers:
            await gpu.free(ref)
        await gpu.upload(np.full((3, 2), np.nan, np.float32))  # it would get the bytes
        check(await run(gpu, model, images(4)), images(4))
        await gpu.ask(UnloadModel(model=model))
        assert (await gpu.statistics()).live_buffers == 1


async def test_an_unloaded_model_runs_no_more() -> None:
    async with deployed(1, 4) as (gpu, model):
        await gpu.ask(UnloadModel(model=model, graphs=("of 1", "unknown")))
        with pytest.raises(NotDeployed, match="no graph is deployed"):
            await run(gpu, model, images(1))
        check(await run(gpu, model, images(4)), images(4))
        for _ in range(2):
            await gpu.ask(UnloadModel(model=model))
        for message in (RunModel.of(model, {"image": images(4)}), WarmModel(model=model, graphs=())):
            with pytest.raises(NotDeployed, match=r"this service has no such model"):
                await gpu.ask(message)
        other = msgspec.structs.replace(model, service=model.service + 1)
        with pytest.raises(NotDeployed):
            await run(gpu, other, images(4))


async def test_runs_that_were_sent_before_a_model_is_unloaded_finish() -> None:
    gate = Gate()
    async with spawn_gated(gate) as gpu:
        w = await gpu.upload(W)
        graph = await placed(gpu, w, 4)
        model = await gpu.ask(DeployModel(graphs=(graph,)))
        gate.shut()
        runs = [gpu.submit(RunModel.of(model, {"image": images(4, seed)})) for seed in range(8)]
        unloading = gpu.submit(UnloadModel(model=model))
        frees = [gpu.submit(message) for message in [Free(buffer=ref) for ref in graph.buffers]]
        gate.open()
        for seed, answer in enumerate(await asyncio.gather(*runs)):
            check(answer, images(4, seed))
        await asyncio.gather(unloading, *frees)
        assert (await gpu.statistics()).live_buffers == 0


async def test_a_run_that_does_not_run_again_tears_the_buffers_it_writes_its_results_to() -> None:
    faults = FaultPlan().at(1, Fault.STICKY, of=RunModel)
    async with deployed(faults=faults) as (gpu, model):
        kept = await gpu.upload(np.zeros((4, 2), "float32"))
        with pytest.raises(OutcomeUnknown, match="its output is torn"):
            await gpu.ask(
                RunModel(model=model, arrays={"image": images(4)}, into={"scores": kept}, again=False)
            )
        with pytest.raises(StaleBufferError, match="torn"):
            await gpu.download(kept)


async def test_a_run_that_has_not_started_can_be_withdrawn() -> None:
    gate = Gate()
    async with spawn_gated(gate) as gpu:
        w = await gpu.upload(W)
        model = await gpu.ask(DeployModel(graphs=(await placed(gpu, w, 4),)))
        gate.shut()
        first = gpu.submit(RunModel.of(model, {"image": images(4)}))
        with pytest.raises(DeadlineExceeded):
            await gpu.ask(RunModel.of(model, {"image": images(4)}), timeout=0.05)
        gate.open()
        check(await first, images(4))
        check(await run(gpu, model, images(4)), images(4))


async def test_a_pykka_caller_sends_the_same_messages() -> None:
    async with deployed() as (gpu, model):
        message, ref = RunModel.of(model, {"image": images(4)}), gpu.actor_ref
        results: Any = await asyncio.to_thread(lambda: ref.ask(message))
        check(results, images(4))


async def test_random_numbers_go_on_from_run_to_run() -> None:
    g = GraphBuilder()
    state = g.input("state", (2,), "int64")
    graph = g.build(y=g.uniform((8,), state=state))
    faults = FaultPlan().at(2, Fault.STICKY, of=RunModel)

    async def drawn(**options: Any) -> list[np.ndarray]:
        async with spawn(**options) as gpu:
            buffers = (await gpu.empty((2,), dtype="int64"), await gpu.empty((8,)))
            one = ModelGraph(
                name="noise",
                graph=graph,
                buffers=buffers,
                specs={},
                inputs={},
                outputs={"y": "y"},
                draws=Draws(port="state", seed=7, count=8),
            )
            model = await gpu.ask(DeployModel(graphs=(one,)))
            return [(await gpu.ask(RunModel(model=model)))["y"] for _ in range(4)]

    quiet, crashed = await drawn(), await drawn(faults=faults)
    np.testing.assert_array_equal(quiet, crashed)
    assert len({each.tobytes() for each in quiet}) == 4


async def test_values_that_decide_choose_the_graph() -> None:
    async with spawn() as gpu:
        w, other = await gpu.upload(W), await gpu.upload(2 * W)
        one = await placed(gpu, w, 4, name="one", values={"image": np.ones((4, 3), np.float32)})
        two = await placed(gpu, other, 4, name="two", values={"image": np.zeros((4, 3), np.float32)})
        constant = np.arange(3)
        one = msgspec.structs.replace(one, constants={"shape": constant})
        model = await gpu.ask(DeployModel(graphs=(one, two)))
        ones = np.ones((4, 3), np.float32)
        results = await run(gpu, model, ones)
        check(results, ones)
        np.testing.assert_array_equal(results["shape"], constant)
        assert "shape" not in await run(gpu, model, 0 * ones)
        with pytest.raises(NotDeployed):
            await run(gpu, model, 3 * ones)
        with pytest.raises(NotDeployed):
            await run(gpu, model, await gpu.upload(ones))


async def test_a_value_that_decides_may_be_no_number() -> None:
    async with spawn() as gpu:
        nan = np.full((4, 3), np.nan, np.float32)
        one = await placed(gpu, await gpu.upload(W), 4, values={"image": nan})
        model = await gpu.ask(DeployModel(graphs=(one,)))
        assert np.isnan((await run(gpu, model, nan))["logits"]).all()


async def test_what_does_not_fit_is_refused_and_nothing_is_changed() -> None:
    async with deployed() as (gpu, model):
        w, x = await gpu.upload(W), await gpu.upload(images(4))
        good = await placed(gpu, w, 4)
        wrong: dict[str, dict[str, Any]] = {
            "one for each of the 4 ports": {"buffers": good.buffers[:3]},
            "is not what the graph was built for": {"buffers": (good.buffers[0], x, *good.buffers[2:])},
            "is no port of the graph": {"inputs": {"image": "nowhere"}},
            "port of the graph on that side": {"outputs": {"scores": "x"}},
            "is not what its port has": {"specs": {"image": w.spec}},
            "is no name in specs": {"values": {"other": W}},
            "is of type": {"constants": {"shape": 3}},
            "for another port": {"buffers": (good.buffers[0], w, good.buffers[2], good.buffers[2])},
        }
        for problem, changes in wrong.items():
            with pytest.raises(InvalidRequest, match=problem):
                await gpu.ask(DeployModel(graphs=(msgspec.structs.replace(good, **changes),)))
        await gpu.free(good.buffers[0])
        with pytest.raises(StaleBufferError):
            await gpu.ask(WarmModel(model=model, graphs=(good,)))
        bad_runs: dict[str, RunModel] = {
            "is of type": RunModel(model=model, arrays={"image": 3}),  # type: ignore[dict-item]
            "into=": RunModel(model=model, arrays={"image": images(4)}, into=0),  # type: ignore[arg-type]
            "model=": RunModel(model=model.number, arrays={"image": images(4)}),  # type: ignore[arg-type]
            "is given twice": RunModel(model=model, arrays={"image": images(4)}, buffers={"image": x}),
            "is no output": RunModel.of(model, {"image": images(4)}, {"other": x}),
            "not of the output's dims": RunModel.of(model, {"image": images(4)}, {"scores": w}),
            "used by this run already": RunModel.of(model, {"image": x}, {"scores": x}),
            "crashes=-1": RunModel(model=model, arrays={"image": images(4)}, crashes=-1),
            "again=1": RunModel(model=model, arrays={"image": images(4)}, again=1),  # type: ignore[arg-type]
            "crashes=True": RunModel(model=model, arrays={"image": images(4)}, crashes=True),
            "has a dtype": RunModel(model=model, arrays={"image": images(4).astype(complex)}),
        }
        for _ in range(2):  # also where messages are compared with the run before
            for problem, message in bad_runs.items():
                with pytest.raises(InvalidRequest, match=problem):
                    await gpu.ask(message)
            check(await run(gpu, model, images(4)), images(4))


async def test_a_graph_that_changes_its_inputs_is_refused() -> None:
    g = GraphBuilder()
    x = g.input("x", (3,))
    graph = g.build(y=x + 1, updates={"x": x * 2})
    async with spawn() as gpu:
        buffers = (await gpu.empty((3,)), await gpu.empty((3,)))
        given = ModelGraph(
            name="", graph=graph, buffers=buffers, specs={"x": buffers[0].spec}, inputs={"x": "x"}, outputs={}
        )
        with pytest.raises(InvalidRequest, match="changes its own inputs"):
            await gpu.ask(DeployModel(graphs=(given,)))


async def test_the_latest_graph_for_the_same_inputs_runs_whatever_ran_before() -> None:
    async with deployed() as (gpu, model):
        check(await run(gpu, model, images(4)), images(4))
        other = await placed(gpu, await gpu.upload(W * 3), 4, name="another")
        await gpu.ask(WarmModel(model=model, graphs=(other,)))
        results = await run(gpu, model, images(4))
        np.testing.assert_allclose(results["logits"], images(4) @ (W * 3), rtol=1e-5, atol=1e-6)
        await gpu.ask(UnloadModel(model=model, graphs=("another",)))
        check(await run(gpu, model, images(4)), images(4))


async def test_runs_like_the_one_before_end_with_their_model() -> None:
    async with deployed() as (gpu, model):
        for seed in range(2):
            check(await run(gpu, model, images(4, seed)), images(4, seed))
        stranger = ModelRef(number=model.number, service=model.service + 1)
        await gpu.ask(UnloadModel(model=model))
        for ref in (model, stranger):
            with pytest.raises(NotDeployed):
                await run(gpu, ref, images(4))


async def test_one_result_may_have_two_names() -> None:
    async with spawn() as gpu:
        w = await gpu.upload(W)
        graph = await placed(gpu, w, 4, outputs={"first": "y", "second": "y", "logits": "z"})
        model = await gpu.ask(DeployModel(graphs=(graph,)))
        for seed in range(3):
            x = images(4, seed)
            wanted = np.maximum(x @ W, 0)
            first = await gpu.empty((4, 2))
            results = await run(gpu, model, x, first=first)
            np.testing.assert_allclose(results["second"], wanted, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(await gpu.download(first), wanted, rtol=1e-5, atol=1e-6)
            both = [await gpu.upload(np.full((4, 2), np.nan, np.float32)) for _ in range(2)]
            assert set(await run(gpu, model, x, first=both[0], second=both[1])) == {"logits"}
            for each in both:
                np.testing.assert_allclose(await gpu.download(each), wanted, rtol=1e-5, atol=1e-6)


async def test_a_run_keeps_the_inputs_that_it_was_sent_with() -> None:
    gate = Gate()
    async with spawn_gated(gate) as gpu:
        model = await gpu.ask(DeployModel(graphs=(await placed(gpu, await gpu.upload(W), 4),)))
        given, answers = {}, []
        with gate.closed():
            for seed in range(400):  # more than a worker has at once, so the last ones wait
                given["image"] = images(4, seed)
                answers.append(gpu.submit(RunModel(model=model, arrays=given)))
            given.clear()
        for seed, answer in enumerate(await asyncio.gather(*answers)):
            check(answer, images(4, seed))


async def test_an_array_that_is_reshaped_before_its_run_begins_is_refused_alone() -> None:
    gate = Gate()
    async with spawn_gated(gate) as gpu:
        model = await gpu.ask(DeployModel(graphs=(await placed(gpu, await gpu.upload(W), 4),)))
        feature = Feature(name="image", dtype=DType.FLOAT32, dims=("N", 3))
        lent = await gpu.staging(feature, N=4)
        with gate.closed():
            others = [gpu.submit(RunModel.of(model, {"image": images(4, seed)})) for seed in range(400)]
            messages = [RunModel.of(model, {"image": x}) for x in (images(4), lent, images(4), images(4))]
            wrong = [gpu.submit(message) for message in messages]
            messages[0].arrays["image"].shape = (3, 4)
            messages[1].arrays["image"] = lent[:1]
            messages[2].arrays["image"] = "no array"  # type: ignore[assignment]
            del messages[3].arrays["image"]
        for changed in wrong:
            with pytest.raises(InvalidRequest, match="was changed after it was sent"):
                await changed
        for seed, answer in enumerate(await asyncio.gather(*others)):
            check(answer, images(4, seed))
        check(await run(gpu, model, images(4)), images(4))
        assert gpu.generation == 1


async def test_graphs_of_one_message_have_names_of_their_own() -> None:
    async with deployed() as (gpu, model):
        w = await gpu.upload(W)
        one, two = [await placed(gpu, w, 2, name="same") for _ in range(2)]
        for graphs in ((one, two), (one, one)):
            for message in (DeployModel(graphs=graphs), WarmModel(model=model, graphs=graphs)):
                with pytest.raises(InvalidRequest, match="have the same name"):
                    await gpu.ask(message)
        check(await run(gpu, model, images(4)), images(4))


async def test_draws_that_do_not_fit_are_refused() -> None:
    g = GraphBuilder()
    graph = g.build(y=g.input("state", (2,), dtype="int64") + g.input("x", (2,), dtype="int64"))
    async with spawn() as gpu:
        buffers = tuple([await gpu.empty((2,), dtype="int64") for _ in range(3)])
        given = ModelGraph(
            name="",
            graph=graph,
            buffers=buffers,
            specs={"x": buffers[1].spec},
            inputs={"x": "x"},
            outputs={"y": "y"},
            draws=Draws(port="state", seed=-1 << 63, count=1),
        )
        model = await gpu.ask(DeployModel(graphs=(given,)))
        x = np.array([1, 2])
        results = await gpu.ask(RunModel(model=model, arrays={"x": x}))
        np.testing.assert_array_equal(results["y"], [(-1 << 63) + 1, 2])
        for problem, draws in {
            "must be a whole number": Draws(port="state", seed=1 << 63, count=1),
            "is an input of the model": Draws(port="x", seed=1, count=1),
        }.items():
            with pytest.raises(InvalidRequest, match=problem):
                await gpu.ask(DeployModel(graphs=(msgspec.structs.replace(given, draws=draws),)))
    async with deployed() as (gpu, _):
        draws = Draws(port="x", seed=1, count=1)
        other = await placed(gpu, await gpu.upload(W), 4, inputs={}, specs={}, draws=draws)
        with pytest.raises(InvalidRequest, match="is not two int64"):
            await gpu.ask(DeployModel(graphs=(other,)))


async def test_each_of_the_runs_that_keep_the_device_busy_for_long_is_answered_when_it_has_finished() -> None:
    device = Device()
    device.run_freely()
    async with spawn_on(lambda: AsynchronousEngine(device)) as gpu:
        model = await gpu.ask(DeployModel(graphs=(await placed(gpu, await gpu.upload(W), 4),)))
        await run(gpu, model, images(4))
        device.pause()
        message = RunModel.of(model, {"image": images(4)}, {})
        first = gpu.submit(message)
        fence, begin = await in_thread(device.wait_for_fence), time.monotonic()
        while time.monotonic() < begin + 0.01:
            await gpu.ping()  # after it, the actor looks at the fence
        fence.set()
        await first
        before = len(device.fences)
        with device.fencing.closed() as gate:
            blocking = gpu.submit(message)
            await in_thread(gate.wait_for_arrival)
            together = [gpu.submit(message) for _ in range(3)]
        for number, future in enumerate([blocking, *together]):
            while len(device.fences) <= before + number:
                await gpu.ping()
            device.fences[before + number].set()
            check(await future, images(4))
            assert not any(later.done() for later in together[number:])


async def test_what_one_graph_writes_no_other_uses() -> None:
    async with spawn() as gpu:
        w = await gpu.upload(W)
        one = await placed(gpu, w, 4, name="one")
        own = await placed(gpu, w, 4, name="two")
        x, weight, y, z = own.buffers
        shared = one.buffers[2]
        for buffers in ((x, weight, shared, z), (one.buffers[0], weight, y, z)):
            two = msgspec.structs.replace(own, buffers=buffers)
            with pytest.raises(
                InvalidRequest, match="is used by the graphs 'one' and 'two', and each run writes"
            ):
                await gpu.ask(DeployModel(graphs=(one, two)))
        alone = await gpu.ask(DeployModel(graphs=(own,)))
        model = await gpu.ask(DeployModel(graphs=(one,)))
        with pytest.raises(InvalidRequest, match="they may share weights alone"):
            await gpu.ask(WarmModel(model=model, graphs=(own,)))
        await gpu.ask(UnloadModel(model=alone))
        await gpu.ask(WarmModel(model=model, graphs=(own,)))
        await gpu.ask(WarmModel(model=model, graphs=(msgspec.structs.replace(own, name="two"),)))  # replaced
        check(await run(gpu, model, images(4)), images(4))


async def test_a_graph_without_specs_is_told_what_to_add() -> None:
    async with spawn() as gpu:
        graph = await placed(gpu, await gpu.upload(W), 4, specs={})
        with pytest.raises(InvalidRequest, match="is no name in specs; there is none: add 'image', or leave"):
            await gpu.ask(DeployModel(graphs=(graph,)))


async def test_a_run_that_writes_what_has_become_a_weight_is_seen_by_the_runs_that_read_it() -> None:
    """The engine keeps float16 weights in float32."""

    async def doubling(gpu: CudnnRef, w: BufferRef | None) -> ModelRef:
        """A model that adds its input to itself, or to a weight."""
        g = GraphBuilder()
        x = g.input("x", (4, 3), dtype=DType.FLOAT16)
        graph = g.build(y=g.add(x, x if w is None else g.input("w", (4, 3), dtype=DType.FLOAT16)))
        own = [await gpu.upload(np.zeros((4, 3), np.float16)) for _ in "xy"]
        named = {"x": own[0], "y": own[1], "w": w}
        given = ModelGraph(
            name="only",
            graph=graph,
            buffers=tuple([ref for name in graph.places if (ref := named[name]) is not None]),
            specs={"x": own[0].spec},
            inputs={"x": "x"},
            outputs={"y": "y"},
        )
        return await gpu.ask(DeployModel(graphs=(given,)))

    async with spawn() as gpu:
        weight = await gpu.upload(np.ones((4, 3), np.float16))
        x, y = [await gpu.upload(np.full((4, 3), value, np.float16)) for value in (1.0, 0.0)]
        writes = RunModel.of(await doubling(gpu, None), {"x": x}, {"y": weight})
        for _ in range(3):
            await gpu.ask(writes)
        reads = RunModel.of(await doubling(gpu, weight), {"x": x}, {"y": y})
        for value in (1.0, 3.0, 5.0):
            await gpu.write(x, np.full((4, 3), value, np.float16))
            await gpu.ask(writes)
            await gpu.ask(reads)
            np.testing.assert_array_equal(await gpu.download(y), np.full((4, 3), 3 * value))
