"""Loops whose data ends them, with a row for each turn: they run in parts, each a request of its own."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto

from cudnn_actor import Fault, FaultPlan, RunLoop, spawn
from cudnn_actor.onnx import ModelLimits, OnnxModel

from .small_models import FLOAT, INT64, graph_of, live_buffers, model_of, node

BOOL = TensorProto.BOOL
AS_LOOPS = ModelLimits(unrolled=0)


def counting(most: int) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
    """A loop that ends when its state has reached `limit`."""
    body = graph_of(
        [
            node("Add", "v one", "next"),
            node("ReduceMax", "next", "largest", keepdims=0),
            node("Less", "largest limit", "on"),
            node("Expand", "largest wide", "row"),
            node("Cast", "i", "number", to=FLOAT),
        ],
        {"i": (INT64, []), "go": (BOOL, []), "v": (FLOAT, [2])},
        {"on": (BOOL, []), "next": (FLOAT, [2]), "row": (FLOAT, [1024]), "number": (FLOAT, [])},
    )
    proto = model_of(
        [node("Abs", "x", "v0"), node("Loop", "most - v0", "y rows numbers", body=body)],
        {"x": (FLOAT, [2]), "limit": (FLOAT, [])},
        {"y": (FLOAT, [2]), "rows": (FLOAT, [None, 1024]), "numbers": (FLOAT, [None])},
        {"most": np.array(most), "one": np.array(1.0, np.float32), "wide": np.array([1024])},
    )
    return proto, {"x": np.array([0.0, 0.5], np.float32)}


@pytest.mark.parametrize(
    ("isolation", "faults"), [("thread", None), ("process", FaultPlan().at(2, Fault.KILL, of=RunLoop))]
)
async def test_a_loop_whose_data_ends_it_takes_memory_for_twice_the_turns_that_ran(
    isolation: Any, faults: FaultPlan | None
) -> None:
    """Rows of 4 KiB: those of all turns that the loop may have would take 4 GiB. The bounds are those of its
    parts, of 256, 512 and 1024 turns."""
    proto, inputs = counting(1 << 20)
    limit = 12 << 20
    async with spawn(device="cpu", memory_limit=limit, isolation=isolation, faults=faults) as gpu:
        async with await gpu.load(OnnxModel(proto, AS_LOOPS)) as model:
            before = await live_buffers(gpu)
            for turns in (1, 255, 256, 257, 768, 769, 1000):
                found = await gpu.run(model, inputs, limit=np.array(turns, np.float32))
                np.testing.assert_array_equal(found["y"], [turns, turns + 0.5])
                wanted = np.arange(turns, dtype=np.float32)
                np.testing.assert_array_equal(found["numbers"], wanted)
                np.testing.assert_array_equal(found["rows"], np.tile(wanted[:, None] + 1.5, 1024))
                assert found["rows"].base is None
            kept = await gpu.run(model, inputs, limit=np.array(300, np.float32), keep=("rows", "y"))
            assert kept["rows"].spec.dims == (300, 1024)
            for ref in (kept["rows"], kept["y"]):
                await gpu.free(ref)
            assert await live_buffers(gpu) == before
        assert gpu.generation == (1 if faults is None else 2)


@pytest.mark.parametrize("most", [300, 768])
async def test_parts_of_a_loop_have_no_more_turns_together_than_it_may_have(most: int) -> None:
    proto, inputs = counting(most)
    async with spawn(device="cpu") as gpu, await gpu.load(OnnxModel(proto, AS_LOOPS)) as model:
        found = await gpu.run(model, inputs, limit=np.array(np.inf, np.float32))
    np.testing.assert_array_equal(found["numbers"], np.arange(most, dtype=np.float32))
    np.testing.assert_array_equal(found["y"], [most, most + 0.5])


async def test_the_first_part_of_a_loop_with_large_rows_has_few_turns() -> None:
    """Rows of 20 MiB: those of 256 turns would take 5 GiB."""
    proto, inputs = counting(1 << 20)
    wide = np.array([5 << 20])
    next(each for each in proto.graph.initializer if each.name == "wide").raw_data = wide.tobytes()
    limit = 100 << 20
    async with (
        spawn(device="cpu", memory_limit=limit) as gpu,
        await gpu.load(OnnxModel(proto, AS_LOOPS)) as model,
    ):
        found = await gpu.run(model, inputs, limit=np.array(2, np.float32))
    assert found["rows"].shape == (2, 5 << 20)
    np.testing.assert_array_equal(found["rows"][:, :: 1 << 20], np.tile([[1.5], [2.5]], 5))


async def test_a_run_that_is_cancelled_in_any_part_leaves_no_buffer() -> None:
    """It has over thirty messages, and each takes two steps of the event loop at least."""
    proto, inputs = counting(1 << 20)
    async with spawn(device="cpu") as gpu, await gpu.load(OnnxModel(proto, AS_LOOPS)) as model:
        before = await live_buffers(gpu)
        for steps in range(1, 60, 2):
            run = asyncio.ensure_future(gpu.run(model, inputs, limit=np.array(1000, np.float32)))
            for _ in range(steps):
                await asyncio.sleep(0)
            run.cancel()
            with pytest.raises(asyncio.CancelledError):
                await run
            assert await live_buffers(gpu) == before
