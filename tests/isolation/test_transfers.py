"""Values on their way to a device and back, in process isolation: arenas are not mapped in this process."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import numpy as np
import pytest

from cudnn_actor import Ping

from .crash_rigs import workers

pytestmark = pytest.mark.usefixtures("a_forkserver")
LARGE = (1 << 20,)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """The garbage collector does not run: only what nothing refers to any more is collected."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
async def test_what_was_downloaded_is_collected_when_its_caller_drops_it() -> None:
    async with workers(host_arenas=False) as (gpu, _):
        ref = await gpu.upload(np.ones(LARGE, np.float32))
        array = await gpu.download(ref)
        assert (array == 1).all()
        there = weakref.ref(array)
        del array
        await gpu.ping()
        assert there() is None


@pytest.mark.usefixtures("no_collector")
async def test_a_request_is_collected_when_its_caller_drops_the_reply() -> None:
    async with workers(host_arenas=False) as (gpu, _):
        future = gpu.submit(Ping())
        await future
        there = weakref.ref(future)
        del future
        await gpu.ping()
        assert there() is None
