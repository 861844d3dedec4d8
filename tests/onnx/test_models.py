"""`gpu.load` and `gpu.run`: weights, dims, and values that decide."""

from __future__ import annotations

import asyncio
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from cudnn_actor import (
    BufferRef,
    CudnnRef,
    DeadlineExceeded,
    Fault,
    FaultPlan,
    InvalidRequest,
    OutOfMemory,
    spawn,
    start,
)
from cudnn_actor.messages import Allocate, RunModel
from cudnn_actor.models import keeping as models
from cudnn_actor.models import preparing
from cudnn_actor.models.inputs import Alike
from cudnn_actor.onnx import OnnxModel
from cudnn_actor.protocol.messages.messages import Message, Warm

from ..inside import kept_by
from ..patience import PATIENCE_S
from .small_models import FLOAT, INT64, image_model, model_of, node

rng = np.random.default_rng(5)


def images(count: int) -> np.ndarray:
    return rng.standard_normal((count, 3, 8, 8)).astype(np.float32)


def expected(model: onnx.ModelProto, **inputs: np.ndarray) -> list[np.ndarray]:
    return list(ReferenceEvaluator(model).run(None, inputs))


WEIGHTS, PLACES = 5, 3
"""The buffers of `image_model`: its weights, and those of a run's input and its two outputs, for each set of
dims."""


async def buffers(gpu: Any) -> int:
    await gpu.drain()
    return int((await gpu.statistics()).live_buffers)


async def test_a_model_runs_from_a_path_bytes_or_a_proto(tmp_path: Path) -> None:
    proto, x = image_model(), images(2)
    onnx.save(proto, tmp_path / "model.onnx")
    async with spawn(device="cpu") as gpu:
        for given in (
            tmp_path / "model.onnx",
            str(tmp_path / "model.onnx"),
            proto.SerializeToString(),
            proto,
        ):
            model = await gpu.load(given)
            result = await gpu.run(model, {"image": x})
            for value, wanted in zip(result.values(), expected(proto, image=x), strict=True):
                np.testing.assert_allclose(value, wanted, rtol=1e-4, atol=1e-5)
            assert list(result) == ["scores", "features"]
            await model.close()
        assert await buffers(gpu) == 0


async def test_a_graph_is_made_for_each_set_of_dims_once_and_weights_are_uploaded_once() -> None:
    proto = image_model()
    async with spawn(device="cpu") as gpu:
        model = await gpu.load(proto)
        for count in (1, 3, 1, 3):
            x = images(count)
            result = await gpu.run(model, {"image": x})
            np.testing.assert_allclose(result["scores"], expected(proto, image=x)[0], rtol=1e-4, atol=1e-5)
        assert len(kept_by(model).kept) == 2
        assert await buffers(gpu) == WEIGHTS + 2 * PLACES
        assert (await gpu.statistics()).plans.misses == 2
        await model.close()
        assert await buffers(gpu) == 0


async def test_weights_of_a_model_with_fixed_dims_are_there_when_it_is_loaded() -> None:
    async with spawn(device="cpu") as gpu:
        model = await gpu.load(image_model(2))
        assert model.fixed
        assert await buffers(gpu) == 5
        await model.close()


async def test_the_oldest_graphs_are_forgotten_and_so_are_their_own_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(models, "MOST_KEPT", 2)
    proto = model_of(
        [
            node("Shape", "x", "s"),
            node("ConstantOfShape", "s", "zeros"),
            node("Add", "x zeros", "a"),
            node("Mul", "a w", "y"),
        ],
        {"x": (FLOAT, ["N", 3])},
        {"y": (FLOAT, ["N", 3])},
        {"w": np.ones(3, np.float32)},
    )
    async with spawn(device="cpu") as gpu:
        model = await gpu.load(proto)
        for count in range(1, 6):
            x = np.ones((count, 3), np.float32)
            np.testing.assert_array_equal((await gpu.run(model, {"x": x}))["y"], x)
        assert len(kept_by(model).kept) == 2
        assert await buffers(gpu) <= 3 + 2 * 2
        await model.close()


async def test_outputs_stay_on_the_device_and_references_go_in() -> None:
    x = images(2)
    async with spawn(device="cpu") as gpu:
        model = await gpu.load(image_model())
        ref = await gpu.upload(x)
        result = await gpu.run(model, {"image": ref}, keep=("features",))
        assert isinstance(result["features"], BufferRef)
        assert isinstance(result["scores"], np.ndarray)
        np.testing.assert_allclose(
            await gpu.download(result["features"]), expected(image_model(), image=x)[1], rtol=1e-4, atol=1e-5
        )
        await gpu.free(result["features"])
        await gpu.free(ref)
        await model.close()
        assert await buffers(gpu) == 0


async def test_an_output_that_is_kept_twice_by_name_is_one_buffer() -> None:
    async with spawn(device="cpu") as gpu:
        model = await gpu.load(image_model())
        result = await gpu.run(model, {"image": images(2)}, keep=("features", "features"))
        await gpu.free(result["features"])
        await model.close()
        assert await buffers(gpu) == 0


async def test_tasks_run_a_model_at_once() -> None:
    proto = image_model()
    async with spawn(device="cpu") as gpu:
        model = await gpu.load(proto)
        given = [images(1 + number % 3) for number in range(12)]
        results = await asyncio.gather(*(gpu.run(model, {"image": x}) for x in given))
        for x, result in zip(given, results, strict=True):
            np.testing.assert_allclose(result["scores"], expected(proto, image=x)[0], rtol=1e-4, atol=1e-5)
        assert await buffers(gpu) == WEIGHTS + 3 * PLACES
        await model.close()


async def test_a_crash_loses_nothing() -> None:
    proto, x = image_model(2), images(2)
    faults = FaultPlan().at(2, Fault.KILL, of=RunModel)
    async with spawn(device="cpu", faults=faults) as gpu:
        model = await gpu.load(proto)
        for _ in range(4):
            result = await gpu.run(model, {"image": x})
            np.testing.assert_allclose(result["scores"], expected(proto, image=x)[0], rtol=1e-4, atol=1e-5)
        assert gpu.generation == 2
        await model.close()


async def test_a_crash_while_weights_are_uploaded_or_results_are_read_loses_nothing() -> None:
    proto, x = image_model(2), images(2)
    faults = FaultPlan().at(3, Fault.KILL, of=Allocate).at(1, Fault.KILL, of=RunModel)
    async with spawn(device="cpu", isolation="process", standby=1, faults=faults) as gpu:
        model = await gpu.load(proto)
        result = await gpu.run(model, {"image": x})
        np.testing.assert_allclose(result["scores"], expected(proto, image=x)[0], rtol=1e-4, atol=1e-5)
        assert gpu.generation == 3
        assert await buffers(gpu) == WEIGHTS + PLACES
        await model.close()
        assert await buffers(gpu) == 0


async def test_tasks_that_come_first_share_one_import_and_one_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    async with spawn(device="cpu") as gpu:
        model = await gpu.load(image_model())
        called: list[str] = []

        def noted(owner: Any, name: str) -> None:
            function = getattr(owner, name)

            def note(*given: Any, **options: Any) -> Any:
                called.append(name)
                return function(*given, **options)

            monkeypatch.setattr(owner, name, note)

        noted(kept_by(model).source, "specialise")
        noted(gpu, "upload")
        await asyncio.gather(*(gpu.run(model, {"image": images(2)}) for _ in range(6)))
        assert called.count("specialise") == 1
        assert called.count("upload") == WEIGHTS
        await model.close()


def test_event_loops_share_a_model() -> None:
    """They may import and upload the same at a time; one of both is kept."""
    proto = image_model()
    service = start(device="cpu")
    gpu = CudnnRef(service)
    model = asyncio.run(gpu.load(proto))
    given = [images(1 + number % 2) for number in range(4)]

    async def runs() -> list[dict[str, Any]]:
        return await asyncio.gather(*(gpu.run(model, {"image": x}) for x in given))

    async def end() -> None:
        assert await buffers(gpu) == WEIGHTS + 2 * PLACES
        await model.close()
        assert await buffers(gpu) == 0
        await gpu.aclose()

    with ThreadPoolExecutor(3) as threads:
        for results in threads.map(lambda _: asyncio.run(runs()), range(3)):
            for x, result in zip(given, results, strict=True):
                wanted = expected(proto, image=x)[0]
                np.testing.assert_allclose(result["scores"], wanted, rtol=1e-4, atol=1e-5)
    asyncio.run(end())


@pytest.mark.parametrize("how", ["cancelled", "out of memory"])
async def test_a_run_that_ends_at_any_request_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    async with spawn(device="cpu") as gpu:
        ask, left = gpu.ask, 0

        async def ask_some(message: Message, **options: Any) -> Any:
            nonlocal left
            if isinstance(message, Warm):  # the plan that is built meanwhile: its end ends no run
                return await ask(message, **options)
            left -= 1
            if not left and how == "out of memory":
                raise OutOfMemory(requested=1, in_use=0, limit=0)
            if not left:
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
            return await ask(message, **options)

        monkeypatch.setattr(gpu, "ask", ask_some)
        for last in itertools.count(1):
            model = await gpu.load(image_model())
            left = last
            running = asyncio.ensure_future(gpu.run(model, {"image": images(1)}, keep=("features",)))
            await asyncio.wait([running])
            if left > 0:
                break
            wanted = asyncio.CancelledError if how == "cancelled" else OutOfMemory
            with pytest.raises(wanted):
                running.result()
            assert not any(kept.runs for kept in kept_by(model).kept.values())
            await model.close()
            while await buffers(gpu):  # what was allocated for uploads that ended with it is freed next
                await gpu.ping()
        left = 0
        assert last > 5 + 3  # five weights, an input, outputs
        await gpu.free(running.result()["features"])
        await model.close()
        assert await buffers(gpu) == 0


async def test_a_run_that_is_cancelled_when_its_weights_are_there_leaves_nothing_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with spawn(device="cpu") as gpu:
        ask, ending = gpu.ask, asyncio.Event()

        async def ask_slowly(message: Message, **options: Any) -> Any:
            if not isinstance(message, Warm):
                return await ask(message, **options)
            try:
                await asyncio.Event().wait()
            finally:  # all weights are there, and nobody waits for the plan any more
                ending.set()
                await asyncio.Event().wait()

        monkeypatch.setattr(gpu, "ask", ask_slowly)
        model = await gpu.load(image_model())
        running = asyncio.ensure_future(gpu.run(model, {"image": images(1)}))
        await ending.wait()
        assert await buffers(gpu) == WEIGHTS
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await model.close()
        assert await buffers(gpu) == 0


@pytest.mark.parametrize(("limit", "most"), [(1, 1), (1000, 2), (1 << 20, 5)])
async def test_weights_are_uploaded_together_as_long_as_they_are_few_bytes(
    monkeypatch: pytest.MonkeyPatch, limit: int, most: int
) -> None:
    monkeypatch.setattr(preparing, "_MOST_BYTES_AT_A_TIME", limit)
    async with spawn(device="cpu") as gpu:
        upload, under_way, at_a_time = gpu.upload, list[int](), list[int]()

        async def watched(values: np.ndarray, **options: Any) -> Any:
            under_way.append(values.nbytes)
            at_a_time.append(len(under_way))
            assert sum(under_way) <= limit or len(under_way) == 1
            await gpu.ping()  # the others begin meanwhile
            under_way.remove(values.nbytes)
            return await upload(values, **options)

        monkeypatch.setattr(gpu, "upload", watched)
        model = await gpu.load(image_model())
        await gpu.run(model, {"image": images(1)})
        assert max(at_a_time) == most
        await model.close()


RESHAPED = model_of(
    [node("Add", "shape one", "more"), node("Reshape", "x more", "r"), node("Neg", "r", "y")],
    {"x": (FLOAT, ["N"]), "shape": (INT64, [2])},
    {"y": (FLOAT, [None, None])},
    {"one": np.array([1, 1])},
)


async def test_values_that_decide_over_dims_are_part_of_what_a_graph_is_made_for() -> None:
    x = np.arange(12, dtype=np.float32)
    async with spawn(device="cpu") as gpu:
        model = await gpu.load(RESHAPED)
        for shape in ((2, 3), (1, 5), (2, 3)):
            given = {"x": x, "shape": np.array(shape)}
            wanted = -x.reshape(shape[0] + 1, shape[1] + 1)
            np.testing.assert_array_equal((await gpu.run(model, given))["y"], wanted)
        assert len(kept_by(model).kept) == 2
        ref = await gpu.upload(np.array([3, 2]))
        np.testing.assert_array_equal((await gpu.run(model, {"x": x, "shape": ref}))["y"], -x.reshape(4, 3))
        await gpu.free(ref)
        await model.close()


async def test_only_what_decides_is_computed_while_a_model_is_imported() -> None:
    """The input of NonZero decides over dims, but the arithmetic on it is the engine's."""
    proto = model_of(
        [node("Exp", "x", "e"), node("NonZero", "x", "places")],
        {"x": (FLOAT, [4])},
        {"e": (FLOAT, [4]), "places": (INT64, None)},
    )
    x = np.array([0, 1, 0, 2], np.float32)
    async with spawn(device="cpu") as gpu:
        model = await gpu.load(proto)
        result = await gpu.run(model, {"x": x})
        np.testing.assert_array_equal(result["places"], [[1, 3]])
        np.testing.assert_allclose(result["e"], np.exp(x), rtol=1e-6)
        (kept,) = kept_by(model).kept.values()
        assert list(kept.of.outputs) == ["e"]
        assert list(kept.of.constants) == ["places"]
        await model.close()


def test_inputs_like_those_of_the_run_before_keep_their_shape_if_the_caller_changes_his() -> None:
    alike = Alike.to({"image": images(2)})
    x = images(2)
    assert alike is not None
    views = alike.views({"image": x})
    assert views is not None
    x.shape = (1, 6, 8, 8)
    view = views["image"]
    assert isinstance(view, np.ndarray)
    assert view.shape == (2, 3, 8, 8)
    assert np.shares_memory(view, x)
    assert alike.views({"image": x}) is None


async def test_an_output_that_is_a_constant_is_the_caller_s_own_array() -> None:
    proto = model_of(
        [node("Relu", "x", "y"), node("Shape", "x", "s")],
        {"x": (FLOAT, ["N"])},
        {"y": (FLOAT, ["N"]), "s": (INT64, [1])},
    )
    async with spawn(device="cpu") as gpu:
        model = await gpu.load(proto)
        for _ in range(2):
            results = await gpu.run(model, {"x": np.ones(3, np.float32)})
            assert results["s"].tolist() == [3]
            results["s"][0] = 99


def scaled() -> onnx.ModelProto:
    """A model whose factors have a default, of which they may be more: y = x * factors, as so many rows."""
    return model_of(
        [node("Mul", "x factors", "p"), node("Reshape", "p shape", "y")],
        {"x": (FLOAT, ["N", 3]), "factors": (FLOAT, ["K"]), "shape": (INT64, [2])},
        {"y": (FLOAT, None)},
        {"factors": np.full(3, 2, np.float32), "shape": np.array([-1, 1])},
    )


async def test_an_initialiser_that_is_an_input_too_is_its_default() -> None:
    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    async with spawn(device="cpu") as gpu:
        model = await gpu.load(scaled())
        assert [each.name for each in model.inputs] == ["x"]
        assert [each.name for each in model.defaults] == ["factors", "shape"]
        for _ in range(2):  # what was given, or decided over shapes, before does not stay
            result = await gpu.run(model, x=x)
            np.testing.assert_array_equal(result["y"], 2 * x.reshape(6, 1))
            result = await gpu.run(model, x=x, factors=np.ones(1, np.float32), shape=np.array([3, 2]))
            np.testing.assert_array_equal(result["y"], x.reshape(3, 2))
        with pytest.raises(InvalidRequest, match="is no input of the model; give x, factors, shape"):
            await gpu.run(model, x=x, other=x)
        with pytest.raises(InvalidRequest, match=r"inputs='x': is an input that is missing; give x$"):
            await gpu.run(model, factors=np.ones(3, np.float32))
        with pytest.raises(InvalidRequest, match=r"factors=.* is not the dtype of the input"):
            await gpu.run(model, x=x, factors=np.ones(3))
        await model.close()


async def test_a_model_takes_its_inputs_by_name_as_its_service_does() -> None:
    async with spawn(device="cpu") as gpu:
        model, image = await gpu.load(image_model()), images(1)
        by_name, given = await model.run(image=image), await gpu.run(model, {"image": image})
        np.testing.assert_array_equal(by_name["scores"], given["scores"])
        with pytest.raises(InvalidRequest, match="is given twice"):
            await model.run({"image": image}, image=image)
        await model.close()


async def test_inputs_may_be_given_by_name() -> None:
    proto, x = image_model(), images(1)
    async with spawn(device="cpu") as gpu:
        model = await gpu.load(proto)
        result = await gpu.run(model, image=x)
        np.testing.assert_array_equal(result["scores"], (await gpu.run(model, {"image": x}))["scores"])
        with pytest.raises(InvalidRequest, match=r"^image=.*: is given twice; give it once"):
            await gpu.run(model, {"image": x}, image=x)
        with pytest.raises(InvalidRequest, match=r"^inputs='img': is no input .* did you mean \"image\"\?"):
            await gpu.run(model, img=x)
        await model.close()


class SlowSource:
    """A model whose import waits for the test."""

    def __init__(self, proto: onnx.ModelProto) -> None:
        self._of = OnnxModel(proto)
        self.inputs, self.defaults, self.outputs = self._of.inputs, self._of.defaults, self._of.outputs
        self.may_end = threading.Event()

    def specialise(self, *given: Any) -> Any:
        assert self.may_end.wait(PATIENCE_S)
        return self._of.specialise(*given)


async def called(gpu: CudnnRef, call: str, source: SlowSource) -> None:
    if call == "load":
        await gpu.load(source, timeout=0.05)
    model = await gpu.load(source)
    try:
        if call == "run":
            await gpu.run(model, image=images(1), timeout=0.05)
        await model.explain({"image": images(1)}, timeout=0.05)
    finally:
        await model.close()


@pytest.mark.parametrize("call", ["load", "run", "explain"])
async def test_the_import_counts_towards_the_timeout_and_leaves_nothing(call: str) -> None:
    source = SlowSource(image_model(1 if call == "load" else "N"))
    async with spawn(device="cpu") as gpu:
        with pytest.raises(DeadlineExceeded, match=r"^no reply within 0\.05 s: the request had not started"):
            await called(gpu, call, source)
        source.may_end.set()
        assert await buffers(gpu) == 0


async def test_a_sum_of_thousands_of_tensors_runs() -> None:
    names = " ".join(["x"] * 2000)
    model = model_of([node("Sum", names, "y")], {"x": (FLOAT, [4])}, {"y": (FLOAT, [4])})
    async with spawn(device="cpu", hang_after_s=10.0) as gpu:
        y = await gpu.run(await gpu.load(model), {"x": np.ones(4, np.float32)})
        np.testing.assert_array_equal(y["y"], 2000)
        assert gpu.generation == 1
