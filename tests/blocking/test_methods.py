"""Each method of the blocking client has the parameters and the result of the one for asyncio."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any, assert_type

import numpy as np
import pytest

from cudnn_actor import (
    BatchedModel,
    BufferRef,
    CudnnRef,
    Explanation,
    GraphBuilder,
    InvalidRequest,
    Model,
    Receipt,
    Scope,
    StaleBufferError,
    Statistics,
    TensorSpec,
)
from cudnn_actor.blocking import (
    BlockingBatchedModel,
    BlockingModel,
    BlockingRef,
    BlockingScope,
    spawn,
)
from cudnn_actor.messages import Allocate, Ping
from cudnn_actor.models import Feature
from cudnn_actor.operations import MaxPool, Pointwise, PointwiseMode, Window
from cudnn_actor.supervision import LifecycleEvent, Started, Stopped

from ..onnx.small_models import image_model

X = np.arange(2 * 3 * 4 * 4, dtype=np.float32).reshape(2, 3, 4, 4)
WINDOW = Window.symmetric(2, size=2)
LARGEST = X[:, :, 1::2, 1::2]
IMAGE = np.ones((1, 3, 8, 8), np.float32)
OTHER_NAMES = {"aclose": "close"}
INTERNAL = {
    Model: {
        *("belongs_to", "end", "lend", "prepare", "replace_by", "replaceable_by", "reserve"),
        *("run_checked", "validated_inputs", "warm_for"),
    },
    Scope: {"is_of"},
}
"""What the service's own code calls."""


@pytest.fixture
def gpu() -> Iterator[BlockingRef]:
    with spawn(device="cpu") as gpu:
        yield gpu


def live(gpu: BlockingRef) -> int:
    gpu.drain()
    return gpu.statistics().live_buffers


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (CudnnRef, BlockingRef),
        (Scope, BlockingScope),
        (Model, BlockingModel),
        (BatchedModel, BlockingBatchedModel),
    ],
)
def test_it_has_each_public_method_with_the_same_parameters(one: type, other: type) -> None:
    for name in set(dir(one)) - INTERNAL.get(one, set()):
        if name.startswith("_") and name != "__call__":
            continue
        theirs, ours = getattr(one, name), getattr(other, OTHER_NAMES.get(name, name))
        assert isinstance(ours, property) == isinstance(theirs, property), name
        if not isinstance(ours, property):
            assert not inspect.iscoroutinefunction(ours), name
            assert _parameters(ours) == _parameters(theirs), name
            assert ours.__doc__, name


def _parameters(method: Any) -> list[tuple[str, Any, Any]]:
    found = inspect.signature(method).parameters.values()
    return [(each.name, each.kind, each.default) for each in found if each.name != "self"]


def test_types_are_those_of_the_methods_for_asyncio(gpu: BlockingRef) -> None:
    """mypy checks this function, as all of these tests."""
    x = assert_type(gpu.upload(X, layout="NHWC", dtype="float32", timeout=60), BufferRef)
    y = assert_type(gpu.empty((2, 3, 2, 2)), BufferRef)
    assert_type(gpu.ask(MaxPool(x=x, y=y, window=WINDOW)), Receipt)
    assert_type(gpu.ask(Ping()), int)
    assert_type(gpu.submit(MaxPool(x=x, y=y, window=WINDOW)), Future[Receipt])
    future = assert_type(gpu.submit(Allocate(spec=y.spec)), Future[BufferRef])
    np.testing.assert_array_equal(assert_type(gpu.download(y), np.ndarray), LARGEST)
    copied = future.result()
    assert_type(gpu.copy(y, copied), Receipt)
    assert_type(gpu.fill(y, 1), Receipt)
    assert_type(gpu.statistics(), Statistics)
    assert_type(gpu.warm([MaxPool(x=x, y=y, window=WINDOW)]), int)
    assert_type(gpu.explain(MaxPool(x=x, y=y, window=WINDOW)), Explanation)
    assert_type(gpu.device, str)
    with pytest.raises(TypeError):
        gpu.upload()  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"^BlockingRef.upload\(\) has no argument .layuot.; did you mean"):
        gpu.upload(X, layuot="NHWC")  # type: ignore[call-arg]
    with pytest.raises(InvalidRequest):
        gpu.empty("few")  # type: ignore[arg-type]
    for each in (x, y, copied):
        gpu.free(each)


def test_operations_and_graphs_are_applied(gpu: BlockingRef) -> None:
    with gpu.scope() as scope:
        x = assert_type(scope.upload(X), BufferRef)
        pooled, index = scope.apply(MaxPool(x=x, window=WINDOW), also=("index",))
        np.testing.assert_array_equal(scope.download(pooled), LARGEST)
        g = GraphBuilder()
        graph = g.build(y=g.relu(g.input("x", X.shape) - 5.0))
        y = scope.keep(scope.apply(graph, x=x))
        gpu.tell(Pointwise(mode=PointwiseMode.ABS, operands=(x,), result=y))
        scope.submit(Allocate(spec=TensorSpec.packed((3,))))
    np.testing.assert_array_equal(gpu.download(y), X)
    with pytest.raises(StaleBufferError):
        gpu.download(index)
    with pytest.raises(InvalidRequest, match="has ended"):
        scope.upload(X)
    gpu.free(y)
    assert live(gpu) == 0


def test_models_are_loaded_run_warmed_written_and_replaced(gpu: BlockingRef) -> None:
    with assert_type(gpu.load(image_model(), swappable=True), BlockingModel) as model:
        assert assert_type(model.inputs, tuple[Feature, ...])[0].name == "image"
        assert assert_type(model.warm(N=1), int) > 0
        scores = gpu.run(model, image=IMAGE)["scores"]
        kept = model.run(image=IMAGE, keep=("scores",))["scores"]
        np.testing.assert_array_equal(gpu.download(kept), scores)
        gpu.free(kept)
        assert_type(model.explain(N=1), Explanation)
        name, spec = next(iter(model.weights.items()))
        model.write({name: np.zeros(spec.dims, spec.dtype.numpy)})
        assert not np.array_equal(model.run(image=IMAGE)["scores"], scores)
        assert gpu.load(image_model(), replace=model) is model
        np.testing.assert_array_equal(model.run({"image": IMAGE})["scores"], scores)
    with pytest.raises(InvalidRequest):
        gpu.run(IMAGE, image=IMAGE)  # type: ignore[arg-type]
    with gpu.scope() as scope:
        of_scope = scope.load(image_model())
        kept_model = scope.keep(scope.load(image_model()))
        gpu.free(of_scope.run(image=IMAGE, keep=("scores",))["scores"])
        scope.run(of_scope, image=IMAGE, keep=("scores",))
    with pytest.raises(InvalidRequest, match="closed"):
        of_scope.run(image=IMAGE)
    with kept_model:
        assert kept_model.run(image=IMAGE)
    assert live(gpu) == 0


def test_events_are_those_since_the_start_to_the_end() -> None:
    with spawn(device="cpu") as gpu:
        events = assert_type(gpu.events(), Iterator[LifecycleEvent])
        assert isinstance(next(events), Started)
        early = gpu.events()
        next(early)
    assert isinstance([*early][-1], Stopped)
    assert isinstance([*gpu.events()][-1], Stopped)
    assert not gpu.alive
