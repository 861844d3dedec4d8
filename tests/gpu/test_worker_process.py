"""Workers that come to real harm on a GPU: nothing is lost, nothing is wrong, and the service goes on.

The harm is a kernel's or the kernel's: a write to where nothing is, a kernel that never ends, SIGKILL, and
another process that has taken all of the device's memory. This process has a CUDA context of its own by the
time (other tests made it), which none of it touches; what a user's has is looked at in one of its own.
"""

from __future__ import annotations

import asyncio
import json
import math
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cudnn_actor import (
    BufferRef,
    ConvFwd,
    ConvSpec,
    CudnnRef,
    DType,
    InvalidRequest,
    OutcomeUnknown,
    OutOfMemory,
    QuarantinedRequest,
    Receipt,
    StaleBufferError,
    spawn,
)
from cudnn_actor.messages import Fill
from cudnn_actor.protocol.types.tensor import LayoutName
from cudnn_actor.supervision import Restarted, Restarting

from ..engines.references import relative_error
from ..patience import PATIENCE_S
from .bounds import UNIT
from .worker_faults import ILLEGAL, Ammunition
from .worker_load import Load, deadly_service, strike

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(180)]

DEVICE = "cuda:0"
STRIKES = 5
ROOT = Path(__file__).parents[2]
STANDBY = pytest.mark.parametrize("standby", [0, 1], ids=["alone", "with a standby"])
BIG = (1, 1, 3 << 8, 20 << 10)
"""Of float32: 60 MiB, so that no two share an arena."""


@pytest.fixture
def ammunition(tmp_path: Path) -> Ammunition:
    folder = tmp_path / "ammunition"
    folder.mkdir()
    return Ammunition(str(folder))


@asynccontextmanager
async def deadly(tmp_path: Path, **options: Any) -> AsyncIterator[CudnnRef]:
    async with deadly_service(DEVICE, str(tmp_path / "ammunition"), **options) as gpu:
        yield gpu


# Under load.


@STANDBY
@pytest.mark.parametrize("how", ["illegal access", "SIGKILL"])
async def test_64_tasks_see_right_answers_and_torn_sums_and_nothing_else(
    how: str, standby: int, ammunition: Ammunition, tmp_path: Path
) -> None:
    values = np.random.default_rng(0).standard_normal((1, 3, 500, 700)).astype(np.float32)
    async with deadly(tmp_path, standby=standby) as gpu:
        survivor = await gpu.upload(values, layout="NHWC")
        async with Load(gpu) as load:
            for _ in range(STRIKES):
                await strike(gpu, how, ammunition)
                await load.flow()
        assert gpu.generation == 1 + STRIKES
        np.testing.assert_array_equal(await gpu.download(survivor), values)
        assert (await gpu.statistics()).restarts == STRIKES
    assert load.checked > 64
    assert set(load.ends) <= {"OutcomeUnknown", "StaleBufferError", "Receipt"}, load.ends


@STANDBY
async def test_a_kernel_that_never_ends_is_ended_and_the_load_goes_on(
    standby: int, ammunition: Ammunition, tmp_path: Path
) -> None:
    async with deadly(tmp_path, standby=standby, hang_after_s=3.0) as gpu:
        async with Load(gpu) as load:
            await strike(gpu, "hang", ammunition)
            await load.flow()
        assert gpu.generation == 2


async def test_sums_that_were_sent_around_the_harm_are_right_or_torn(
    ammunition: Ammunition, tmp_path: Path
) -> None:
    """All in one burst, so that some are behind the same fence as the harm, and some were never enqueued."""
    one_by_one = ConvSpec.symmetric(2)
    async with deadly(tmp_path) as gpu:
        x, w, victim = [await gpu.upload(np.ones((1, 1, 1, 1), np.float32)) for _ in range(3)]
        sums = [await gpu.upload(np.zeros((1, 1, 1, 1), np.float32)) for _ in range(64)]
        adding = [ConvFwd(x=x, w=w, y=y, conv=one_by_one, beta=1.0) for y in sums]
        await asyncio.gather(*(gpu.ask(message) for message in adding))
        ammunition.load()
        burst: list[ConvFwd | Fill] = [*adding[:32], Fill(dst=victim, value=ILLEGAL), *adding[32:]]
        sent = asyncio.gather(*(gpu.submit(message) for message in burst), return_exceptions=True)
        ends = await asyncio.wait_for(sent, PATIENCE_S)
        assert isinstance(ends.pop(32), Receipt)
        assert gpu.generation == 2
        for ref, end in zip(sums, ends, strict=True):
            if isinstance(end, Receipt):
                assert (await gpu.download(ref)).item() == 2
                continue
            assert isinstance(end, OutcomeUnknown)
            with pytest.raises(StaleBufferError, match="torn"):
                await gpu.download(ref)


async def test_a_request_that_harms_two_workers_is_not_given_to_a_third(tmp_path: Path) -> None:
    async with deadly_service(DEVICE, "") as gpu:  # as much ammunition as one likes
        kept, victim = await gpu.upload(np.ones((1, 1, 2, 2), np.float32)), await gpu.empty((1, 1, 2, 2))
        with pytest.raises(QuarantinedRequest):
            await asyncio.wait_for(gpu.ask(Fill(dst=victim, value=ILLEGAL)), PATIENCE_S)
        assert (await gpu.download(kept) == 1).all()
        assert gpu.generation == 3


async def test_the_cause_of_a_restart_names_the_illegal_address(
    ammunition: Ammunition, tmp_path: Path
) -> None:
    async with deadly(tmp_path) as gpu:
        await strike(gpu, "illegal access", ammunition)
        events = gpu.events()
        async with asyncio.timeout(PATIENCE_S):
            seen = [event async for event in _until_restarted(events)]
        await events.aclose()
    causes = [event.cause.cause for event in seen if isinstance(event, Restarting)]
    assert any("ILLEGAL_ADDRESS" in text.upper().replace(" ", "_") for text in causes), causes


async def _until_restarted(events: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for event in events:
        yield event
        if isinstance(event, Restarted):
            return


# Memory.


@contextmanager
def all_memory_taken() -> Iterator[None]:
    """Another process has nearly all of the device's memory, until the end of the block."""
    program = """
import sys
import cupy
runtime, chunk = cupy.cuda.runtime, 1 << 32
while chunk >= 32 << 20:
    try:
        runtime.malloc(chunk)
    except runtime.CUDARuntimeError:
        chunk //= 2
print("full", flush=True)
sys.stdin.read()
"""
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as hog:
        try:
            assert hog.stdout is not None
            assert hog.stdout.readline() == "full\n"
            yield
        finally:
            hog.kill()


@pytest.mark.usefixtures("whole_device")
async def test_memory_that_another_process_has_is_refused_and_there_again_when_it_has_ended() -> None:
    x, w = (np.ones((1, 8, 16, 16), np.float32), np.ones((8, 8, 1, 1), np.float32))
    async with spawn(device=DEVICE, isolation="process") as gpu:
        a, b = await gpu.upload(x), await gpu.upload(w)
        y = await gpu.conv_fwd(a, b, conv=ConvSpec.symmetric(2))
        assert (await gpu.download(y) == 8).all()
        with all_memory_taken():
            with pytest.raises(OutOfMemory):
                await asyncio.gather(*(gpu.empty(BIG) for _ in range(8)))
            assert await gpu.ping() == 1
            z = await gpu.conv_fwd(a, b, conv=ConvSpec.symmetric(2))
            assert (await gpu.download(z) == 8).all()
        refs: list[BufferRef] = [await gpu.empty(BIG) for _ in range(8)]
        await gpu.fill(refs[-1], 3)
        assert (await gpu.download(refs[-1]) == 3).all()
        assert gpu.generation == 1


async def test_an_array_on_the_device_is_refused_since_a_worker_could_not_reach_it() -> None:
    cupy = pytest.importorskip("cupy")
    async with spawn(device=DEVICE, isolation="process") as gpu:
        with pytest.raises(InvalidRequest, match="host"):
            await gpu.upload(cupy.ones((1, 1, 2, 2), "float32"))
        with pytest.raises(InvalidRequest):
            await gpu.view(await gpu.empty((1, 1, 2, 2)))


# What a user's process has of it.


@pytest.fixture(scope="module", params=[0, 1], ids=["alone", "with a standby"])
def verdict(request: pytest.FixtureRequest) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.gpu.worker_program", DEVICE, str(request.param)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_the_service_went_on_through_every_harm(verdict: dict[str, Any]) -> None:
    assert verdict["device"] == DEVICE
    assert verdict["generation"] == 4
    assert verdict["checked"] > 64


def test_the_user_s_process_has_no_library_of_the_device_in_it(verdict: dict[str, Any]) -> None:
    assert verdict["mapped"] == []
    assert verdict["imported"] == []


def test_the_end_of_a_service_leaves_no_process(verdict: dict[str, Any]) -> None:
    assert verdict["left"] == []


# Results.


CASES = {
    "plain": ((2, 8, 14, 12), (16, 8, 3, 3), ConvSpec.symmetric(2, pad=1)),
    "strided": ((2, 8, 15, 13), (8, 8, 3, 3), ConvSpec.symmetric(2, pad=1, stride=2)),
    "dilated": ((1, 8, 16, 16), (8, 8, 3, 3), ConvSpec.symmetric(2, pad=2, dilation=2)),
    "by ones": ((4, 16, 7, 9), (32, 16, 1, 1), ConvSpec.symmetric(2)),
}


async def gradients(
    gpu: CudnnRef, arrays: tuple[np.ndarray, np.ndarray, np.ndarray], conv: ConvSpec, layout: LayoutName
) -> list[np.ndarray]:
    """A convolution and its two gradients."""
    x, w, dy = [await gpu.upload(array, layout=layout) for array in arrays]
    results = [
        await gpu.conv_fwd(x, w, conv=conv),
        await gpu.conv_bwd_data(dy, w, conv=conv, dims=x.spec.dims),
        await gpu.conv_bwd_filter(x, dy, conv=conv, dims=w.spec.dims),
    ]
    return [await gpu.download(ref) for ref in results]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16])
async def test_results_are_the_cpu_engine_s_within_the_bounds_of_rounding(
    dtype: DType, layout: LayoutName, case: str
) -> None:
    dims, filters, conv = CASES[case]
    random = np.random.default_rng([len(case), dims[2]])
    out = conv.output_dims(dims, filters)
    given = [random.standard_normal(shape).astype(dtype.numpy) for shape in (dims, filters, out)]
    x, w, dy = given
    exact = tuple(array.astype(np.float64) for array in given)
    async with spawn(device="cpu") as cpu:
        wanted = await gradients(cpu, (exact[0], exact[1], exact[2]), conv, "NCHW")
    async with spawn(device=DEVICE, isolation="process") as gpu:
        got = await gradients(gpu, (x, w, dy), conv, layout)
    lengths = (math.prod(filters[1:]), filters[0] * math.prod(filters[2:]), out[0] * math.prod(out[2:]))
    for result, truth, length in zip(got, wanted, lengths, strict=True):
        bound = 4 * math.sqrt(length) * UNIT[DType.FLOAT32] + UNIT[dtype]
        assert result.dtype == dtype.numpy
        assert relative_error(result, truth) <= bound
