"""What notebooks and tracebacks show of the library's objects: one short line each."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from cudnn_actor import (
    BufferRef,
    ConvFwd,
    ConvSpec,
    DType,
    Epilogue,
    FaultPlan,
    Graph,
    GraphBuilder,
    Loop,
    Numerics,
    Options,
    Receipt,
    RunGraph,
    TensorSpec,
    blocking,
    spawn,
)
from cudnn_actor.broker.request_counts import Histogram, RequestCounts
from cudnn_actor.messages import Explain, Fill, ModelRef, PieceOfPlan, RunModel, Upload
from cudnn_actor.models import Feature
from cudnn_actor.protocol.types.short_repr import LONGEST
from cudnn_actor.supervision import ExitReason, Restarting, Started, Stopped

from ..inside import service_behind
from ..noted import noted
from ..onnx.small_models import image_model

X = BufferRef(slot=0, generation=1, spec=TensorSpec.packed((2, 3), "float32"), device="cpu")
TIMES = Histogram(bounds=(1.0, 2.0), counts=(1, 2, 0), sum=3.5)
MANY = 1_000


@functools.cache
def chain(length: int) -> Graph:
    g = GraphBuilder()
    y = g.input("x", (2, 3), "float32")
    for _ in range(length):
        y = g.relu(y)
    return g.build(y=y)


def builder(inputs: int) -> GraphBuilder:
    g = GraphBuilder()
    for number in range(inputs):
        g.input(f"input {number}", (2, 3))
    return g


def wide(inputs: int) -> Graph:
    g = builder(inputs)
    return g.build(y=g.relu(g.input("a name\nof two lines", (2, 3))))


def shown() -> list[tuple[object, str]]:
    """Objects, and what they are shown as."""
    return [
        (X, "<buffer 0.1 float32[2x3] NCHW on cpu>"),
        (ModelRef(number=3, service=1), "<model 3>"),
        (X.spec, "<float32[2x3] NCHW>"),
        (
            TensorSpec(dims=(2, 3), strides=(8, 1), dtype=DType.INT8, alignment=32),
            "<int8[2x3] STRIDED (8, 1), aligned to 32 bytes>",
        ),
        (builder(0), "<GraphBuilder with 0 operations>"),
        (
            builder(MANY),
            "<GraphBuilder with 0 operations: input 0: float32 (2, 3), input 1: float32 (2, 3) and 998 more>",
        ),
        (GraphBuilder().input("x" * 200, (2, 3)), f"<{'x' * 57}...: float32 (2, 3)>"),
        (chain(MANY), "<Graph of 1000 operations: x float32 (2, 3) -> y float32 (2, 3)>"),
        (wide(0), "<Graph of 1 operations: a name?of two... float32 (2, 3) -> y float32 (2, 3)>"),
        (
            wide(MANY),
            "<Graph of 1 operations: input 0 float32 (2, 3), input 1 float32 (2, 3) and 999 more "
            "-> y float32 (2, 3)>",
        ),
        (chain(MANY).body, "<OperationGraph of 1000 operations, 1001 tensors>"),
        (chain(1).inputs[0], "Port(name='x', spec=<float32[2x3] NCHW>, uid=0)"),
        (chain(1).body.operations[0], "Pointwise(mode='relu', operands=(0,), result=1)"),
        (
            Loop(body=chain(MANY), carried={"x": "y"}),
            "Loop(body=<Graph of 1000 operations: x float32 (2, 3) ...>, carried={'x': 'y'})",
        ),
        (
            RunGraph(graph=chain(MANY), buffers=(X, X)),
            "RunGraph(graph=<Graph of 1000 operations: x float32 (2, 3) ...>, buffers=<tuple of 2>)",
        ),
        (Explain(graph=chain(MANY).body), "Explain(graph=<OperationGraph of 1000 operations, 1001 ten...>)"),
        (
            ConvFwd(x=X, w=X, y=X, conv=ConvSpec.symmetric(2, pad=1)),
            "ConvFwd(x=<buffer 0.1 float32[2x3] NCHW on cpu>, w=<buffer 0.1 float32[2x3] NCHW on cpu>, ...)",
        ),
        (Fill(dst=X, value=0.5), "Fill(dst=<buffer 0.1 float32[2x3] NCHW on cpu>, value=0.5)"),
        (
            Upload(dst=X, data=np.ones((2, 3), np.float32)),
            "Upload(dst=<buffer 0.1 float32[2x3] NCHW on cpu>, data=ndarray of float32 (2, 3))",
        ),
        (
            RunModel(model=ModelRef(number=3, service=1), arrays={"x": np.ones((2, 3))}),
            "RunModel(model=<model 3>, arrays={'x': ndarray of float64 (2, 3)})",
        ),
        (
            RunModel(model=ModelRef(number=3, service=1), buffers={str(n): X for n in range(MANY)}),
            "RunModel(model=<model 3>, buffers=<dict of 1000>)",
        ),
        (
            Receipt(
                request_id=4, generation=1, plan="cpu/relu/12345678", queue_us=21.8634, run_us=5991.657123
            ),
            "Receipt(request_id=4, generation=1, plan='cpu/relu/12345678', queue_us=21.8634, run_us=5991.66)",
        ),
        (
            PieceOfPlan(operations=tuple(range(MANY)), labels=("relu",) * MANY, steps=("NumPy",), plan="a"),
            "PieceOfPlan(operations=<tuple of 1000>, labels=<tuple of 1000>, steps=('NumPy',), plan='a')",
        ),
        (
            Started(child="g", generation=1, at=1764213432.25),
            "Started(child='g', generation=1, at=1764213432.2)",
        ),
        (
            Restarting(
                child="gpu",
                generation=1,
                cause=ExitReason.crash("lost\n" * 99),
                delay_s=0.1,
                attempt=1,
                service="a",
            ),
            r"Restarting(child='gpu', generation=1, "
            r"cause=ExitReason(kind='crash', cause='lost\nlost\n...), ...)",
        ),
        (
            Stopped(child=None, reason=ExitReason.normal()),
            "Stopped(child=None, reason=ExitReason(kind='normal'))",
        ),
        (
            ConvSpec.symmetric(2),
            "ConvSpec(pre_padding=(0, 0), post_padding=(0, 0), stride=(1, 1), dilation=(1, 1))",
        ),
        (Epilogue(), "Epilogue()"),
        (Numerics(tf32=True), "Numerics(tf32=True)"),
        (Options(device="cpu", name="x" * 90), f"Options(name='{'x' * 44}..., device='cpu')"),
        (FaultPlan(seed=3), "FaultPlan(seed=3)"),
        (Feature(name="x", dtype=DType.INT8, dims=("N", 3)), "<Feature x: int8 (N, 3)>"),
        (TIMES, "<Histogram of 3: mean 1.17, p99 2>"),
        (
            RequestCounts(
                operation="P",
                model=None,
                failed=0,
                queue=TIMES,
                run=TIMES,
                total=TIMES,
                uploaded_bytes=0,
                downloaded_bytes=0,
            ),
            "RequestCounts(operation='P', model=None, failed=0, "
            "queue=<Histogram of 3: mean 1.17, p99 2>, ...)",
        ),
    ]


def test_a_repr_is_one_short_line() -> None:
    for of, text in shown():
        with noted(text):
            assert repr(of) == text
            assert len(text) <= LONGEST + 10


async def test_what_a_service_answers_is_shown_in_a_line() -> None:
    async with spawn(device="cpu", isolation="thread", onnx_runtime=False) as gpu:
        explained = await gpu.explain(chain(100))
        plan = explained.plan.rpartition("/")[2]
        assert (
            repr(explained) == f"<Explanation of cpu/pointwise/{plan}: 100 operations in 2 pieces, 2 steps>"
        )
        assert repr(await gpu.statistics()).startswith("Statistics(generation=1, queued=0, finished=")
        assert repr(gpu.health()).startswith("Health(state='ready', generation=1, working=")
        assert repr(gpu.metrics()).startswith("Metrics(service='cudnn', device='cpu', state='ready', ")
        assert len(repr(await gpu.statistics())) <= LONGEST


async def test_a_handle_says_when_it_has_ended() -> None:
    async with spawn(device="cpu", isolation="thread", name="a") as gpu:
        handles: list[Any] = [gpu, service_behind(gpu)]
        assert list(map(repr, handles)) == ["<CudnnRef 'a' on cpu>", "<CudnnService 'a' on cpu: ready>"]
        async with gpu.scope() as scope:
            await scope.upload(np.ones(3))
            assert repr(scope) == "<Scope on 'a': owns 1>"
        assert repr(scope) == "<Scope on 'a': ended>"
        model = await gpu.load(image_model())
        async with gpu.batched(model, max_batch=1) as endpoint:
            assert repr(endpoint).startswith("<batched to 1 along N: <model: image: float32 (N, 3, 8, 8) -> ")
        assert repr(endpoint).startswith("<closed, batched to 1 along N: ")
        await model.close()
        assert repr(model).startswith("<closed model: image: float32 (N, 3, 8, 8) -> ")
    assert list(map(repr, handles)) == [
        "<CudnnRef 'a' on cpu: stopped>",
        "<CudnnService 'a' on cpu: stopped>",
    ]


def test_a_blocking_handle_says_when_it_has_ended() -> None:
    with blocking.spawn(device="cpu", isolation="thread", name="a") as gpu:
        assert repr(gpu) == "<BlockingRef 'a' on cpu>"
        with gpu.scope() as scope:
            assert repr(scope) == "<BlockingScope on 'a': owns 0>"
        assert repr(scope) == "<BlockingScope on 'a': ended>"
    assert repr(gpu) == "<BlockingRef 'a' on cpu: stopped>"
