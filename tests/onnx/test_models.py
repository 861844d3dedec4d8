"""`gpu.load` and `gpu.run`: weights, dims, values that decide, and what is left afterwards."""

from __future__ import annotations

import asyncio
import gc
import itertools
import sys
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
    Graph,
    InvalidRequest,
    OutOfMemory,
    ServiceStopped,
    StaleBufferError,
    spawn,
    start,
)
from cudnn_actor.errors import UnsupportedModel
from cudnn_actor.messages import Allocate, RunModel
from cudnn_actor.models import keeping as models
from cudnn_actor.models import preparing
from cudnn_actor.models.inputs import Alike
from cudnn_actor.models.sizes import require_sizes_or_inputs
from cudnn_actor.models.source import Feature
from cudnn_actor.onnx import OnnxModel
from cudnn_actor.onnx.operator_table import NO_WAY, UNSEEDED
from cudnn_actor.options import Isolation
from cudnn_actor.protocol import DType
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

        noted(kept_by(model).source, "specialised")
        noted(gpu, "upload")
        await asyncio.gather(*(gpu.run(model, {"image": images(2)}) for _ in range(6)))
        assert called.count("specialised") == 1
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


async def test_closing_frees_all_weights_whatever_has_become_of_one() -> None:
    async with spawn(device="cpu") as gpu:
        model = await gpu.load(image_model(1))
        await gpu.free(next(iter(kept_by(model).weights.values()))[0])
        await model.close()
        assert await buffers(gpu) == 0


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


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({}, "is an input that is missing"),
        ({"image": np.zeros((1, 3, 8, 8), np.float32), "other": np.zeros(1)}, "is no input of the model"),
        ({"imgae": np.zeros((1, 3, 8, 8), np.float32)}, 'no input of the model; did you mean "image"'),
        ({"image": np.zeros((1, 3, 8, 8))}, "is not the dtype of the input, which is float32"),
        (
            {"image": np.zeros((1,) * 9, np.float32)},
            r"^image=\(1, 1, 1, 1, 1, 1, 1, 1, 1\): must be a tuple of 0",
        ),
        ({"image": np.zeros((1, 3, 8, 9), np.float32)}, "dim 3 is 9, not 8"),
        (
            {"image": np.zeros((3, 8, 8), np.float32)},
            r"\(N, 3, 8, 8\): it has 3 dims, not 4; give array\[None\]$",
        ),
        (
            {"image": np.zeros((8, 8, 3), np.float32)},
            r"not 4; give array\.transpose\(2, 0, 1\)\[None\]$",
        ),
        (
            {"image": np.zeros((2, 8, 8, 3), np.float32)},
            r"dim 1 is 8, not 3; give array\.transpose\(0, 3, 1, 2\)$",
        ),
        ({"image": np.zeros((8, 8), np.float32)}, "it has 2 dims, not 4; give an array that fits$"),
        (
            {"image": np.zeros((1, 2, 8, 9), np.float32)},
            r"does not fit \(N, 3, 8, 8\): dim 1 is 2, not 3; give",
        ),
    ],
)
async def test_inputs_that_do_not_fit_are_refused(given: dict[str, Any], problem: str) -> None:
    async with spawn(device="cpu") as gpu:
        model = await gpu.load(image_model())
        with pytest.raises(InvalidRequest, match=problem):
            await gpu.run(model, given)
        assert await buffers(gpu) == 0
        for _ in range(2):  # also where inputs are compared with those of the run before
            await gpu.run(model, image=np.zeros((1, 3, 8, 8), np.float32))
            with pytest.raises(InvalidRequest, match=problem):
                await gpu.run(model, given)


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


async def test_a_buffer_of_another_dtype_is_told_how_to_be_converted() -> None:
    async with spawn(device="cpu") as gpu:
        model = await gpu.load(scaled())
        x = await gpu.upload(np.ones((2, 3)))
        with pytest.raises(InvalidRequest) as raised:
            await gpu.run(model, x=x)
        assert raised.value.fix == (
            "upload it in that dtype: await gpu.upload((await gpu.download(x)).astype('float32'))"
        )
        x = await gpu.upload((await gpu.download(x)).astype("float32"))
        assert (await gpu.run(model, x=x))["y"].shape == (6, 1)
        await model.close()


async def test_an_input_or_a_model_that_was_never_awaited_is_told_so() -> None:
    async with spawn(device="cpu") as gpu:
        model = await gpu.load(image_model())
        forgotten: Any = gpu.upload(images(1))
        for inputs, field in (({"image": forgotten}, "image"), (forgotten, "inputs")):
            with pytest.raises(
                InvalidRequest, match=f"^{field}=coroutine: was never awaited; write {field} ="
            ):
                await gpu.run(model, inputs)
        await forgotten
        await model.close()


async def test_dims_with_one_name_must_agree() -> None:
    proto = model_of(
        [node("Add", "a b", "y")], {"a": (FLOAT, ["N"]), "b": (FLOAT, ["N"])}, {"y": (FLOAT, ["N"])}
    )
    async with spawn(device="cpu") as gpu:
        model = await gpu.load(proto)
        with pytest.raises(
            InvalidRequest,
            match=r"dim 0 is 1, not 3, as N is in other dims; give .* fits; dims with one name must",
        ):
            await gpu.run(model, {"a": np.zeros(3, np.float32), "b": np.zeros(1, np.float32)})


UPLOADED = (
    "image=float64: is not the dtype of the input, which is float32; "
    r"upload it in that dtype: await gpu.upload\(\(await gpu.download\(image\)\).astype\('float32'\)\)"
)


async def test_what_is_no_input_at_all_is_told_with_what_to_pass() -> None:
    async with spawn(device="cpu") as gpu:
        model, image = await gpu.load(image_model()), images(1)
        wrong: list[tuple[Any, dict[str, Any], str]] = [
            (image, {}, "inputs=ndarray: is not a mapping of names to arrays; name each: image"),
            ({"image": None}, {}, "image=None: is of type NoneType, not an array of numbers"),
            (
                {"image": [[1.0], [1.0, 2.0]]},
                {},
                "image=list: cannot be converted to an array: .*; pass rows",
            ),
            (
                {"image": image.tolist()},
                {},
                "image=list: is read as float64, and the input is float32; "
                r"convert it: numpy.asarray\(image, 'float32'\)",
            ),
            ({"image": image}, {"keep": "scores"}, "keep='scores': is not a sequence of names"),
            ({"image": image}, {"keep": ("score",)}, 'not an output of the model; did you mean "scores"?'),
        ]
        for inputs, options, told in wrong:
            with pytest.raises(InvalidRequest, match=told):
                await gpu.run(model, inputs, **options)
        ref = await gpu.upload(images(1).astype("f8"))
        with pytest.raises(InvalidRequest, match=UPLOADED):
            await gpu.run(model, {"image": ref})
        await gpu.free(ref)
        given: Any = model
        with pytest.raises(InvalidRequest, match=r"run it: await gpu\.run"):
            await gpu.apply(given)
        with pytest.raises(InvalidRequest, match=r"ask it: await model\.explain"):
            await gpu.explain(given)
        await model.close()


async def test_a_model_belongs_to_its_service_until_it_is_closed() -> None:
    async with spawn(device="cpu") as gpu, spawn(device="cpu") as other:
        model = await gpu.load(image_model())
        with pytest.raises(InvalidRequest, match="is not a model that this service loaded"):
            await other.run(model, {"image": images(1)})
        mistaken: Any = model
        with pytest.raises(InvalidRequest, match=r"run it: await gpu\.run\(model, inputs\)"):
            await gpu.ask(mistaken)
        await model.close()
        await model.close()
        with pytest.raises(InvalidRequest, match="is closed"):
            await gpu.run(model, {"image": images(1)})


@pytest.mark.parametrize("isolation", ["thread", "process"])
async def test_a_model_that_is_dropped_frees_its_weights_and_says_so(isolation: Isolation) -> None:
    async with spawn(device="cpu", isolation=isolation) as gpu:
        model = await gpu.load(image_model())
        await gpu.run(model, {"image": images(1)})
        cycle: list[Any] = [model]  # so that the collector finds it, on a thread of its choice
        cycle.append(cycle)
        assert await buffers(gpu) > 0
        del model, cycle
        with pytest.warns(ResourceWarning, match="unclosed <model: image: .*: use `await model.close"):
            await asyncio.to_thread(gc.collect)
        assert await buffers(gpu) == 0


async def test_a_model_that_is_closed_or_outlives_its_service_needs_no_warning() -> None:
    """Warnings are errors here, and the collector's are reported."""
    async with spawn(device="cpu") as gpu:
        loaded = [await gpu.load(image_model()) for _ in range(2)]
        for model in loaded:
            await gpu.run(model, {"image": images(1)})
        await loaded.pop().close()
    del loaded, model
    gc.collect()


async def test_a_service_that_has_stopped_loads_no_model() -> None:
    async with spawn(device="cpu") as gpu:
        pass
    with pytest.raises(ServiceStopped):
        await gpu.load(image_model())


async def test_a_run_that_fails_leaves_nothing() -> None:
    dims = (FLOAT, [3])
    proto = model_of([node("Add", "a b", "y")], {"a": dims, "b": dims}, {"y": dims})
    async with spawn(device="cpu") as gpu:
        model = await gpu.load(proto)
        x = np.ones(3, np.float32)
        ref = await gpu.upload(x)
        await gpu.free(ref)
        with pytest.raises(StaleBufferError):
            await gpu.run(model, {"a": x, "b": ref})
        assert await buffers(gpu) == 3  # the places of both inputs and the output
        await model.close()
        assert await buffers(gpu) == 0


async def test_all_nodes_that_cannot_be_run_are_named_before_anything_is_allocated() -> None:
    proto = image_model(1)
    proto.graph.node.extend(
        [
            node("Cast", "image", "bytes", to=onnx.TensorProto.UINT8),
            node("ImageDecoder", "bytes", "one", name="first"),
            node("Identity", "one", "two", name="behind"),
            node("ImageDecoder", "two", "three", name="second"),
        ]
    )
    async with spawn(device="cpu") as gpu:
        with pytest.raises(UnsupportedModel, match="2 nodes") as raised:
            await gpu.load(proto)
        assert [text.partition(":")[0] for text in raised.value.nodes] == [
            "node 'first' (ImageDecoder)",
            "node 'second' (ImageDecoder)",
        ]
        assert await buffers(gpu) == 0


@pytest.mark.parametrize("size", [4, "N"])
async def test_what_cannot_be_run_is_found_behind_what_cannot(size: int | str) -> None:
    """With fixed dims, what is refused for its attributes too; with others, what is whatever they are."""
    proto = model_of(
        [
            node("Bernoulli", "x", "b", name="bernoulli"),
            node("Unsqueeze", "b axes", "wide"),
            node("AveragePool", "wide", "pooled", name="pool", kernel_shape=[9]),
            node("RandomNormalLike", "b", "n", name="like"),
            node("RandomUniform", "", "u", name="uniform", shape=[4]),
            node("Cast", "n", "bytes", to=onnx.TensorProto.UINT8),
            node("ImageDecoder", "bytes", "i", name="image"),
            node("Add", "n u", "y", name="add"),
        ],
        {"x": (FLOAT, [size])},
        {"y": (FLOAT, [size])},
        {"axes": np.array([0, 1])},
    )
    async with spawn(device="cpu") as gpu:
        with pytest.raises(UnsupportedModel) as raised:
            await gpu.load(proto)
    named = dict(text.split(": ", 1) for text in raised.value.nodes)
    pool = named.pop("node 'pool' (AveragePool)", "")
    assert ("padded input has 4" in pool) == (size != "N")
    assert named == {
        "node 'bernoulli' (Bernoulli)": UNSEEDED,
        "node 'like' (RandomNormalLike)": UNSEEDED,
        "node 'uniform' (RandomUniform)": UNSEEDED,
        "node 'image' (ImageDecoder)": NO_WAY,
    }


async def test_the_explanation_names_the_nodes() -> None:
    async with spawn(device="cpu") as gpu:
        model = await gpu.load(image_model(1))
        text = str(await model.explain())
        assert "conv_fwd at node 'conv1' (Conv)" in text
        assert "matmul at node 'head' (Gemm)" in text
        await model.close()


def test_all_dims_that_need_a_size_are_named_as_a_caller_gives_them() -> None:
    features = [
        Feature(name="x", dtype=DType.FLOAT32, dims=("N", "a b", 3)),
        Feature(name="y", dtype=DType.FLOAT32, dims=("L", "N")),
    ]
    fix = r'give the size of N, a b, L: model\.explain\(N=8, L=8, \*\*\{"a b": 8\}\), or inputs$'
    with pytest.raises(InvalidRequest, match=fix):
        require_sizes_or_inputs(features, "model.explain")


async def test_an_explanation_needs_inputs_where_dims_or_values_are_open() -> None:
    async with spawn(device="cpu") as gpu:
        model = await gpu.load(image_model())
        with pytest.raises(InvalidRequest, match=r"give the size of N: model\.explain\(N=8\), or inputs$"):
            await model.explain()
        assert "conv_fwd" in str(await model.explain({"image": images(1)}))
        await model.close()
        shape = model_of(
            [node("Expand", "x shape", "y")],
            {"x": (FLOAT, [1]), "shape": (INT64, [1])},
            {"y": (FLOAT, [None])},
        )
        deciding = await gpu.load(shape)
        with pytest.raises(InvalidRequest, match="the values of shape are needed"):
            await deciding.explain()


async def test_a_model_that_is_closed_while_it_runs_finishes_the_run() -> None:
    proto, x = image_model(2), images(2)
    async with spawn(device="cpu") as gpu:
        model = await gpu.load(proto)
        running = asyncio.ensure_future(gpu.run(model, {"image": x}))
        await asyncio.sleep(0)
        await model.close()
        np.testing.assert_allclose(
            (await running)["scores"], expected(proto, image=x)[0], rtol=1e-4, atol=1e-5
        )
        assert await buffers(gpu) == 0


async def test_without_the_package_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith(("cudnn_actor.onnx", "onnx"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "onnx", None)
    async with spawn(device="cpu") as gpu:
        with pytest.raises(ImportError, match=r"models need the package onnx: pip install .*\[onnx\]"):
            await gpu.load("model.onnx")


async def test_a_model_takes_its_inputs_by_name_as_its_service_does() -> None:
    async with spawn(device="cpu") as gpu:
        model, image = await gpu.load(image_model()), images(1)
        by_name, given = await model.run(image=image), await gpu.run(model, {"image": image})
        np.testing.assert_array_equal(by_name["scores"], given["scores"])
        with pytest.raises(InvalidRequest, match="is given twice"):
            await model.run({"image": image}, image=image)
        await model.close()


async def test_a_batch_that_does_not_fit_into_memory_is_named_by_its_input() -> None:
    async with spawn(device="cpu", memory_limit=4 << 20) as gpu:
        model = await gpu.load(image_model())
        with pytest.raises(OutOfMemory, match=r"^out of memory: input 'image': 7,680,000 bytes requested"):
            await gpu.run(model, image=images(10_000))
        await model.close()


@pytest.mark.parametrize("when", ["load", "warm", "run"])
@pytest.mark.parametrize("other", [0, 2 << 20])
async def test_a_model_that_does_not_fit_says_how_many_bytes_of_how_many(when: str, other: int) -> None:
    """Those of all of its weights, though it ends with one of them, and none stays."""
    side, limit = 512, 4 << 20
    weights = {name: np.ones((side, side), np.float32) for name in "abc" + "de" * (not other)}
    for number, array in enumerate(weights.values()):
        array[0, 0] = number
    names = ["x", *weights]
    nodes = [node("MatMul", f"{x} {w}", w + "x" if w != names[-1] else "y") for x, w in _chain(names)]
    batch: Any = 1 if when == "load" else "N"
    proto = model_of(nodes, {"x": (FLOAT, [batch, side])}, {"y": (FLOAT, None)}, weights)
    nbytes = sum(array.nbytes for array in weights.values())
    said = rf"^out of memory: the model's weights: {nbytes:,} bytes requested"
    said += r", and memory_limit=4,194,304 allows" if not other else rf"; buffers take {other:,} bytes"
    async with spawn(device="cpu", memory_limit=limit) as gpu:
        kept = await gpu.upload(np.zeros(other, np.uint8)) if other else None
        with pytest.raises(OutOfMemory, match=said) as raised:
            async with await gpu.load(proto) as model:
                await (model.warm(N=1) if when == "warm" else model.run(x=np.ones((1, side), np.float32)))
        assert raised.value.requested == nbytes
        assert raised.value.retry_safe == bool(other)
        await gpu.drain()
        assert (await gpu.statistics()).live_bytes == other
        del kept


def _chain(names: list[str]) -> list[tuple[str, str]]:
    """Each name behind the value that the one before it gives."""
    return [(names[n - 1] + "x" * (n > 1), names[n]) for n in range(1, len(names))]


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

    def specialised(self, *given: Any) -> Any:
        assert self.may_end.wait(PATIENCE_S)
        return self._of.specialised(*given)


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


@pytest.mark.parametrize("isolation", ["thread", "process"])
@pytest.mark.parametrize("how", ["close", "drop"])
async def test_a_model_that_is_closed_takes_its_graphs_and_plans_with_it(isolation: str, how: str) -> None:
    earlier = {id(each): each for each in gc.get_objects() if isinstance(each, Graph)}  # of other tests
    async with spawn(device="cpu", isolation=isolation) as gpu:  # type: ignore[arg-type]
        model = await gpu.load(image_model())
        for count in range(1, 4):
            await gpu.run(model, {"image": images(count)})
        found = await gpu.statistics()
        assert found.plans.size == 3
        assert found.graphs.size == 3
        if how == "close":
            await model.close()
        else:
            held = [model]
            del model
            with pytest.warns(ResourceWarning, match="unclosed"):
                held.clear()
        await gpu.drain()
        found = await gpu.statistics()
        assert (found.plans.size, found.plans.nbytes) == (0, 0)
        assert (found.graphs.size, found.graphs.nbytes) == (0, 0)
        assert found.worker_graphs is None or (found.worker_graphs.size, found.worker_graphs.nbytes) == (0, 0)
        for thread in threading.enumerate():
            if thread.name == "specialised":  # its graph has been taken, and it need not have ended since
                await asyncio.to_thread(thread.join)
        gc.collect()
        left = [each for each in gc.get_objects() if isinstance(each, Graph)]
        assert [each for each in left if id(each) not in earlier] == []


@pytest.mark.parametrize("isolation", ["thread", "process"])
async def test_a_model_that_is_closed_takes_the_plans_of_graphs_with_it_that_it_had_dropped(
    isolation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "MOST_KEPT", 2)
    async with spawn(device="cpu", isolation=isolation) as gpu:  # type: ignore[arg-type]
        model = await gpu.load(image_model())
        for count in (1, 2, 3, 4, 1):
            await gpu.run(model, {"image": images(count)})
        found = await gpu.statistics()
        assert (found.plans.size, found.plans.misses) == (4, 4), "a plan stays longer than its graph"
        await model.close()
        await gpu.drain()
        assert (await gpu.statistics()).plans.size == 0


@pytest.mark.parametrize("isolation", ["thread", "process"])
async def test_a_model_leaves_what_another_one_with_the_same_graphs_needs(isolation: str) -> None:
    async with spawn(device="cpu", isolation=isolation) as gpu:  # type: ignore[arg-type]
        first, second = await gpu.load(image_model()), await gpu.load(image_model())
        for model in (first, second):
            await gpu.run(model, {"image": images(2)})
        await first.close()
        await gpu.run(second, {"image": images(2)})
        assert (await gpu.statistics()).plans.misses == 1
        await second.close()
        await gpu.drain()
        assert (await gpu.statistics()).plans.size == 0


async def test_a_model_that_is_closed_while_it_runs_is_taken_out_behind_its_last_run() -> None:
    async with spawn(device="cpu") as gpu:
        model = await gpu.load(image_model())
        runs = [asyncio.ensure_future(gpu.run(model, {"image": images(count)})) for count in (1, 2, 1)]
        while not kept_by(model).kept:  # noqa: ASYNC110 - the first run is on its way
            await asyncio.sleep(0)
        await model.close()
        await asyncio.gather(*runs, return_exceptions=True)
        await gpu.drain()
        found = await gpu.statistics()
        assert (found.plans.size, found.graphs.size, found.live_buffers) == (0, 0, 0)


async def test_the_graphs_of_a_model_take_no_more_than_the_limit() -> None:
    async with spawn(device="cpu", cache_limit=60_000) as gpu:
        model = await gpu.load(image_model())
        for count in range(1, 20):
            await gpu.run(model, {"image": images(count)})
            kept = [each.graph.footprint for each in kept_by(model).kept.values() if each.graph is not None]
            assert sum(kept) <= 60_000
        assert 1 < len(kept_by(model).kept) < 19
        await model.close()


async def test_a_sum_of_thousands_of_tensors_runs() -> None:
    names = " ".join(["x"] * 2000)
    model = model_of([node("Sum", names, "y")], {"x": (FLOAT, [4])}, {"y": (FLOAT, [4])})
    async with spawn(device="cpu", hang_after_s=10.0) as gpu:
        y = await gpu.run(await gpu.load(model), {"x": np.ones(4, np.float32)})
        np.testing.assert_array_equal(y["y"], 2000)
        assert gpu.generation == 1
