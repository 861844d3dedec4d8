"""`model.write` and `load(replace=)`: a model's weights are swapped while it serves."""

from __future__ import annotations

import asyncio
import functools
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator
from structlog.typing import EventDict

from cudnn_actor import (
    CudnnRef,
    DeadlineExceeded,
    ExecutionFailed,
    Fault,
    FaultPlan,
    InvalidRequest,
    QuarantinedRequest,
    ServiceStopped,
    StaleBufferError,
    TensorSpec,
    spawn,
)
from cudnn_actor.errors import UnsupportedModel
from cudnn_actor.messages import RunModel, WriteWeights
from cudnn_actor.onnx import OnnxModel
from cudnn_actor.options import Isolation
from tests.service.noticed_hangs import notice_hang

from ..log_lines import line
from ..loop_clock import LONG_S, pass_time
from .small_models import FLOAT, image_model, model_of, node

pytestmark = pytest.mark.parametrize("isolation", ["thread", "process"])


def network(batch: int | str = "N") -> onnx.ModelProto:
    """A product with a weight that constant nodes turn and scale, the first rows of another weight, a bias of
    one element, a shape."""
    return model_of(
        [
            node("Constant", "", "half", value=numpy_helper.from_array(np.array([0.5, 2.0], np.float32))),
            node("Transpose", "w", "turned"),
            node("Mul", "turned half", "scaled"),
            node("MatMul", "x scaled", "product"),
            node("Constant", "", "zero", value=numpy_helper.from_array(np.array([0], np.int64))),
            node("Shape", "x", "count", start=0, end=1),
            node("Slice", "positions zero count", "here"),
            node("Add", "product here", "placed"),
            node("Add", "placed bias", "moved"),
            node("Mul", "moved factor", "multiplied"),
            node("Reshape", "multiplied shape", "y"),
        ],
        {"x": (FLOAT, [batch, 3])},
        {"y": (FLOAT, None)},
        {
            "w": np.arange(6, dtype=np.float32).reshape(2, 3),
            "positions": np.arange(32, dtype=np.float32).reshape(16, 2),
            "bias": np.array([1], np.float32),
            "factor": np.array(3, np.float32),
            "shape": np.array([-1], np.int64),
        },
    )


def with_weights(model: onnx.ModelProto, weights: dict[str, np.ndarray]) -> onnx.ModelProto:
    other = onnx.ModelProto()
    other.CopyFrom(model)
    for tensor in other.graph.initializer:
        if tensor.name in weights:
            tensor.CopyFrom(numpy_helper.from_array(weights[tensor.name], tensor.name))
    return other


def expected(model: onnx.ModelProto, x: np.ndarray, name: str = "x") -> Any:
    results: Any = ReferenceEvaluator(model).run(None, {name: x})
    return results[0]


def rows(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((count, 3)).astype(np.float32)


def drawn(seed: int) -> dict[str, np.ndarray]:
    """Weights of the image model."""
    rng = np.random.default_rng(seed)
    tensors = {each.name: each.dims for each in image_model().graph.initializer}
    return {name: rng.standard_normal(tuple(dims)).astype(np.float32) / 4 for name, dims in tensors.items()}


async def check(gpu: CudnnRef, model: Any, file: onnx.ModelProto, *counts: int) -> None:
    for count in counts:
        found = (await gpu.run(model, x=rows(count)))["y"]
        np.testing.assert_allclose(found, expected(file, rows(count)), rtol=1e-4, atol=1e-5)


async def test_written_weights_and_what_is_folded_from_them_serve_all_dims(
    isolation: Isolation,
) -> None:
    file = network()
    async with (
        spawn(device="cpu", isolation=isolation) as gpu,
        await gpu.load(file, swappable=True) as model,
    ):
        await check(gpu, model, file, 1, 4)
        before = (await gpu.statistics()).live_buffers
        new = {
            "w": rows(2, 5),
            "positions": rows(16, 6)[:, :2],
            "bias": np.array([-7], np.float32),
        }
        await model.write(new)
        changed = with_weights(file, new)
        await check(gpu, model, changed, 4, 1)
        assert (await gpu.statistics()).live_buffers == before
        await check(gpu, model, changed, 9)  # a graph that is made after the write
        new["w"][:] = 99  # it was copied
        await check(gpu, model, changed, 10)
        await model.write({"bias": np.array([4], np.float32)})
        await check(gpu, model, with_weights(changed, {"bias": np.array([4], np.float32)}), 1, 4, 9, 10, 11)


async def test_a_weight_that_follows_from_a_long_chain_of_nodes_is_written(isolation: Isolation) -> None:
    """A chain of constants, some of which two nodes read: each is computed once."""
    count = 400  # of which each took three calls in a call, where Python allows for 1,000
    nodes = [node("Max", f"w{n} w{n}", f"w{n + 1}") for n in range(count)]
    file = model_of(
        [*nodes, node("Add", f"x w{count}", "y")],
        {"x": (FLOAT, [1, 2])},
        {"y": (FLOAT, None)},
        {"w0": np.array([1, 2], np.float32)},
    )
    async with (
        spawn(device="cpu", isolation=isolation) as gpu,
        await gpu.load(file, swappable=True) as model,
    ):
        await model.write({"w0": np.array([3, 4], np.float32)})
        found = (await gpu.run(model, x=np.ones((1, 2), np.float32)))["y"]
        np.testing.assert_array_equal(found, [[4, 5]])


async def test_weights_are_written_from_buffers(isolation: Isolation) -> None:
    """With what is folded from them, for dims before and after, and together with arrays."""
    file = network()
    new = {"w": rows(2, 5), "positions": rows(16, 6)[:, :2], "bias": np.array([-7], np.float32)}
    async with (
        spawn(device="cpu", isolation=isolation) as gpu,
        await gpu.load(file, swappable=True) as model,
    ):
        await check(gpu, model, file, 1, 4)
        w, positions = await gpu.upload(new["w"]), await gpu.upload(new["positions"])
        await model.write({"w": w, "positions": positions, "bias": new["bias"]})
        await gpu.fill(w, 99.0)  # the weights are a copy
        await check(gpu, model, with_weights(file, new), 4, 1, 9)
        wide = await gpu.upload(np.ones((2, 4), np.float32))
        with pytest.raises(InvalidRequest, match=r"w=float32 \(2, 4\): is not of the weight's dtype"):
            await model.write({"bias": np.array([1], np.float32), "w": wide})
        for ref in (w, positions, wide):
            await gpu.free(ref)
        with pytest.raises(StaleBufferError):
            await model.write({"bias": np.array([1], np.float32), "w": w})
        await check(gpu, model, with_weights(file, new), 4, 10)


async def test_weights_are_written_before_the_first_run(isolation: Isolation) -> None:
    file, new = network(), {"w": rows(2, 8)}
    async with spawn(device="cpu", isolation=isolation) as gpu:
        async with await gpu.load(file, swappable=True) as model:
            await model.write(new)
            await check(gpu, model, with_weights(file, new), 3)
        async with await gpu.load(network(2), swappable=True) as model:  # uploaded, and not deployed yet
            await model.write(new)
            await check(gpu, model, with_weights(file, new), 2)


async def test_the_weights_of_a_model_in_another_dtype_are_rounded(isolation: Isolation) -> None:
    file = image_model(2)
    x = np.random.default_rng(1).standard_normal((2, 3, 8, 8)).astype(np.float32)
    new = drawn(5)
    async with spawn(device="cpu", isolation=isolation) as gpu:
        options: dict[str, Any] = {"dtype": "bfloat16"}
        async with (
            await gpu.load(file, swappable=True, **options) as model,
            await gpu.load(with_weights(file, new), **options) as other,
        ):
            await gpu.run(model, image=x)
            await model.write(new)
            found, wanted = await gpu.run(model, image=x), await gpu.run(other, image=x)
            for name, array in wanted.items():
                np.testing.assert_array_equal(found[name], array)


async def test_what_does_not_fit_is_refused_and_nothing_is_written(isolation: Isolation) -> None:
    file = network()
    async with spawn(device="cpu", isolation=isolation) as gpu:
        async with await gpu.load(file, swappable=True) as model:
            assert model.weights["w"] == TensorSpec.packed((2, 3), "float32")
            await check(gpu, model, file, 2)
            assert model.weights.keys() == {"w", "positions", "bias"}
            good = rows(2, 3)
            cases: dict[str, dict[str, Any]] = {
                "is no weight of the model; did you mean .bias.": {"bia": np.array([1], np.float32)},
                "decides over the model's graph": {"shape": np.array([1, -1])},
                r"is not of the weight's dtype and dims, float32 \(1\)": {
                    "bias": np.array([1, 2], np.float32)
                },
                "float64": {"bias": np.ones(1)},
                "bias='abc': is of type str, not an array of numbers": {"bias": "abc"},
                "gpu.load\\(new, replace=model\\)": {"factor": np.array(1, np.float32)},
            }
            for problem, wrong in cases.items():
                with pytest.raises(InvalidRequest, match=problem):
                    await model.write({"w": good, **wrong})
            no: Any = "no"
            with pytest.raises(InvalidRequest, match="swappable='no': is neither True nor False"):
                await gpu.load(file, swappable=no)
            with pytest.raises(InvalidRequest, match="swappable='no': is neither True nor False"):
                OnnxModel(file, swappable=no)
            listed: Any = [good]
            with pytest.raises(InvalidRequest, match="is not a mapping"):
                await model.write(listed)
            await check(gpu, model, file, 2)
        with pytest.raises(InvalidRequest, match="is closed"):
            await model.write({"w": good})
        async with await gpu.load(file) as model:
            with pytest.raises(InvalidRequest, match="swappable=True"):
                await model.write({"w": good})


X = np.random.default_rng(1).standard_normal((5, 3, 8, 8)).astype(np.float32)


@functools.cache
def scores_of(version: int, count: int) -> np.ndarray:
    """What the image model with `drawn` weights makes of the first images of X."""
    return np.asarray(expected(with_weights(image_model(), drawn(version)), X[:count], "image"))


@pytest.mark.pairwise
@pytest.mark.parametrize("of", [None, RunModel, WriteWeights])
@pytest.mark.parametrize("standby", [False, True])
async def test_each_answer_is_of_one_version(isolation: Isolation, of: type | None, standby: bool) -> None:
    faults = FaultPlan()
    if of is not None:  # a request that is sent again is at most the eighth: there are five at a time
        faults = faults.at(3, Fault.STICKY, of=of).at(15, Fault.STICKY, of=of)
    options: dict[str, Any] = {"standby": int(standby)} if isolation == "process" else {}
    versions = [drawn(seed) for seed in range(8)]
    wanted = [[scores_of(version, count) for version in range(8)] for count in range(1, 6)]
    written, ran = 0, asyncio.Event()
    async with (
        spawn(device="cpu", isolation=isolation, faults=faults, max_restarts=9, **options) as gpu,
        await gpu.load(with_weights(image_model(), versions[0]), swappable=True) as model,
    ):

        async def write() -> None:
            nonlocal written
            for written in range(1, 25):
                await model.write(versions[written % 8])
                ran.clear()
                if written < 24:
                    await ran.wait()

        async def run(count: int) -> None:
            while written < 24:
                since = written
                ran.set()
                found = (await gpu.run(model, image=X[:count]))["scores"]
                near = [
                    number
                    for number, each in enumerate(wanted[count - 1])
                    if np.allclose(found, each, rtol=1e-4, atol=1e-4)
                ]
                assert len(near) == 1, "of no version"
                possible = {number % 8 for number in range(max(0, since - 1), written + 1)}
                assert near[0] in possible, "of a version that was not there"

        await asyncio.gather(write(), *(run(count) for count in range(1, 6)))
        assert gpu.generation == (1 if of is None else 3)


async def test_a_write_that_is_not_awaited_any_more_is_finished_before_a_graph_is_added(
    isolation: Isolation, logs: list[EventDict]
) -> None:
    file, new = network(), {"w": rows(2, 4), "positions": rows(16, 6)[:, :2]}
    faults = FaultPlan().at(1, Fault.SLOW, of=WriteWeights, seconds=0.5)
    async with (
        spawn(device="cpu", isolation=isolation, faults=faults) as gpu,
        await gpu.load(file, swappable=True) as model,
    ):
        await check(gpu, model, file, 1)
        writing = asyncio.ensure_future(model.write(new, timeout=LONG_S))
        await line(logs, "fault.injected")
        pass_time()
        with pytest.raises(DeadlineExceeded) as caught:
            await writing
        assert caught.value.started
        changed = with_weights(file, new)
        await check(gpu, model, changed, 3, 1)


async def test_a_service_that_closes_answers_writes(isolation: Isolation) -> None:
    async with spawn(device="cpu", isolation=isolation) as gpu:
        model = await gpu.load(network(), dims={"N": 2}, swappable=True)
        tasks = [asyncio.ensure_future(model.write({"w": rows(2, seed)})) for seed in range(5)]
        tasks.append(asyncio.ensure_future(model.close()))
        await asyncio.sleep(0)
    for outcome in await asyncio.gather(*tasks, return_exceptions=True):
        assert outcome is None or isinstance(outcome, ServiceStopped | InvalidRequest)


def rescaled(version: int) -> onnx.ModelProto:
    """The image model with other weights, and with one node more."""
    file = with_weights(image_model(), drawn(version))
    file.graph.node[-1].output[0] = "unscaled"
    scale = numpy_helper.from_array(np.array(version, np.float32))
    file.graph.node.extend(
        [node("Constant", "", "scale", value=scale), node("Mul", "unscaled scale", "scores")]
    )
    return file


async def test_a_model_is_replaced_while_it_serves(isolation: Isolation) -> None:
    files = [rescaled(version) for version in range(1, 5)]
    x = np.random.default_rng(1).standard_normal((3, 3, 8, 8)).astype(np.float32)
    wanted = [[expected(each, x[:count], "image") for each in files] for count in range(1, 4)]
    faults = FaultPlan().at(7, Fault.STICKY, of=RunModel)
    ending, served = False, 0
    async with spawn(device="cpu", isolation=isolation, faults=faults) as gpu:
        model = await gpu.load(files[0], dims={"N": (1, 2, 3)})

        async def run(count: int) -> None:
            nonlocal served
            while not ending:
                since = served
                found = (await gpu.run(model, image=x[:count]))["scores"]
                near = [
                    number
                    for number, each in enumerate(wanted[count - 1])
                    if np.allclose(found, each, rtol=1e-4, atol=1e-4)
                ]
                assert len(near) == 1
                assert since <= near[0] <= served + 1

        async def replace() -> None:
            nonlocal ending, served
            for number, file in enumerate(files[1:], 1):
                before = model.ref
                assert await gpu.load(file, replace=model) is model
                served = number
                assert model.ref != before
            ending = True

        await asyncio.gather(replace(), *(run(count) for count in range(1, 4)))
        await gpu.drain()
        assert (await gpu.statistics()).live_buffers == len(drawn(0)) + 3 * 3
        await model.close()
        await gpu.drain()
        assert (await gpu.statistics()).live_buffers == 0
        with pytest.raises(InvalidRequest, match="is closed"):
            await gpu.run(model, image=x)


async def test_a_model_that_cannot_be_replaced_stays(isolation: Isolation) -> None:
    file = network()
    async with spawn(device="cpu", isolation=isolation) as gpu, await gpu.load(file, swappable=True) as model:
        await check(gpu, model, file, 1, 2)
        before = (await gpu.statistics()).live_buffers
        with pytest.raises(InvalidRequest, match="are not the inputs of the model"):
            await gpu.load(image_model(), replace=model)
        wrong = with_weights(file, {"shape": np.array([2], np.int64)})
        with pytest.raises((UnsupportedModel, InvalidRequest)):
            await gpu.load(wrong, replace=model)
        await gpu.drain()
        assert (await gpu.statistics()).live_buffers == before
        await check(gpu, model, file, 1, 2)
        new = with_weights(file, {"w": rows(2, 7), "shape": np.array([1, -1], np.int64)})
        await gpu.load(new, replace=model)  # it may be swapped as the old one could be
        await model.write({"bias": np.array([6], np.float32)})
        await check(gpu, model, with_weights(new, {"bias": np.array([6], np.float32)}), 2, 3)


async def test_a_graph_that_is_imported_during_a_write_has_the_new_weights(isolation: Isolation) -> None:
    file = network()
    async with spawn(device="cpu", isolation=isolation) as gpu, await gpu.load(file, swappable=True) as model:
        for count in range(1, 13):
            new = {"positions": rows(16, count)[:, :2]}
            running = asyncio.ensure_future(gpu.run(model, x=rows(count)))
            await asyncio.sleep(0)
            await model.write(new)
            await running
            await check(gpu, model, with_weights(file, new), count)


@pytest.mark.parametrize("second", [Fault.STICKY, Fault.FAIL_EXECUTION])
async def test_a_write_that_does_not_end_well_leaves_the_old_weights(
    isolation: Isolation, second: Fault
) -> None:
    """The service may have written some of them: they are uploaded again."""
    file, new = network(), {"w": rows(2, 4), "positions": rows(16, 6)[:, :2]}
    faults = FaultPlan().at(1, Fault.STICKY, of=WriteWeights).at(2, second, of=WriteWeights)
    async with (
        spawn(device="cpu", isolation=isolation, faults=faults, max_restarts=9) as gpu,
        await gpu.load(file, swappable=True) as model,
    ):
        await check(gpu, model, file, 1, 4)
        before = (await gpu.statistics()).live_buffers
        writing = asyncio.ensure_future(model.write(new))
        running = [asyncio.ensure_future(check(gpu, model, file, 1, 4, 5)) for _ in range(3)]
        with pytest.raises((QuarantinedRequest, ExecutionFailed)):
            await writing
        await asyncio.gather(*running)
        await check(gpu, model, file, 1, 6)  # 6: a graph that is made now
        await model.write(new)
        await check(gpu, model, with_weights(file, new), 1, 4, 7)
        await gpu.drain()
        assert (
            await gpu.statistics()
        ).live_buffers == before + 3 * 3  # the places, and a weight, of 5, 6 and 7


async def test_a_write_that_is_torn_while_nobody_waits_is_made_again(
    isolation: Isolation, logs: list[EventDict]
) -> None:
    if isolation == "thread":
        pytest.skip("a thread that hangs is not ended")
    file, new = network(), {"w": rows(2, 4), "positions": rows(16, 6)[:, :2]}
    faults = FaultPlan().at(1, Fault.STICKY, of=WriteWeights).at(2, Fault.HANG, of=WriteWeights)
    async with (
        spawn(device="cpu", isolation=isolation, faults=faults, max_restarts=9) as gpu,
        await gpu.load(file, swappable=True) as model,
    ):
        await check(gpu, model, file, 1)
        writing = asyncio.ensure_future(model.write(new))
        while gpu.generation == 1:  # noqa: ASYNC110 - a worker ends
            await asyncio.sleep(0.001)
        writing.cancel()  # the second worker has it now, or will have it
        with pytest.raises(asyncio.CancelledError):
            await writing
        later = {"bias": np.array([3], np.float32)}
        writing = asyncio.ensure_future(model.write(later))
        await line(logs, "fault.injected", 2)
        notice_hang(gpu)
        await writing
        await check(gpu, model, with_weights(file, {**new, **later}), 1, 2)
        assert gpu.generation == 3


def noisy(scale: float) -> onnx.ModelProto:
    """Random numbers, to which a product with a weight is added."""
    nodes = [node("MatMul", "x w", "p"), node("RandomUniformLike", "p", "r"), node("Add", "p r", "y")]
    w = np.full((2, 2), scale, np.float32)
    return model_of(nodes, {"x": (FLOAT, ["N", 2])}, {"y": (FLOAT, ["N", 2])}, {"w": w})


async def test_a_model_is_replaced_with_the_options_that_it_was_loaded_with(isolation: Isolation) -> None:
    x = np.full((3, 2), 0.3, np.float32)
    earlier: dict[str, Any] = {"random": 7, "dtype": "float16", "swappable": True, "tune": "cached"}
    async with spawn(device="cpu", isolation=isolation) as gpu:
        model = await gpu.load(noisy(1), **earlier)
        assert await gpu.load(noisy(2), replace=model) is model
        assert (model.swappable, model.tune) == (True, "cached")
        alone = await gpu.load(noisy(2), **earlier)
        found, wanted = [(await gpu.run(each, x=x))["y"] for each in (model, alone)]
        np.testing.assert_array_equal(found, wanted)
        plain = await gpu.load(noisy(2), random=7)
        assert ((await gpu.run(plain, x=x))["y"] != wanted).any()  # so the dtype is seen in the values

        given: dict[str, Any] = {"random": 8, "dtype": "float32", "swappable": False, "tune": False}
        await gpu.load(noisy(2), replace=model, **given)
        assert (model.swappable, model.tune) == (False, False)
        other = await gpu.load(noisy(2), **given)
        found, wanted = [(await gpu.run(each, x=x))["y"] for each in (model, other)]
        np.testing.assert_array_equal(found, wanted)
        with pytest.raises(InvalidRequest, match="was loaded without swappable=True"):
            await model.write({"w": np.ones((2, 2), np.float32)})


async def test_arguments_of_load_are_named_as_they_were_given(isolation: Isolation) -> None:
    async with spawn(device="cpu", isolation=isolation) as gpu:
        wrong: Any = 8
        with pytest.raises(InvalidRequest, match=r"^dims=8: is not a mapping of names of dims"):
            await gpu.load(network(), dims=wrong)
        with pytest.raises(InvalidRequest, match=r"^dims=.* are 99 sets of dims"):
            await gpu.load(network(), dims={"N": range(1, 100)})
        wrong = "m"
        with pytest.raises(InvalidRequest, match=r"^replace='m': is not a model"):
            await gpu.load(network(), replace=wrong)
