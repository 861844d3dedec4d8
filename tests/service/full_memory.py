"""A service whose whole memory one view keeps: whether the bytes are free is whether there is room."""

from __future__ import annotations

from typing import Any

import pytest

from cudnn_actor import CudnnRef, OutOfMemory, StaleBufferError

FULL = (1, 1, 512, 1024)
"""Dims that fill `LIMIT` with float32."""
LIMIT = 2 << 20
"""Bytes, for `spawn(memory_limit=)`."""


async def fill_memory(gpu: CudnnRef) -> Any:
    """A view of a buffer that takes all the memory there may be, and has been freed."""
    ref = await gpu.empty(FULL)
    view = await gpu.view(ref)
    await gpu.fill(ref, 5)
    await gpu.free(ref)
    with pytest.raises(StaleBufferError, match="freed"):
        await gpu.view(ref)
    return view


async def has_room(gpu: CudnnRef) -> bool:
    """Whether all the memory can be had; it is given back at once."""
    try:
        await gpu.free(await gpu.empty(FULL))
    except OutOfMemory:
        return False
    return True
