"""A log sink that fails (a closed pipe, a full disk) costs the line, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn

import numpy as np
import pytest

from cudnn_actor import Fault, FaultPlan, ServiceStopped

from ..log_lines import handled_by
from .rigs import spawn

pytestmark = pytest.mark.usefixtures("isolation")


@pytest.fixture
def broken_sink() -> Iterator[None]:
    def write(record: object) -> NoReturn:
        raise BrokenPipeError(32, "Broken pipe")

    with handled_by(write):
        yield


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
