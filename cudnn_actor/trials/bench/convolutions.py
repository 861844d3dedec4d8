"""Convolutions of a realistic size, and a crash, as measured by the caller."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from cudnn_actor import ConvBwdData, ConvBwdFilter, ConvFwd, ConvSpec, Fault, FaultPlan, spawn
from cudnn_actor.trials.bench.hops import trivial_convolution

__all__ = ["convolutions", "crash"]

_DIRECTIONS = ("forward", "gradient by input", "gradient by filter")


async def convolutions(repeats: int) -> dict[str, list[float]]:
    """Milliseconds of a 3×3 convolution with 64 filters, in each direction."""
    generator = np.random.default_rng(0)
    conv = ConvSpec.symmetric(2, pad=1)
    async with spawn(device="cpu", isolation="thread") as gpu:
        x = await gpu.upload(generator.normal(size=(1, 64, 56, 56)).astype("float32"))
        w = await gpu.upload(generator.normal(size=(64, 64, 3, 3)).astype("float32"))
        y = await gpu.conv_fwd(x, w, conv=conv)
        dx, dw = await gpu.empty(x.spec.dims), await gpu.empty(w.spec.dims)
        messages = (
            ConvFwd(x=x, w=w, y=y, conv=conv),
            ConvBwdData(dy=y, w=w, dx=dx, conv=conv),
            ConvBwdFilter(x=x, dy=y, dw=dw, conv=conv),
        )
        await gpu.warm(messages)
        return {
            name: await _milliseconds(lambda message=message: gpu.ask(message), repeats)  # type: ignore[misc]
            for name, message in zip(_DIRECTIONS, messages, strict=True)
        }


async def _milliseconds(request: Callable[[], Awaitable[Any]], count: int) -> list[float]:
    await request()
    taken = []
    for _ in range(count):
        began = time.perf_counter()
        await request()
        taken.append(1e3 * (time.perf_counter() - began))
    return taken


async def crash() -> float:
    """Milliseconds from sending a request that fails with a sticky error to the reply of its second run."""
    async with spawn(
        device="cpu", isolation="thread", faults=FaultPlan().at(2, Fault.STICKY, of=ConvFwd)
    ) as gpu:
        trivial = await trivial_convolution(gpu)
        await gpu.ask(trivial)
        began = time.perf_counter()
        await gpu.ask(trivial)
        return 1e3 * (time.perf_counter() - began)
