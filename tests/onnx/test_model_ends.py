"""The end of a model: closed, dropped, or with its service; and what it leaves."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import numpy as np
import pytest

from cudnn_actor import (
    Graph,
    InvalidRequest,
    ServiceStopped,
    spawn,
)
from cudnn_actor.models import keeping as models
from cudnn_actor.options import Isolation

from ..inside import kept_by
from .small_models import image_model
from .test_models import buffers, expected, images


async def test_closing_frees_all_weights_whatever_has_become_of_one() -> None:
    async with spawn(device="cpu") as gpu:
        model = await gpu.load(image_model(1))
        await gpu.free(next(iter(kept_by(model).weights.values()))[0])
        await model.close()
        assert await buffers(gpu) == 0


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
            if thread.name == "specialise":  # its graph has been taken, and it need not have ended since
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
