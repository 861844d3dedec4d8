"""A recurrent layer is trained by three messages: reserves lie in buffers, as bytes."""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import msgspec
import numpy as np
import pytest

from cudnn_actor import Fault, FaultPlan, InvalidRequest, UnsupportedGraph
from cudnn_actor.operations import Recurrent, RecurrentBackwardData, RecurrentBackwardWeights, RecurrentMode

from .rigs import spawn
from .trained_layers import LAYERS, Arrays, Layer

pytestmark = pytest.mark.usefixtures("isolation")
PROJECTED = LAYERS["lstm, projection, both directions, lengths"]


def check(found: Arrays, layer: Layer) -> None:
    for name, each in layer.results().items():
        np.testing.assert_allclose(found[name], each, rtol=1e-4, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("exact", [False, True])
async def test_three_messages_give_the_gradients(name: str, *, exact: bool) -> None:
    async with spawn(device="cpu", exact=exact) as gpu:
        check(await (await LAYERS[name].on(gpu)).train(), LAYERS[name])


@pytest.mark.parametrize("fault", [Fault.STICKY, Fault.KILL])
async def test_a_reserve_outlives_the_worker(fault: Fault, isolation: str) -> None:
    if fault is Fault.KILL and isolation == "thread":
        pytest.skip("it would kill this process")
    faults = FaultPlan()
    for number, kind in enumerate((Recurrent, RecurrentBackwardData, RecurrentBackwardWeights), start=1):
        faults = faults.at(1, fault, of=kind)
        assert len(faults.rules) == number
    async with spawn(device="cpu", faults=faults) as gpu:
        on = await PROJECTED.on(gpu)
        check(await on.train(), PROJECTED)
        assert gpu.generation == 4


async def test_gradients_leave_the_reserve_as_it_is() -> None:
    """So they can be asked for again, of another gradient of the result."""
    async with spawn(device="cpu") as gpu:
        on = await LAYERS["lstm"].on(gpu)
        first = await on.train()
        for message in (on.data, on.data, on.weights, on.weights):
            await gpu.ask(message)
        for name, again in (await on.read()).items():
            np.testing.assert_array_equal(again, first[name])


async def test_apply_allocates_as_many_slopes_as_the_reserve_has() -> None:
    async with spawn(device="cpu") as gpu:
        on = await LAYERS["lstm"].on(gpu)
        await gpu.ask(on.forward)
        back = await gpu.apply(msgspec.structs.replace(on.data, slopes=None), also=("slopes",))
        assert back.slopes.spec == on.data.reserve.spec  # type: ignore[union-attr]
        await gpu.ask(msgspec.structs.replace(on.weights, slopes=back.slopes))
        with pytest.raises(InvalidRequest, match="dw_ih"):
            await gpu.apply(msgspec.structs.replace(on.weights, dw_ih=None, dw_hh=None))


async def test_more_bytes_are_enough() -> None:
    async with spawn(device="cpu") as gpu:
        on = await PROJECTED.on(gpu)
        nbytes = on.data.reserve.spec.size  # type: ignore[union-attr]
        more = await gpu.empty((nbytes + 100,), dtype="uint8")
        check(await on.with_reserve(more).train(), PROJECTED)


async def refusal(of: Awaitable[Any]) -> str:
    with pytest.raises(UnsupportedGraph) as caught:
        await of
    return str(caught.value)


async def test_too_few_bytes_are_refused_with_their_number() -> None:
    async with spawn(device="cpu") as gpu:
        on = await LAYERS["lstm"].on(gpu)
        nbytes = on.data.reserve.spec.size  # type: ignore[union-attr]
        few = await gpu.empty((nbytes - 1,), dtype="uint8")
        told = f"{nbytes - 1:,} of the {nbytes:,} bytes"
        other = on.with_reserve(few)
        assert f"reserve has {told}" in await refusal(gpu.ask(other.forward))
        assert f"reserve has {told}" in await refusal(gpu.ask(other.data))
        last = msgspec.structs.replace(on.weights, slopes=few)
        assert f"slopes has {told}" in await refusal(gpu.ask(last))


async def test_a_layer_without_sequences_keeps_nothing() -> None:
    async with spawn(device="cpu") as gpu:
        x, w, r = [await gpu.upload(np.ones(dims, np.float32)) for dims in ((5, 0, 4), (1, 6, 4), (1, 6, 6))]
        layer = Recurrent(x=x, w_ih=w, w_hh=r, mode=RecurrentMode.TANH)
        assert await gpu.reserve_nbytes(layer) == 0
        reserve, slopes = [await gpu.empty((0,), dtype="uint8") for _ in range(2)]
        y, _ = await gpu.apply(msgspec.structs.replace(layer, reserve=reserve))
        await gpu.apply(
            RecurrentBackwardData(
                x=x, y=y, w_ih=w, w_hh=r, reserve=reserve, slopes=slopes, mode=RecurrentMode.TANH
            )
        )
        dw = [await gpu.empty(each.spec.dims) for each in (w, r)]
        await gpu.apply(
            RecurrentBackwardWeights(
                x=x, y=y, slopes=slopes, dw_ih=dw[0], dw_hh=dw[1], mode=RecurrentMode.TANH
            )
        )
        assert not (await gpu.download(dw[0])).any()


@pytest.mark.parametrize(
    "changes", [{"mode": "lstm"}, {"lengths": [5, 0, 3, 1]}, {"lengths": tuple(np.array([5, 0, 3, 1]))}]
)
async def test_a_layer_that_can_be_sent_can_be_asked_about(changes: dict[str, Any]) -> None:
    async with spawn(device="cpu") as gpu:
        on = await LAYERS["lstm"].on(gpu)
        layer = msgspec.structs.replace(on.forward, **changes)
        await gpu.ask(layer)
        assert await gpu.reserve_nbytes(layer) == on.data.reserve.spec.size  # type: ignore[union-attr]


async def test_only_a_layer_has_a_reserve() -> None:
    async with spawn(device="cpu") as gpu:
        on = await LAYERS["lstm"].on(gpu)
        for other in (on.data, on.weights, "layer", None):
            with pytest.raises(InvalidRequest) as caught:
                await gpu.reserve_nbytes(other)  # type: ignore[arg-type]
            assert caught.value.field == "layer"
        with pytest.raises(InvalidRequest):
            await gpu.reserve_nbytes(msgspec.structs.replace(on.forward, w_ih=on.forward.x))
