"""`OutOfMemory` says what is taken, what fits, and whether it ever can; empty limits are refused."""

from __future__ import annotations

import os

import numpy as np
import pytest

from cudnn_actor import ConvSpec, DType, InvalidRequest, OutOfMemory
from cudnn_actor.memory.container import available
from cudnn_actor.models import Feature

from .rigs import spawn

pytestmark = pytest.mark.usefixtures("isolation")

MIB = 1 << 20
LIMIT = 5 * MIB
"""Two arenas of 2 MiB: what is left of it cannot be taken."""


def floats(nbytes: int) -> tuple[int]:
    return (nbytes // 4,)


async def test_the_error_says_what_buffers_and_arenas_take_and_what_fits_now() -> None:
    async with spawn(device="cpu", memory_limit=LIMIT) as gpu:
        await gpu.empty(floats(MIB))
        await gpu.empty(floats(2 * MIB))
        with pytest.raises(OutOfMemory, match="at most 1,048,576 fit now; free buffers") as caught:
            await gpu.empty(floats(2 * MIB))
        error = caught.value
        assert (error.requested, error.in_use, error.arena_bytes) == (2 * MIB, 3 * MIB, 4 * MIB)
        assert (error.limit, error.most, error.largest) == (LIMIT, 4 * MIB, MIB)
        assert error.retry_safe


async def test_what_fits_now_fits_and_a_byte_more_does_not() -> None:
    async with spawn(device="cpu", memory_limit=LIMIT) as gpu:
        first = await gpu.empty(floats(3 * MIB))
        for _ in range(5):
            with pytest.raises(OutOfMemory) as caught:
                await gpu.empty(floats(4 * MIB))
            largest = caught.value.largest
            assert largest is not None
            if largest == 0:
                break
            with pytest.raises(OutOfMemory):
                await gpu.empty((largest + 1,), dtype="uint8")
            await gpu.empty((largest,), dtype="uint8")
        assert largest == 0
        await gpu.free(first)
        await gpu.empty(floats(3 * MIB))


async def test_what_the_limit_never_allows_is_not_safe_to_send_again() -> None:
    async with spawn(device="cpu", memory_limit=LIMIT) as gpu:
        for nbytes in (4 * MIB + 4, LIMIT, 1 << 40):
            with pytest.raises(OutOfMemory, match="allows 4,194,304 at most; raise memory_limit") as caught:
                await gpu.empty(floats(nbytes))
            assert not caught.value.retry_safe
        whole = await gpu.empty(floats(4 * MIB))
        with pytest.raises(OutOfMemory) as caught:
            await gpu.empty(floats(4 * MIB))
        assert caught.value.retry_safe
        await gpu.free(whole)
        await gpu.empty(floats(4 * MIB))


async def test_a_workspace_over_its_limit_names_that_limit_and_never_fits() -> None:
    async with spawn(device="cpu", workspace_limit=1) as gpu:
        x = await gpu.upload(np.ones((1, 2, 8, 8), np.float32))
        w = await gpu.upload(np.ones((2, 2, 3, 3), np.float32))
        with pytest.raises(OutOfMemory, match="raise workspace_limit") as caught:
            await gpu.conv_fwd(x, w, conv=ConvSpec.symmetric(2))
        assert caught.value.workspace
        assert not caught.value.retry_safe
        x_bytes, w_bytes, y_bytes = 512, 144, 288
        assert caught.value.in_use == x_bytes + w_bytes + y_bytes
        assert caught.value.arena_bytes == 64 * MIB


@pytest.mark.parametrize("limit", [0, 1, 2 * MIB - 1])
def test_a_limit_that_holds_no_buffer_is_refused(limit: int) -> None:
    with pytest.raises(InvalidRequest, match="memory_limit"):
        spawn(device="cpu", memory_limit=limit)


async def test_the_least_limit_holds_a_buffer() -> None:
    async with spawn(device="cpu", memory_limit=2 * MIB) as gpu:
        await gpu.empty(floats(2 * MIB))


async def test_what_the_machine_never_has_is_told_to_send_less_and_nothing_that_cannot_help() -> None:
    async with spawn(device="cpu", memory_limit=1 << 46) as gpu:
        await gpu.empty((1,))
        with pytest.raises(OutOfMemory) as caught:
            await gpu.empty((1 << 43,))
    error = caught.value
    assert error.most == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert not error.retry_safe
    assert str(error) == (
        f"out of memory: {4 << 43:,} bytes requested, and the machine has {error.most:,}; "
        "send less at once (a smaller batch)"
    )


async def test_a_buffer_is_bound_by_the_memory_that_is_available() -> None:
    if available() != available(swapping=True):
        pytest.skip("the machine may swap, so it may have room for as many bytes as it has")
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    # Whole steps of an arena. Some of it is in use, by this process.
    nbytes = machine // (2 * MIB) * (2 * MIB)
    async with spawn(device="cpu", memory_limit=1 << 60) as gpu:
        with pytest.raises(OutOfMemory, match="the system has no more, and at most") as caught:
            await gpu.empty(floats(nbytes))
        assert (caught.value.requested, caught.value.in_use) == (nbytes, 0)
        assert caught.value.largest is not None
        assert caught.value.largest < nbytes
        assert caught.value.retry_safe
        assert (await gpu.download(await gpu.upload(np.ones(8, np.float32)))).sum() == 8


VECTOR = Feature(name="x", dtype=DType.FLOAT32, dims=("N", 4))


async def test_staging_arrays_count_towards_the_limit_as_long_as_they_are_there() -> None:
    async with spawn(device="cpu", memory_limit=8 * MIB) as gpu:
        with pytest.raises(OutOfMemory, match="memory_limit=8,388,608 allows") as caught:
            await gpu.staging(VECTOR, N=2_000_000)
        assert (caught.value.requested, caught.value.most, caught.value.in_use) == (32_000_000, 8 * MIB, 0)
        assert not caught.value.retry_safe
        lent = await gpu.staging(VECTOR, N=5 * MIB // 16)
        for _ in range(2):
            with pytest.raises(OutOfMemory, match="at most 3,145,728 fit now") as caught:
                await gpu.staging(VECTOR, N=4 * MIB // 16)
            assert (caught.value.limit, caught.value.in_use, caught.value.largest) == (
                8 * MIB,
                5 * MIB,
                3 * MIB,
            )
            assert caught.value.retry_safe
        with pytest.raises(OutOfMemory) as caught:
            await gpu.empty(floats(4 * MIB))
        assert (caught.value.in_use, caught.value.largest) == (5 * MIB, 2 * MIB)
        await gpu.empty(floats(2 * MIB))
        del lent
        await gpu.empty(floats(6 * MIB))
        with pytest.raises(OutOfMemory):
            await gpu.staging(VECTOR, N=1)


async def test_an_empty_arena_makes_room_for_a_staging_array() -> None:
    async with spawn(device="cpu", memory_limit=8 * MIB) as gpu:
        await gpu.free(await gpu.empty(floats(8 * MIB)))
        assert (await gpu.staging(VECTOR, N=8 * MIB // 16)).nbytes == 8 * MIB


async def test_staging_arrays_are_bound_by_the_memory_of_the_machine() -> None:
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    async with spawn(device="cpu", memory_limit=1 << 60) as gpu:
        with pytest.raises(OutOfMemory, match="the machine has") as caught:
            await gpu.staging(VECTOR, N=2 * machine // 16)
        assert caught.value.in_use == 0
        assert not caught.value.retry_safe
        assert (await gpu.staging(VECTOR, N=8)).shape == (8, 4)


async def test_staging_arrays_are_bound_by_the_memory_that_is_available() -> None:
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    async with spawn(device="cpu", memory_limit=1 << 60) as gpu:
        with pytest.raises(OutOfMemory) as caught:
            await gpu.staging(VECTOR, N=machine // 16)  # some of it is in use, by this process at least
        assert (caught.value.requested, caught.value.in_use) == (machine // 16 * 16, 0)
        assert caught.value.largest is not None
        assert caught.value.largest < machine
