"""A log sink that fails (a closed pipe, a full disk) costs the line, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

import numpy as np
import pytest
import structlog

from cudnn_actor import Fault, FaultPlan, ServiceStopped

from .rigs import spawn

pytestmark = pytest.mark.usefixtures("isolation")


@pytest.fixture
def broken_sink() -> Iterator[None]:
    def write(logger: object, method: str, event: object) -> NoReturn:
        raise BrokenPipeError(32, "Broken pipe")

    before = structlog.get_config()["processors"]
    structlog.configure(processors=[write])
    try:
        yield
    finally:
        structlog.configure(processors=before)


@pytest.mark.usefixtures("broken_sink")
async def test_a_service_restarts_and_stops_although_no_line_can_be_written() -> None:
    async with spawn(device="cpu", faults=FaultPlan().at(1, Fault.STICKY)) as gpu:
        x = await gpu.upload(np.ones((1, 1, 2, 2), np.float32))
        assert gpu.generation == 2
        assert (await gpu.download(x)).sum() == 4


@pytest.mark.usefixtures("broken_sink")
async def test_a_service_gives_up_although_no_line_can_be_written() -> None:
    faults = FaultPlan().at(1, Fault.STICKY, times=9)
    with pytest.raises(ServiceStopped, match="gave up"):
        async with spawn(device="cpu", max_restarts=0, faults=faults) as gpu:
            await gpu.upload(np.ones((1, 1, 2, 2), np.float32))
