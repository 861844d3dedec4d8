"""Random programs while builds end when chance will have it: each answer is that of one after the other."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cudnn_actor import (
    Activation,
    BufferRef,
    ConvFwd,
    CudnnActorError,
    CudnnRef,
    DType,
    Epilogue,
    Fault,
    FaultPlan,
    Receipt,
    TensorSpec,
    spawn,
)
from cudnn_actor.messages import Copy, Download, Drain, Fill, Free, Upload, Warm
from cudnn_actor.protocol.messages.messages import Message

from ..whole import some
from .rigs import ONE_BY_ONE, Device, outcome, single, spawn_on
from .workshops import AsynchronousBuildingEngine, BuildingEngine, Workshop

BUFFERS, STEPS = 6, 120
ODD = [
    TensorSpec.packed(dims, dtype)
    for dtype, dims in zip(DType, itertools.cycle([(), (0,), (3,), (2, 0, 3), (2,) * 8]), strict=False)
]
"""Of every dtype, of up to eight dims, and of no elements: two buffers of each, behind the others."""
ACTIVATIONS = list(Activation)
Recipe = Callable[[list[BufferRef]], Message]


def program(chance: random.Random) -> list[Recipe]:
    """Messages about numbered buffers; a few are freed towards the end."""
    steps = [_step(chance) for _ in range(STEPS)]
    for number in chance.sample(range(BUFFERS), 2):
        steps.insert(chance.randrange(STEPS // 2, STEPS), _free(number))
    return steps


def _free(number: int) -> Recipe:
    return lambda refs: Free(buffer=refs[number])


def _step(chance: random.Random) -> Recipe:
    if chance.random() < 0.3:
        return _odd_step(chance)
    a, b, c = chance.sample(range(BUFFERS), 3)
    value = chance.randrange(-3, 4)
    epilogue = Epilogue(activation=chance.choice(ACTIVATIONS))
    beta, alpha = chance.choice([0.0, 0.0, 0.5]), chance.choice([1.0, 0.5])
    kinds: list[tuple[int, Recipe]] = [
        (
            8,
            lambda refs: ConvFwd(
                x=refs[a], w=refs[b], y=refs[c], conv=ONE_BY_ONE, epilogue=epilogue, alpha=alpha, beta=beta
            ),
        ),
        (3, lambda refs: Fill(dst=refs[a], value=value)),
        (3, lambda refs: Upload(dst=refs[a], data=single(value))),
        (3, lambda refs: Copy(src=refs[a], dst=refs[b])),
        (3, lambda refs: Download(src=refs[a])),
        (1, lambda refs: Drain()),
        (1, lambda refs: Warm(messages=())),
    ]
    return chance.choices([recipe for _, recipe in kinds], [weight for weight, _ in kinds])[0]


def _odd_step(chance: random.Random) -> Recipe:
    number = chance.randrange(len(ODD))
    spec, value = ODD[number], chance.randrange(2)
    one, other = chance.sample([BUFFERS + 2 * number, BUFFERS + 2 * number + 1], 2)
    recipes: list[Recipe] = [
        lambda refs: Fill(dst=refs[one], value=value),
        lambda refs: Upload(dst=refs[one], data=np.full(spec.dims, value, spec.dtype.numpy)),
        lambda refs: Copy(src=refs[one], dst=refs[other]),
        lambda refs: Download(src=refs[one]),
    ]
    return chance.choice(recipes)


async def buffers(gpu: CudnnRef) -> list[BufferRef]:
    singles = [await gpu.upload(single(float(number))) for number in range(BUFFERS)]
    return singles + [
        await gpu.upload(np.zeros(spec.dims, spec.dtype.numpy)) for spec in ODD for _ in range(2)
    ]


async def one_after_the_other(steps: list[Recipe]) -> list[Any]:
    async with spawn(device="cpu", exact=True) as gpu:
        refs = await buffers(gpu)
        return [summary(await answer(gpu, step(refs))) for step in steps]


async def answer(gpu: CudnnRef, message: Message) -> Any:
    try:
        return await gpu.ask(message)
    except CudnnActorError as error:
        return error


def summary(found: Any) -> Any:
    """What two runs must have in common."""
    if isinstance(found, np.ndarray):
        return ("array", found.dtype, found.shape, found.tobytes())
    return type(found).__name__ if isinstance(found, Receipt | Exception) else found


async def open_and_shut(chance: random.Random, workshop: Workshop, device: Device) -> None:
    """Until it is cancelled."""
    while True:
        for gate_open, shut in (
            (workshop.building.open, workshop.building.shut),
            (device.run_freely, device.pause),
        ):
            (gate_open if chance.random() < 0.5 else shut)()
        for _ in range(chance.randrange(30)):
            await asyncio.sleep(0)


@pytest.mark.parametrize("seed", range(some(12)))  # which a failure names
@pytest.mark.parametrize("engine_is", ["synchronous", "asynchronous", "mortal now and then"])
async def test_whatever_builds_take_every_answer_is_that_of_one_after_the_other(
    seed: int, engine_is: str
) -> None:
    chance = random.Random(seed)
    steps = program(chance)
    expected = await one_after_the_other(steps)
    workshop, device = Workshop(), Device()
    device.run_freely()

    def engine() -> Any:
        if engine_is == "asynchronous":
            return AsynchronousBuildingEngine(workshop, device)
        return BuildingEngine(workshop)

    dying = FaultPlan()
    for number in (2, 6, 10):  # never the same one twice: that one would be quarantined
        dying = dying.at(number, Fault.STICKY, of=Fill)
    faults = dying if engine_is == "mortal now and then" else None
    async with spawn_on(engine, faults=faults) as gpu:
        refs = await buffers(gpu)
        meddling = asyncio.ensure_future(open_and_shut(chance, workshop, device))
        try:
            sent: list[asyncio.Future[Any]] = []
            for step in steps:
                sent.append(submitted(gpu, step(refs)))
                for _ in range(chance.randrange(6)):
                    await asyncio.sleep(0)
            for _ in range(200):
                await asyncio.sleep(0)
        finally:
            meddling.cancel()
            workshop.building.open()
            device.run_freely()
        assert [summary(await outcome(future)) for future in sent] == expected


@pytest.mark.parametrize("seed", range(some(12)))  # which a failure names
@pytest.mark.parametrize("worker_is", ["sound", "killed"])
async def test_whatever_becomes_of_workers_every_answer_is_that_of_one_after_the_other(
    seed: int, worker_is: str
) -> None:
    chance = random.Random(seed)
    steps = program(chance)
    expected = await one_after_the_other(steps)
    # Once: what runs again counts again, and one that is struck twice would be quarantined.
    killing = FaultPlan().at(chance.randrange(1, 8), Fault.KILL, of=Fill)
    faults = killing if worker_is == "killed" else None
    async with spawn(device="cpu", exact=True, isolation="process", faults=faults) as gpu:
        refs = await buffers(gpu)
        sent: list[asyncio.Future[Any]] = []
        for step in steps:
            sent.append(submitted(gpu, step(refs)))
            for _ in range(chance.randrange(6)):
                await asyncio.sleep(0)
        assert [summary(await outcome(future)) for future in sent] == expected


def submitted(gpu: CudnnRef, message: Message) -> asyncio.Future[Any]:
    """Its answer, also where it is refused before it is sent: a buffer that has been freed meanwhile."""
    try:
        return gpu.submit(message)
    except CudnnActorError as error:
        refused: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        refused.set_exception(error)
        return refused
