"""Operations as messages: their results, what is wrong with a bad one, and which buffers they use."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cudnn_actor import ConvSpec, CudnnRef, InvalidRequest, Numerics, Receipt, StaleBufferError
from cudnn_actor.broker.footprints import footprint
from cudnn_actor.messages import Fill, Free, Warm
from cudnn_actor.operations import AdaptiveWindow, AvgPool, LayerNorm
from cudnn_actor.protocol.messages.lowering import lower
from cudnn_actor.protocol.operations import (
    Attention,
    ConvolutionBackwardData,
    LayerNormBackward,
    Pointwise,
    PointwiseMode,
    Window,
)

from ..noted import noted
from .families import FORMS, Form, Stage
from .operation_rigs import ALL, INDEX, LARGEST, POOL, Operands
from .rigs import Gate, in_thread, outcome, spawn, spawn_gated, spawn_on
from .workshops import BuildingEngine, Workshop

both_isolations = pytest.mark.usefixtures("isolation")


async def values(gpu: CudnnRef, ref: Any) -> list[float]:
    found: list[float] = (await gpu.download(ref)).ravel().tolist()
    return found


@both_isolations
async def test_every_operation_is_a_message() -> None:
    async with spawn(device="cpu") as gpu:
        operands = await Operands.on(gpu)
        assert operands.all().keys() == ALL.keys()
        for name, message in operands.all().items():
            receipt = await gpu.ask(message)
            assert isinstance(receipt, Receipt)
            assert receipt.plan.startswith(f"cpu/{message.kind}/")
            assert await values(gpu, message.writes[0]) == ALL[name]
        assert await values(gpu, operands.index) == INDEX


@both_isolations
async def test_an_operation_gives_all_its_outputs_and_touches_nothing_else() -> None:
    async with spawn(device="cpu") as gpu:
        for name, form in FORMS.items():
            with noted(name):
                stage = await Stage.on(gpu, form.problem)
                receipt = await gpu.ask(stage.message(form.operation))
                assert receipt.plan.startswith(f"cpu/{form.operation.kind}/")
                stage.computed(form.operation)
                await stage.assert_right()


@both_isolations
async def test_operations_on_tensors_without_elements_are_run_or_refused_by_name() -> None:
    async with spawn(device="cpu") as gpu:
        none, empty = [await gpu.upload(np.zeros(dims, np.float32)) for dims in ((2, 0, 3), (2, 3, 0))]
        for operation in (Pointwise(mode=PointwiseMode.ADD, operands=(none, none)), LayerNorm(x=none)):
            assert (await gpu.download(await gpu.apply(operation))).shape == (2, 0, 3)
        image = await gpu.upload(np.zeros((2, 3, 4), np.float32))
        live = (await gpu.statistics()).live_buffers
        with pytest.raises(InvalidRequest, match="has no elements") as caught:
            await gpu.apply(AvgPool(x=empty, window=AdaptiveWindow(output=(2,))))
        assert caught.value.field == "x"
        with pytest.raises(InvalidRequest, match="has no taps"):
            await gpu.conv_fwd(image, empty, conv=ConvSpec.symmetric(1))
        assert (await gpu.statistics()).live_buffers == live
        assert gpu.generation == 1


@both_isolations
async def test_an_output_that_is_left_out_is_not_written() -> None:
    async with spawn(device="cpu") as gpu:
        operands = await Operands.on(gpu)
        await gpu.ask(operands.max_pool(index=None, numerics=Numerics(deterministic=True)))
        assert await values(gpu, operands.y) == LARGEST
        assert await values(gpu, operands.index) == [77] * 3


@both_isolations
async def test_the_operands_of_a_tuple_keep_their_places() -> None:
    async with spawn(device="cpu") as gpu:
        operands = await Operands.on(gpu)
        for given in ((operands.x, operands.w), (operands.w, operands.x)):
            await gpu.ask(operands.pointwise(mode=PointwiseMode.MUL, operands=given))
            assert await values(gpu, operands.whole) == [3, 15, 12, 9, 6, 6]
        await gpu.ask(operands.pointwise(mode="relu", operands=(operands.x,)))
        assert await values(gpu, operands.whole) == [1, 5, 4, 3, 2, 2]


ARRAY = np.ones((1, 1, 6), np.float32)
WIDE = Window.symmetric(1, size=7)
PADDED = Window.symmetric(1, size=2, pad=2)
STEPS = Window.symmetric(1, size=1, stride=1)


def later() -> asyncio.Future[Any]:
    """What somebody forgot to await."""
    return asyncio.get_running_loop().create_future()


# The request, the field to blame, and what the text must say.
BAD: dict[str, tuple[Callable[[Operands], Any], str, str]] = {
    "array as x": (lambda o: o.max_pool(x=ARRAY), "x", "upload arrays first"),
    "None as x": (lambda o: o.max_pool(x=None), "x", "give a buffer: the output of another request"),
    "None as y": (lambda o: o.max_pool(y=None), "y", "allocate it: await gpu.empty(dims), or use"),
    "None as gradient": (lambda o: o.max_pool_backward(dx=None), "dx", "None"),
    "None as index to read": (lambda o: o.max_pool_backward(index=None), "index", "None"),
    "None as statistics": (
        lambda o: LayerNormBackward(dy=o.x, x=o.x, mean=None, inverse_deviation=o.w, dx=o.whole),
        "mean",
        "give a buffer: the output of another request",
    ),
    "number as index": (lambda o: o.max_pool(index=3), "index", "takes BufferRef"),
    "tuple as x": (lambda o: o.avg_pool(x=(o.x,)), "x", "has type tuple"),
    "no window": (lambda o: o.max_pool(window=None), "window", "Window.symmetric(2, size=3)"),
    "size as window": (lambda o: o.avg_pool(window=(2,)), "window", "takes Window"),
    "dims of y": (lambda o: o.max_pool(y=o.whole), "y", "give it dims (1, 1, 3)"),
    "dtype of y": (lambda o: o.avg_pool(y=o.index), "y", "use float32"),
    "dims of index": (lambda o: o.max_pool(index=o.whole64), "index", "give it dims (1, 1, 3)"),
    "dtype of index": (lambda o: o.max_pool(index=o.dy), "index", "use int64"),
    "dtype of index to read": (lambda o: o.max_pool_backward(index=o.y), "index", "use int64"),
    "dims of dy": (lambda o: o.avg_pool_backward(dy=o.x), "dy", "give it dims (1, 1, 3)"),
    "dims of dx": (lambda o: o.max_pool_backward(dx=o.y), "dy", "give it dims (1, 1, 1), or give dx other"),
    "dims of an average's dx": (lambda o: o.avg_pool_backward(dx=o.y), "dy", "or give dx other dims"),
    "dtype of dx": (lambda o: o.max_pool_backward(dx=o.whole64), "dx", "use float32"),
    "mean of integers": (lambda o: o.avg_pool(x=o.whole64, y=o.index), "x", "use float64 or"),
    "window past x": (lambda o: o.max_pool(window=WIDE), "window.size", "=(7,): extends over 7 elements in"),
    "window in the padding": (
        lambda o: o.avg_pool(window=PADDED),
        "window.pre_padding",
        "window 0 in spatial dim 0 covers only",
    ),
    "rank of the window": (lambda o: o.max_pool(window=Window.symmetric(2, size=2)), "x", "(1, 1, 6)"),
    "text as a flag": (lambda o: o.avg_pool(include_padding="yes"), "include_padding", "'yes'"),
    "unknown mode": (lambda o: o.pointwise(mode="maximum"), "mode", "'maximum'"),
    "text as parameter": (lambda o: o.pointwise(parameter="1"), "parameter", "'1'"),
    "number as parameter of tanh": (
        lambda o: o.pointwise(mode="tanh", operands=(o.x,), parameter=1.0),
        "parameter",
        "has no parameter",
    ),
    "infinite parameter": (
        lambda o: o.pointwise(mode="elu", operands=(o.x,), parameter=float("inf")),
        "parameter",
        "must be a finite number",
    ),
    "huge parameter": (
        lambda o: o.pointwise(mode="elu", operands=(o.x,), parameter=1 << 70),
        "parameter",
        "more than 64 bits",
    ),
    "huge axis": (lambda o: LayerNorm(x=o.x, y=o.whole, axis=10**30), "axis", "is no dim of x"),
    "huge epsilon": (lambda o: LayerNorm(x=o.x, y=o.whole, epsilon=10**30), "epsilon", "pass a float, as in"),
    "huge scale": (
        lambda o: Attention(q=o.x, k=o.x, v=o.x, y=o.whole, scale=10**30),
        "scale",
        "pass a float, as in 1e30",
    ),
    "huge flag": (lambda o: o.avg_pool(include_padding=10**30), "include_padding", "pass True or False"),
    "dict as numerics": (lambda o: o.max_pool(numerics={"tf32": True}), "numerics", "pass a Numerics"),
    "padding without end": (
        lambda o: o.max_pool(window=Window.symmetric(1, size=1 << 30, pad=(1 << 30) - 1, stride=1)),
        "window.pre_padding",
        "use less padding",
    ),
    "padding that no tensor needs": (
        lambda o: o.max_pool(window=Window.symmetric(1, size=1 << 30, pad=(1 << 30) - 1)),
        "window.pre_padding",
        "more than 65,536",
    ),
    "padding for a window's far end": (
        lambda o: o.avg_pool(
            window=Window.symmetric(1, size=2, pad=1 << 17, stride=1 << 17, dilation=1 << 17)
        ),
        "window.pre_padding",
        "use less padding",
    ),
    "list of operands": (lambda o: o.pointwise(operands=[o.x, o.x]), "operands", "pass a tuple"),
    "one operand bare": (lambda o: o.pointwise(mode="relu", operands=o.x), "operands", "pass a tuple"),
    "no operands": (lambda o: o.pointwise(operands=()), "operands", "give it 2"),
    "too many operands": (lambda o: o.pointwise(mode="relu"), "operands", "give it 1"),
    "array in a tuple": (lambda o: o.pointwise(operands=(o.x, ARRAY)), "operands[1]", "upload arrays first"),
    "None in a tuple": (lambda o: o.pointwise(operands=(None, o.x)), "operands[0]", "None"),
    "dims in a tuple": (lambda o: o.pointwise(operands=(o.x, o.dy)), "operands[1]", "does not broadcast"),
    "dims of a result": (lambda o: o.pointwise(result=o.y), "result", "give it dims (1, 1, 6)"),
    "a conv's output dims": (lambda o: o.convolution(y=o.y), "y", "give it dims (1, 1, 6)"),
    "a conv's gradient's dims": (
        lambda o: ConvolutionBackwardData(dy=o.dy, w=o.w, dx=o.whole, conv=ConvSpec.symmetric(1)),
        "dy",
        "or give dx other dims",
    ),
    "no conv": (lambda o: o.convolution(conv=None), "conv", "ConvSpec.symmetric(2)"),
    "awaitable": (lambda o: o.max_pool(x=later()), "x", "write x = await"),
    "awaitable output": (lambda o: o.max_pool(index=later()), "index", "write index = await"),
    "awaitable in a tuple": (
        lambda o: o.pointwise(operands=(o.x, later())),
        "operands[1]",
        "write operands[1] = await",
    ),
    "input as output": (lambda o: o.max_pool(y=o.x, index=None, window=STEPS), "y", "is also x"),
    "tuple's element as output": (
        lambda o: o.pointwise(operands=(o.x, o.whole)),
        "result",
        "is also operands[1]",
    ),
    "index as y too": (
        lambda o: o.max_pool(x=o.whole64, y=o.index, index=o.index),
        "y",
        "is also index",
    ),
    "index as x too": (
        lambda o: o.max_pool(x=o.index, y=o.found, index=o.index, window=STEPS),
        "index",
        "is also x",
    ),
    "bad one to warm": (lambda o: Warm(messages=(o.max_pool(), o.max_pool(y=o.whole))), "y", "(1, 1, 3)"),
}


@both_isolations
async def test_a_bad_operation_is_named_and_harms_nothing() -> None:
    async with spawn(device="cpu") as gpu:
        operands = await Operands.on(gpu)
        for name, (make, field, shown) in BAD.items():
            with noted(name):
                message = make(operands)
                for way in (gpu.ask, lambda sent: in_thread(lambda: gpu.actor_ref.ask(sent))):
                    with pytest.raises(InvalidRequest) as caught:
                        await way(message)
                    assert caught.value.field == field
                    assert shown in str(caught.value)
                    assert caught.value.fix
                assert (await gpu.statistics()).live_buffers == 8
                for output in (operands.y, operands.index, operands.whole):
                    assert set(await values(gpu, output)) == {77}
        await gpu.ask(operands.max_pool())
        assert await values(gpu, operands.y) == LARGEST
        assert gpu.generation == 1


@both_isolations
@pytest.mark.parametrize(
    ("good", "bad"),
    [({"include_padding": True}, {"include_padding": 1}), ({"parameter": 1.0}, {"parameter": True})],
)
async def test_a_value_that_equals_a_good_one_is_refused_behind_it_too(
    good: dict[str, Any], bad: dict[str, Any]
) -> None:
    async with spawn(device="cpu") as gpu:
        operands = await Operands.on(gpu)
        elu = functools.partial(operands.pointwise, mode="elu", operands=(operands.x,))
        make = elu if "parameter" in good else operands.avg_pool
        await gpu.ask(make(**good))
        with pytest.raises(InvalidRequest):
            await gpu.ask(make(**bad))
        await gpu.ask(make(**good))
        assert gpu.generation == 1


@both_isolations
async def test_a_freed_buffer_in_a_tuple_is_named_by_its_place() -> None:
    async with spawn(device="cpu") as gpu:
        operands = await Operands.on(gpu)
        await gpu.free(operands.w)
        message = operands.pointwise(operands=(operands.x, operands.w))
        for way in (gpu.ask, lambda sent: in_thread(lambda: gpu.actor_ref.ask(sent))):
            with pytest.raises(StaleBufferError, match=r"^operands\[1\]=.* is stale \(freed\)") as caught:
                await way(message)
            assert (caught.value.field, caught.value.slot) == ("operands[1]", operands.w.slot)
        assert await values(gpu, operands.whole) == [77] * 6


@both_isolations
async def test_a_freed_optional_output_is_stale_too() -> None:
    async with spawn(device="cpu") as gpu:
        operands = await Operands.on(gpu)
        await gpu.ask(operands.max_pool())
        await gpu.free(operands.index)
        with pytest.raises(StaleBufferError) as caught:
            await gpu.ask(operands.max_pool())
        assert caught.value.field == "index"
        assert isinstance(await gpu.ask(operands.max_pool(index=None)), Receipt)


@both_isolations
async def test_a_buffer_freed_behind_the_request_that_reads_it_in_a_tuple_is_not_given_away() -> None:
    gate = Gate()
    async with spawn_gated(gate) as gpu:
        operands = await Operands.on(gpu)
        with gate.closed():
            summed = gpu.submit(operands.pointwise(operands=(operands.x, operands.w)))
            await in_thread(gate.wait_for_arrival)
            freed = gpu.submit(Free(buffer=operands.w))
            other = asyncio.ensure_future(gpu.upload(np.full((1, 1, 1), 1000, np.float32)))
        assert isinstance(await summed, Receipt)
        await freed
        assert await values(gpu, operands.whole) == [4, 8, 7, 6, 5, 5]
        assert await values(gpu, await other) == [1000]


async def test_a_free_waits_for_a_request_that_waits_for_its_plan_and_uses_the_buffer_in_a_tuple() -> None:
    workshop = Workshop()
    async with spawn_on(lambda: BuildingEngine(workshop)) as gpu:
        operands = await Operands.on(gpu)
        with workshop.building.closed():
            summed = gpu.submit(operands.pointwise(operands=(operands.x, operands.w)))
            freed, late = gpu.submit(Free(buffer=operands.w)), gpu.submit(Fill(dst=operands.w, value=1))
            elsewhere = gpu.submit(Free(buffer=operands.dy))
            await in_thread(workshop.building.wait_for_arrival)
            assert await outcome(elsewhere) is None  # which was sent later, so `freed` has been looked at
            assert not freed.done()
            assert not summed.done()
        assert isinstance(await summed, Receipt)
        assert await outcome(freed) is None
        assert isinstance(await outcome(late), StaleBufferError)
        assert await values(gpu, operands.whole) == [4, 8, 7, 6, 5, 5]


@both_isolations
async def test_operations_can_be_warmed() -> None:
    async with spawn(device="cpu") as gpu:
        operands = await Operands.on(gpu)
        messages = operands.all()
        assert await gpu.warm(list(messages.values())) == len(messages)
        assert await gpu.ask(Warm(messages=tuple(messages.values()))) == 0
        for output in (operands.y, operands.index, operands.whole):
            assert set(await values(gpu, output)) == {77}
        for message in messages.values():
            await gpu.ask(message)
        plans = (await gpu.statistics()).plans
        assert (plans.misses, plans.size) == (len(messages), len(messages))
        assert await gpu.warm([operands.max_pool(index=None)]) == 1  # another graph


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_an_operation_writes_its_outputs_and_reads_all_else(form: Form) -> None:
    message = Stage.unplaced(form.problem).message(form.operation)
    found = footprint(message, lower)
    assert set(found.writes) == {ref.slot for ref in message.writes}
    assert set(found.reads) == {ref.slot for ref in message.reads}
    assert set(found.writes).isdisjoint(found.reads)


def test_the_footprint_of_a_pooling_has_both_outputs_and_of_a_tuple_every_element() -> None:
    operands = Operands.unplaced()
    found = footprint(operands.max_pool(), lower)
    assert (set(found.reads), set(found.writes)) == (
        {operands.x.slot},
        {operands.y.slot, operands.index.slot},
    )
    found = footprint(operands.max_pool(index=None), lower)
    assert set(found.writes) == {operands.y.slot}
    found = footprint(operands.pointwise(operands=(operands.w, operands.x)), lower)
    assert (set(found.reads), set(found.writes)) == (
        {operands.w.slot, operands.x.slot},
        {operands.whole.slot},
    )


def test_windows_are_compared_by_value_so_equal_requests_share_a_plan() -> None:
    operands = Operands.unplaced()
    again = Window.symmetric(1, size=2, stride=2)
    assert again == POOL
    assert lower(operands.max_pool(window=again)).graph.digest() == lower(operands.max_pool()).graph.digest()
