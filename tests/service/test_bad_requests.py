"""A request that cannot mean anything gets an error that names field, value and fix, and harms nothing."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import numpy as np
import pykka
import pytest

from cudnn_actor import (
    BufferRef,
    ConvBwdData,
    ConvFwd,
    ConvSpec,
    CudnnRef,
    DType,
    Graph,
    GraphBuilder,
    InvalidRequest,
    OutOfMemory,
    Receipt,
    RunGraph,
    StaleBufferError,
    TensorSpec,
    UnsupportedGraph,
)
from cudnn_actor.engines.cpu import CpuEngine
from cudnn_actor.errors import ReentrantAsk, StaleReason
from cudnn_actor.messages import Allocate, Copy, Download, Fill, Free, Upload, Warm

from .cases import all_cases
from .rigs import ONE_BY_ONE, THREAD_ONLY, Trio, in_thread, single, spawn, spawn_on

pytestmark = pytest.mark.usefixtures("isolation")

ARRAY = np.ones((1, 1, 1, 1), np.float32)


class Operands:
    """Buffers for requests that are wrong in one place."""

    x: BufferRef  # (2, 4, 6, 6)
    w: BufferRef  # (8, 4, 3, 3)
    y: BufferRef  # (2, 8, 4, 4)
    wide: BufferRef  # as x, float64
    bias: BufferRef  # (8,)

    @classmethod
    async def on(cls, gpu: CudnnRef) -> Operands:
        self = cls()
        self.x = await gpu.upload(np.ones((2, 4, 6, 6), np.float32))
        self.w = await gpu.upload(np.ones((8, 4, 3, 3), np.float32))
        self.y = await gpu.upload(np.zeros((2, 8, 4, 4), np.float32))
        self.wide = await gpu.upload(np.ones((2, 4, 6, 6)))
        self.bias = await gpu.upload(np.zeros(8, np.float32))
        return self

    def conv(self, **fields: Any) -> ConvFwd:
        return ConvFwd(**{"x": self.x, "w": self.w, "y": self.y, "conv": ONE_BY_ONE, **fields})


# (the request, the field to blame, what the text must show of its value). Other shapes: test_validation.py.
BAD_COMPUTE: dict[str, tuple[Callable[[Operands], Any], str, str]] = {
    "output dims": (lambda o: o.conv(y=o.x), "y", "(2, 4, 6, 6)"),
    "infinite alpha": (lambda o: o.conv(alpha=float("inf")), "alpha", "inf"),
    "None for y": (lambda o: o.conv(y=None), "y", "None"),
    "backward dims": (lambda o: ConvBwdData(dy=o.y, w=o.w, dx=o.y, conv=ONE_BY_ONE), "w", "(8, 4, 3, 3)"),
    "dims in warm": (lambda o: Warm(messages=(o.conv(), o.conv(y=o.x))), "y", "(2, 4, 6, 6)"),
    "no request in warm": (lambda o: Warm(messages=(o.conv(), Free(buffer=o.x))), "messages", "Free"),  # type: ignore[arg-type]
    "no tuple in warm": (lambda o: Warm(messages=o.conv()), "messages", "ConvFwd"),  # type: ignore[arg-type]
}
BAD_MEMORY: dict[str, tuple[Callable[[Operands], Any], str, str]] = {
    "array for src": (lambda o: Download(src=ARRAY), "src", "array"),  # type: ignore[arg-type]
    "None for dst": (lambda o: Fill(dst=None, value=1), "dst", "None"),  # type: ignore[arg-type]
    "number for buffer": (lambda o: Free(buffer=3), "buffer", "3"),  # type: ignore[arg-type]
    "text to fill": (lambda o: Fill(dst=o.x, value="1"), "value", "1"),  # type: ignore[arg-type]
    "bool to fill": (lambda o: Fill(dst=o.x, value=True), "value", "True"),
    "past 64 bits": (lambda o: Fill(dst=o.x, value=10**30), "value", "10000"),
    "list to upload": (lambda o: Upload(dst=o.x, data=[1.0]), "data", "1.0"),  # type: ignore[arg-type]
    "dims to upload": (lambda o: Upload(dst=o.x, data=ARRAY), "data", "(1, 1, 1, 1)"),
    "objects to upload": (lambda o: Upload(dst=o.x, data=np.full((2, 4, 6, 6), None)), "data", "object"),
    "texts to upload": (lambda o: Upload(dst=o.x, data=np.full((2, 4, 6, 6), "a")), "data", "<U1"),
    "copy to itself": (lambda o: Copy(src=o.x, dst=o.x), "dst", "2x4x6x6"),
    "copy of other dims": (lambda o: Copy(src=o.x, dst=o.y), "dst", "2x8x4x4"),
    "copy of other dtype": (lambda o: Copy(src=o.x, dst=o.wide), "dst", "float64"),
    "no spec": (lambda o: Allocate(spec=(1, 1)), "spec", "(1, 1)"),  # type: ignore[arg-type]
    "data of other dims": (
        lambda o: Allocate(spec=TensorSpec.packed((1, 1, 2)), data=ARRAY),
        "data",
        "(1, 1, 1, 1)",
    ),
    "no message": (lambda o: "ConvFwd", "message", "str"),
    "a class": (lambda o: Free, "message", "Free"),
}
WAYS: dict[str, Callable[[CudnnRef, Any], Awaitable[Any]]] = {
    "ask": lambda gpu, message: gpu.ask(message),
    "submit": lambda gpu, message: gpu.submit(message),
    "pykka": lambda gpu, message: in_thread(lambda: gpu.actor_ref.ask(message)),
}
BAD = BAD_COMPUTE | BAD_MEMORY


async def test_a_bad_request_is_named_and_harms_nothing() -> None:
    async with spawn(device="cpu") as gpu:
        operands = await Operands.on(gpu)
        with all_cases() as case:
            for (name, (make, field, shown)), way in itertools.product(BAD.items(), WAYS):
                with case(f"{name}, by {way}"):
                    with pytest.raises(InvalidRequest) as caught:
                        await WAYS[way](gpu, make(operands))
                    assert caught.value.field == field
                    assert shown in caught.value.value
                    assert caught.value.fix
                    for part in (caught.value.value, caught.value.fix):
                        assert part in str(caught.value)
                    assert (await gpu.statistics()).live_buffers == 5
                    y = await gpu.conv_fwd(operands.x, operands.w, conv=ONE_BY_ONE)
                    assert (await gpu.download(y)).max() == 36
                    await gpu.free(y)


async def test_an_output_that_is_an_operand_is_refused_where_it_is_sent() -> None:
    async with spawn(device="cpu") as gpu:
        trio = await Trio.on(gpu)
        wrong = trio.product(y=trio.x)
        for send in (gpu.submit, gpu.tell):
            with pytest.raises(InvalidRequest, match="is also x"):
                send(wrong)
        assert (await gpu.download(trio.x)).item() == 3.0


@pytest.mark.pairwise
@pytest.mark.parametrize("field", ["x", "w", "bias"])
@pytest.mark.parametrize("beta", [0.0, 1.0])
async def test_an_output_that_is_an_input_too_is_refused(field: str, beta: float) -> None:
    async with spawn(device="cpu") as gpu:
        buffer = await gpu.upload(single(2))
        vector = await gpu.upload(single(2))
        fields = {"x": vector, "w": vector, "y": buffer, "bias": vector, field: buffer}
        with pytest.raises(InvalidRequest, match=f"is also {field}") as caught:
            await gpu.ask(ConvFwd(**fields, conv=ONE_BY_ONE, beta=beta))  # type: ignore[arg-type]
        assert (caught.value.field, caught.value.value) == ("y", str(buffer))
        assert "buffer of its own" in caught.value.fix
        assert (await gpu.download(buffer)).item() == 2


async def test_one_buffer_may_be_both_inputs() -> None:
    async with spawn(device="cpu") as gpu:
        x = await gpu.upload(single(3))
        y = await gpu.conv_fwd(x, x, conv=ONE_BY_ONE)
        assert (await gpu.download(y)).item() == 9


async def test_arrays_are_refused_where_dims_are_worked_out_from_references() -> None:
    async with spawn(device="cpu") as gpu:
        x = await gpu.upload(ARRAY)
        calls: dict[str, Callable[[], Any]] = {
            "x": lambda: gpu.conv_fwd(ARRAY, x, conv=ONE_BY_ONE),  # type: ignore[arg-type]
            "w": lambda: gpu.conv_bwd_data(x, ARRAY, conv=ONE_BY_ONE),  # type: ignore[arg-type]
            "dy": lambda: gpu.conv_bwd_filter(x, ARRAY, conv=ONE_BY_ONE, dims=(1, 1, 1, 1)),  # type: ignore[arg-type]
            "conv": lambda: gpu.conv_fwd(x, x, conv=2),  # type: ignore[arg-type]
            "dims": lambda: gpu.conv_bwd_filter(x, x, conv=ONE_BY_ONE, dims=3),  # type: ignore[arg-type]
        }
        for field, call in calls.items():
            with pytest.raises(InvalidRequest) as caught:
                await call()
            assert caught.value.field == field
        await gpu.drain()
        assert (await gpu.statistics()).live_buffers == 1


async def test_a_gradient_that_is_given_a_tensor_for_its_dims_is_told_so() -> None:
    async with spawn(device="cpu") as gpu:
        x = await gpu.upload(ARRAY)
        send: Any = gpu
        with pytest.raises(
            InvalidRequest, match=r"^dims=<buffer .*; give dims=x\.dims, where x is the tensor$"
        ):
            await send.conv_bwd_filter(x, x, conv=ONE_BY_ONE, dims=x)
        with pytest.raises(
            InvalidRequest, match=r"^dims=<buffer .*; give dims=x\.dims, where x is the tensor$"
        ):
            await send.conv_bwd_data(x, x, conv=ONE_BY_ONE, dims=x)
        with pytest.raises(
            TypeError, match=r"^CudnnRef\.conv_bwd_filter\(\) has no argument 'w'; use dims; it has"
        ):
            await send.conv_bwd_filter(x, x, w=x, conv=ONE_BY_ONE)
        with pytest.raises(
            TypeError, match=r"^CudnnRef\.conv_bwd_data\(\) has no argument 'x'; use dims; it has"
        ):
            await send.conv_bwd_data(x, x, x=x, conv=ONE_BY_ONE)
        with pytest.raises(
            TypeError, match=r"^CudnnRef\.conv_bwd_filter\(\) takes x, dy by position, and by"
        ):
            await send.conv_bwd_filter(x, x, x)


async def test_arguments_by_other_libraries_names_are_told_ours() -> None:
    async with spawn(device="cpu") as gpu:
        send: Any = gpu
        with pytest.raises(
            TypeError, match=r"^CudnnRef\.upload\(\) has no argument 'data'; use array; it has"
        ):
            await send.upload(data=ARRAY)
        with pytest.raises(
            TypeError, match=r"^CudnnRef\.empty\(\) has no argument 'shape'; use dims; it has"
        ):
            await send.empty(shape=(1,))
        x = await gpu.upload(ARRAY)
        with pytest.raises(
            TypeError, match=r"^CudnnRef\.conv_fwd\(\) has no argument 'padding'; use pad; it"
        ):
            await send.conv_fwd(x, x, padding=1)


def doubled() -> Graph:
    g = GraphBuilder()
    return g.build(y=2 * g.input("x", (2,)))


@pytest.mark.parametrize(
    ("graph", "buffers", "text"),
    [
        (3, (), "graph=int: is no graph"),
        (None, (), "graph=NoneType: is no graph"),
        (doubled(), 3, "buffers=3: is not a tuple of buffers"),
        (doubled(), (), "buffers=0 buffers: are not one for each of the 2 ports"),
    ],
)
async def test_fields_of_a_graph_message_that_do_not_fit_are_named(
    graph: Any, buffers: Any, text: str
) -> None:
    async with spawn(device="cpu", isolation="thread") as gpu:
        with pytest.raises(InvalidRequest, match=re.escape(text)):
            await gpu.ask(RunGraph(graph=graph, buffers=buffers))


async def test_arrays_of_the_other_byte_order_have_the_dtype_that_they_have() -> None:
    async with spawn(device="cpu", isolation="thread") as gpu:
        ref = await gpu.upload(np.arange(3, dtype=">f4"))
        assert ref.spec.dtype == "float32"
        np.testing.assert_array_equal(await gpu.download(ref), [0, 1, 2])


async def test_a_freed_buffer_is_stale_also_to_a_second_free() -> None:
    async with spawn(device="cpu") as gpu:
        trio = await Trio.on(gpu)
        await gpu.free(trio.x)
        for message in (trio.product(), Free(buffer=trio.x), Download(src=trio.x), Fill(dst=trio.x, value=1)):
            with pytest.raises(
                StaleBufferError, match=r"\(freed\): nothing can use it after its free; "
            ) as caught:
                await gpu.ask(message)
            assert (caught.value.slot, caught.value.generation) == (trio.x.slot, trio.x.generation)
            assert caught.value.reason is StaleReason.FREED
        assert (await gpu.statistics()).live_buffers == 2


async def test_a_request_behind_the_free_of_its_buffer_is_stale_when_it_is_taken_up() -> None:
    async with spawn(device="cpu") as gpu:
        trio = await Trio.on(gpu)
        # All three mostly pass the check at sending: the buffer is live until the first has been handled.
        free = gpu.submit(Free(buffer=trio.x))
        late = [
            asyncio.ensure_future(send(gpu, message)) for message in (trio.product(), Free(buffer=trio.x))
        ]
        for future in late:
            with pytest.raises(StaleBufferError, match="freed"):
                await future
        await free
        assert await trio.result() == 1


async def send(gpu: CudnnRef, message: Any) -> Any:
    return await gpu.submit(message)


async def test_a_reference_of_another_service_is_foreign() -> None:
    async with spawn(device="cpu") as gpu, spawn(device="cpu") as other:
        mine, theirs = await gpu.upload(single(1)), await other.upload(single(2))
        for message in (Download(src=theirs), Free(buffer=theirs), Copy(src=theirs, dst=mine)):
            with pytest.raises(StaleBufferError, match="another service created it") as caught:
                await gpu.ask(message)
            assert caught.value.reason is StaleReason.FOREIGN
        assert (await gpu.download(mine)).item() == 1
        assert (await other.download(theirs)).item() == 2


async def test_a_changed_reference_is_refused() -> None:
    async with spawn(device="cpu") as gpu:
        ref = await gpu.upload(np.ones((1, 1, 2, 2), np.float32))
        larger = BufferRef(
            slot=ref.slot,
            generation=ref.generation,
            spec=TensorSpec.packed((1, 1, 999, 999)),
            device=ref.device,
        )
        with pytest.raises(InvalidRequest, match="as the service returned it") as caught:
            await gpu.download(larger)
        assert caught.value.field == "src.spec"


@pytest.mark.parametrize("timeout", [-1, float("nan")])
async def test_a_timeout_that_is_no_time_is_refused(timeout: float) -> None:
    async with spawn(device="cpu") as gpu:
        with pytest.raises(InvalidRequest, match="use None to wait forever") as caught:
            await gpu.ask(Free(buffer=await gpu.upload(single(1))), timeout=timeout)
        assert caught.value.field == "timeout"
        assert (await gpu.statistics()).live_buffers == 1


async def test_an_allocation_that_nobody_would_receive_is_refused(logs: list[dict[str, Any]]) -> None:
    async with spawn(device="cpu") as gpu:
        gpu.tell(Allocate(spec=TensorSpec.packed((1, 1, 1, 1))))
        gpu.actor_ref.tell(Allocate(spec=TensorSpec.packed((1, 1, 1, 1)), data=ARRAY))
        await gpu.drain()
        assert (await gpu.statistics()).live_buffers == 0
    assert [entry["event"] for entry in logs].count("actor.tell_failed") == 2


async def test_memory_that_is_not_there_is_out_of_memory_and_the_rest_stays() -> None:
    async with spawn(device="cpu", memory_limit=4 << 20) as gpu:
        kept = await gpu.upload(single(5))
        with pytest.raises(MemoryError, match="raise memory_limit"):
            await gpu.empty((1, 1, 1 << 11, 1 << 11))
        assert (await gpu.statistics()).live_buffers == 1
        assert (await gpu.download(kept)).item() == 5
        await gpu.free(kept)
        await gpu.empty((1, 1, 1 << 10, 1 << 10))


class AskingEngine(CpuEngine):
    """Asks its own actor, on the actor's own thread: what a careless plug-in would do."""

    ref: pykka.ActorRef[Any]

    def fill(self, dst: np.ndarray, value: float) -> None:
        self.ref.ask(Download(src=None))  # type: ignore[arg-type]


@THREAD_ONLY
async def test_asking_an_actor_from_inside_itself_is_refused() -> None:
    engine = AskingEngine()
    async with spawn_on(lambda: engine) as gpu:
        engine.ref = gpu.actor_ref
        buffer = await gpu.upload(single(1))
        with pytest.raises(ReentrantAsk, match="actor's own thread") as caught:
            await gpu.fill(buffer, 2)
        assert (caught.value.field, caught.value.value) == ("ask", "Download")
        assert "tell()" in caught.value.fix
        assert (await gpu.download(buffer)).item() == 1
        assert (await gpu.statistics()).live_buffers == 1


@pytest.mark.parametrize("alpha", [float("nan"), float("inf"), "2", None, 10**30], ids=str)
async def test_a_bad_scalar_is_refused_also_where_its_shapes_are_known_already(alpha: Any) -> None:
    async with spawn(device="cpu") as gpu:
        trio = await Trio.on(gpu)
        good = ConvFwd(x=trio.x, w=trio.w, y=trio.y, conv=ConvSpec.symmetric(2), alpha=2.0)
        await gpu.ask(good)
        with pytest.raises(InvalidRequest, match="alpha"):
            await gpu.ask(msgspec.structs.replace(good, alpha=alpha))
        assert isinstance(await gpu.ask(good), Receipt)


@pytest.mark.parametrize("messages", [None, 3])
async def test_what_is_no_sequence_cannot_be_warmed(messages: Any) -> None:
    async with spawn(device="cpu") as gpu:
        with pytest.raises(InvalidRequest, match=r"messages=\w+: has no plan") as caught:
            await gpu.warm(messages)
        assert caught.value.field == "messages"


@pytest.mark.parametrize(("given", "shown"), [("photo.png", "array='photo.png'"), (None, "array=None")])
async def test_an_upload_of_no_array_is_told_what_was_given(given: Any, shown: str) -> None:
    async with spawn(device="cpu") as gpu:
        with pytest.raises(
            InvalidRequest, match=f"^{shown}: is of type {type(given).__name__}, not an array"
        ):
            await gpu.upload(given)


async def test_a_workspace_past_all_addresses_is_memory_that_is_not_there() -> None:
    g = GraphBuilder()
    x = g.input("x", (1, 1, 2, 2, 2))
    wide = (2_750_000, 2_750_000)
    padded = g.pad(x, [(0, 0), (0, 0), wide, wide, (0, 0)])  # more than 2**47 bytes, the limit is 2**48
    graph = g.build(y=g.sum(padded, axis=(2, 3)))
    async with spawn(device="cpu") as gpu:
        buffers = {
            "x": await gpu.upload(np.ones((1, 1, 2, 2, 2), np.float32)),
            "y": await gpu.empty((1, 1, 2)),
        }
        before = (await gpu.statistics()).live_buffers
        with pytest.raises(OutOfMemory):
            await gpu.ask(RunGraph.bind(graph, buffers))
        await gpu.drain()
        assert (await gpu.statistics()).live_buffers == before
        assert gpu.generation == 1


async def test_a_convolution_is_computed_however_far_its_taps_lie_apart() -> None:
    far, ones = (1 << 31) - 1, (1, 1, 1)
    conv = ConvSpec(pre_padding=(0, 0, 0), post_padding=(far - 1,) * 3, stride=ones, dilation=(far,) * 3)
    async with spawn(device="cpu") as gpu:
        x = await gpu.upload(np.arange(8, dtype=np.float32).reshape(1, 1, 2, 2, 2) + 1)
        y = await gpu.conv_fwd(x, x, conv=conv)
        assert (await gpu.download(y)).tolist() == [[[[[1.0]]]]], "only the first tap meets an element"


CONVOLUTIONS: dict[str, Callable[[Any, BufferRef, dict[str, Any]], Awaitable[BufferRef]]] = {
    "conv_fwd": lambda gpu, x, more: gpu.conv_fwd(x, x, **more),
    "conv_bwd_data": lambda gpu, x, more: gpu.conv_bwd_data(x, x, **more),
    "conv_bwd_filter": lambda gpu, x, more: gpu.conv_bwd_filter(x, x, dims=(1, 1, 1, 1), **more),
}


@pytest.mark.parametrize("kind", CONVOLUTIONS)
async def test_a_convolution_names_the_operand_whose_dtype_it_does_not_take_and_those_that_run(
    kind: str,
) -> None:
    first = "dy" if kind == "conv_bwd_data" else "x"
    said = f"{first}={{}}: is not a dtype that {kind} takes; convert both operands to one of "
    run = CONVOLUTIONS[kind]
    taken: set[str] = set()
    proposed: set[frozenset[str]] = set()
    async with spawn(device="cpu") as gpu:
        for dtype in DType:
            operand = await gpu.empty((1, 1, 1, 1), dtype=dtype)
            options: list[dict[str, Any]] = [{}, {"dtype": dtype}] if kind == "conv_fwd" else [{}]
            for more in options:
                try:
                    await run(gpu, operand, more)
                    taken.add(str(dtype))
                except (InvalidRequest, UnsupportedGraph) as error:
                    _, found, listed = str(error).partition(said.format(dtype))
                    proposed.add(frozenset([found[:2], *re.split(", as in |; ", listed)[0].split(", ")]))
                    # int8 and uint8, which only the forward one takes, make a graph that no engine runs
                    assert isinstance(error, UnsupportedGraph) == (dtype in (DType.INT8, DType.UINT8))  # noqa: PT017
    assert proposed == {frozenset([said[:2], *taken])}


@pytest.mark.pairwise
@pytest.mark.parametrize(
    ("dims", "said"),
    [
        ((8, 8, 3), r"x=\(8, 8, 3\): has 3 dims, and w has 4; .* pass x\.transpose\(2, 0, 1\)\[None\]$"),
        ((3, 8, 8), r"x=\(3, 8, 8\): has 3 dims, and w has 4; .* pass x\[None\]$"),
        ((5, 8, 8), r"x=\(5, 8, 8\): has 3 dims, and w has 4; .* by x\.transpose\(2, 0, 1\)\[None\]$"),
        ((1, 1, 3, 8, 8), r"w=\(4, 3, 3, 3\): has 4 dims, and x has 5; give both dims N, C, spatial"),
    ],
)
@pytest.mark.parametrize("given", [{}, {"conv": ConvSpec.symmetric(2)}], ids=["numbers", "conv"])
async def test_an_image_without_its_batch_is_told_how_to_get_one(
    dims: tuple[int, ...], said: str, given: dict[str, Any]
) -> None:
    async with spawn(device="cpu") as gpu:
        x, w = await gpu.empty(dims), await gpu.empty((4, 3, 3, 3))
        with pytest.raises(InvalidRequest, match=f"^{said}"):
            await gpu.conv_fwd(x, w, **given)


FORGOTTEN: dict[str, tuple[str, Callable[[Any, Any], Awaitable[Any]]]] = {
    "download": ("src", lambda gpu, given: gpu.download(given)),
    "view": ("buffer", lambda gpu, given: gpu.view(given)),
    "free": ("buffer", lambda gpu, given: gpu.free(given)),
    "fill": ("dst", lambda gpu, given: gpu.fill(given, 1)),
    "write": ("dst", lambda gpu, given: gpu.write(given, ARRAY)),
    "run": ("model", lambda gpu, given: gpu.run(given, {})),
    "load": ("model", lambda gpu, given: gpu.load(given)),
    "explain": ("what", lambda gpu, given: gpu.explain(given)),
    "warm": ("messages", lambda gpu, given: gpu.warm(given)),
    "warm several": ("messages", lambda gpu, given: gpu.warm([given])),
    "apply": ("operation", lambda gpu, given: gpu.apply(given)),
    "ask": ("message", lambda gpu, given: gpu.ask(given)),
    "dims": ("dims", lambda gpu, given: gpu.empty(given)),
}


async def test_a_forgotten_await_is_told_of_wherever_it_shows() -> None:
    async with spawn(device="cpu") as gpu:
        forgotten = gpu.upload(ARRAY)
        for field, send in FORGOTTEN.values():
            said = f"^{field}=coroutine: was never awaited; write {field} = await"
            with pytest.raises(InvalidRequest, match=said):
                await send(gpu, forgotten)
        await forgotten
