"""Loops on a GPU: what they compute, amid kills too, and that a body is captured once for each parity."""

from __future__ import annotations

import asyncio
import os
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from cudnn_actor import BufferRef, CudnnRef, Fault, FaultPlan, RunLoop, spawn
from cudnn_actor.engines.base import Engine
from cudnn_actor.execution.executor import Executor
from cudnn_actor.execution.loops import Loops
from cudnn_actor.protocol.messages.lowering import lower

from ..service.loop_bodies import Case, cases, recurrence, run_case

_ARENA = 991


@pytest.mark.parametrize("isolation", ["thread", "process"])
async def test_a_loop_computes_what_its_body_does_turn_by_turn(isolation: Any) -> None:
    async with spawn(device="cuda", isolation=isolation) as gpu:
        for case in drawn(60):
            await run_case(gpu, case)


def drawn(count: int) -> list[Case]:
    """Different loops: each body is built once, so they share one service."""
    found: dict[Case, None] = {}

    @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(cases(), min_size=1, max_size=2))
    def draw(several: list[Case]) -> None:
        found.update(dict.fromkeys(several))

    draw()
    return list(found)[:count]


async def layer(gpu: CudnnRef, turns: int, units: int = 32) -> tuple[RunLoop, np.ndarray]:
    """A recurrent layer, and its outputs in float64."""
    rng = np.random.default_rng(turns)
    h = rng.uniform(-1, 1, (1, units))
    w, x = rng.uniform(-1, 1, (units, units)) / units, rng.uniform(-1, 1, (turns, 1, units))
    rows = []
    state = h
    for row in x:
        state = np.tanh(state @ w + row)
        rows.append(2 * state)
    loop = recurrence(units)
    values = {"h": h, "w": w, "x": x}
    buffers = {name: await gpu.upload(array.astype(np.float32)) for name, array in values.items()}
    specs = loop.specs(turns)
    for port in loop.body.outputs:
        buffers[port.name] = await gpu.empty(specs[port.name].dims, dtype="float32")
    scratch = await gpu.empty(loop.scratch.dims, dtype="uint8")
    return RunLoop.bind(loop, buffers, turns=turns, scratch=scratch), np.array(rows)


async def rows_of(gpu: CudnnRef, message: RunLoop) -> np.ndarray:
    return await gpu.download(message.buffers[message.graph.places["y"]])


@pytest.mark.parametrize("standby", [0, 1])
async def test_no_loop_is_lost_or_wrong_amid_crashes(standby: int) -> None:
    faults = FaultPlan().at(3, Fault.KILL, of=RunLoop).at(6, Fault.STICKY, of=RunLoop)
    async with spawn(device="cuda", isolation="process", standby=standby, faults=faults) as gpu:
        message, wanted = await layer(gpu, 100)
        for _ in range(10):
            await gpu.ask(message)
            np.testing.assert_allclose(await rows_of(gpu, message), wanted, rtol=2e-3, atol=2e-3)
        assert gpu.generation == 3


async def test_a_worker_that_is_killed_in_the_middle_of_a_loop_is_replaced() -> None:
    async with spawn(device="cuda", isolation="process", standby=1) as gpu:
        long, wanted = await layer(gpu, 100_000)
        await gpu.ask((await layer(gpu, 10))[0])  # its kernels are loaded
        running = asyncio.ensure_future(gpu.ask(long))
        events = gpu.events()
        while running not in (await asyncio.wait([running], timeout=0.1))[0] and gpu.generation == 1:
            assert gpu.worker_pid is not None
            os.kill(gpu.worker_pid, 9)
            await anext(events)
        await running
        np.testing.assert_allclose((await rows_of(gpu, long))[:100], wanted[:100], rtol=2e-3, atol=2e-3)
        np.testing.assert_allclose(await rows_of(gpu, long), wanted, rtol=1e-2, atol=1e-2)


async def test_a_long_loop_is_no_hang_and_answers_others_behind_it() -> None:
    async with spawn(device="cuda", isolation="process", hang_after_s=2.0) as gpu:
        message, wanted = await layer(gpu, 200_000)
        loop, other = gpu.submit(message), gpu.submit((await layer(gpu, 3))[0])
        await asyncio.gather(loop, other)
        assert gpu.generation == 1
        np.testing.assert_allclose(await rows_of(gpu, message), wanted, rtol=1e-2, atol=1e-2)


class TestCaptures:
    """A body is captured at two sets of addresses, however many turns there are."""

    def test_a_body_is_captured_once_for_even_turns_and_once_for_odd_ones(self, engine: Engine) -> None:
        turns, loop = 50, recurrence(32)
        specs = {**loop.specs(turns), "scratch": loop.scratch}
        os.close(engine.create_arena(_ARENA, 1 << 21))
        slots: list[Any] = []
        for number, spec in enumerate(specs.values()):
            arena = SimpleNamespace(number=_ARENA)
            slots.append(SimpleNamespace(arena=arena, offset=number << 18, spec=spec, binding=None))
        refs = [
            BufferRef(slot=place, generation=1, spec=slot.spec, device=engine.device)
            for place, slot in enumerate(slots)
        ]
        message = RunLoop(loop=loop, buffers=tuple(refs[:-1]), scratch=refs[-1], turns=turns)
        lowered = lower(message)
        plan: Any = engine.build(lowered.graph, workspace_limit=None)
        executor: Executor[Any] = Executor(engine, None)  # type: ignore[arg-type]  # it holds no buffers here
        progress: list[int] = []
        loops = Loops(executor, lambda: progress.append(1), lambda _: None)
        for slot in slots[:-1]:
            engine.fill(executor.binding(slot), 0.5)
        for runs in (1, 2):
            loops.run(plan, lowered, slots, lambda: False)
            engine.read(executor.binding(slots[-2]))
            assert len(progress) >= (turns - 1) * runs
        assert len(plan.program.replays) == 2
        found = engine.read(executor.binding(slots[list(specs).index("y")]))
        np.testing.assert_allclose(found[10:], found[-1:].repeat(turns - 10, 0), rtol=1e-3)
        engine.unmap_arena(_ARENA)
