"""Arrays to the device and back, beside PyTorch's ways."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack
from typing import Any

import msgspec
import numpy as np

from benchmarks.gpu.pytorch import Eager, eager
from benchmarks.gpu.rates import on_loop
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.sheet import Sheet, median, number, ratio
from benchmarks.gpu.stage import random_values
from cudnn_actor import CudnnRef
from cudnn_actor.protocol.types.tensor import LayoutName

__all__ = ["SIZES", "Moved", "Transfers", "measure", "sheets"]

SIZES = {"1 MiB": 1, "64 MiB": 64, "1 GiB": 1024}
_QUICK_SIZES = {"1 MiB": 1}
LAYOUTS: tuple[LayoutName, ...] = ("NCHW", "NHWC")
WAYS = ("actor up", "PyTorch up", "pinned up", "actor down", "PyTorch down", "pinned down")
_OUTLIVE = {"1 MiB": 20, "64 MiB": 7, "1 GiB": 3}


class Moved(msgspec.Struct, kw_only=True):
    """Arrays of one size, C-contiguous on the host, and buffers of one layout; GB/s a round, by the way."""

    size: str
    layout: LayoutName
    gb_per_s: dict[str, list[float]] = {}


class Transfers(msgspec.Struct, kw_only=True):
    """The record of this part."""

    rows: list[Moved] = []


def measure(setting: Setting) -> Transfers:
    """Blocks for a quarter of a minute."""
    with ExitStack() as stack:
        torch = stack.enter_context(eager(setting.ordinal)) if setting.on_gpu else None
        return on_loop("asyncio", _all(setting, torch))  # type: ignore[no-any-return]


async def _all(setting: Setting, torch: Eager | None) -> Transfers:
    found = Transfers()
    async with setting.service() as gpu:
        for size, mebibytes in setting.choose(SIZES, _QUICK_SIZES).items():
            values = random_values(mebibytes << 18, "float32").reshape(-1, 64, 64, 64)
            for layout in LAYOUTS:
                setting.say(f"transfers, {size}, {layout}")
                row = Moved(size=size, layout=layout)
                found.rows.append(row)
                theirs = None if torch is None else _Theirs(torch, values, layout)
                for _ in range(setting.choose(_OUTLIVE[size], 2)):
                    await _one_round(gpu, values, row, theirs)
    return found


async def _one_round(gpu: CudnnRef, values: np.ndarray, row: Moved, theirs: _Theirs | None) -> None:
    if theirs is not None:
        for way, move in theirs.ways().items():
            row.gb_per_s.setdefault(way, []).append(theirs.gb_per_s(move))
    up, ref = await _gb_per_s(lambda: gpu.upload(values, layout=row.layout), values.nbytes)
    down, _ = await _gb_per_s(lambda: gpu.download(ref), values.nbytes)
    await gpu.free(ref)
    row.gb_per_s.setdefault("actor up", []).append(up)
    row.gb_per_s.setdefault("actor down", []).append(down)


async def _gb_per_s(move: Callable[[], Awaitable[Any]], nbytes: int) -> tuple[float, Any]:
    began = time.perf_counter()
    result = await move()
    return nbytes / (time.perf_counter() - began) / 1e9, result


class _Theirs:
    """PyTorch's ways with the same array: to and from memory as NumPy has it, and pinned memory."""

    def __init__(self, torch: Eager, values: np.ndarray, layout: str) -> None:
        self._torch = torch
        library = torch.torch
        self._order = library.channels_last if layout == "NHWC" else library.contiguous_format
        self._host = library.from_numpy(values)
        self._pinned = library.empty(values.shape, dtype=library.float32, pin_memory=True)
        self._pinned.copy_(self._host)
        self._there = self._host.cuda().contiguous(memory_format=self._order)

    def ways(self) -> dict[str, Callable[[], Any]]:
        """The ways that are timed, by name."""
        return {
            "PyTorch up": lambda: self._host.cuda().contiguous(memory_format=self._order),
            "pinned up": lambda: self._pinned.cuda(non_blocking=True).contiguous(memory_format=self._order),
            "PyTorch down": lambda: self._there.contiguous().cpu().numpy(),
            "pinned down": lambda: self._pinned.copy_(self._there.contiguous(), non_blocking=True),
        }

    def gb_per_s(self, move: Callable[[], Any]) -> float:
        """The GB per second of one way. Blocks."""
        self._torch.wait()
        began = time.perf_counter()
        move()
        self._torch.wait()
        return float(self._host.nbytes) / (time.perf_counter() - began) / 1e9


def sheets(found: Transfers) -> Iterator[Sheet]:
    """A row for each size and layout."""
    rows = []
    for row in found.rows:
        known = row.gb_per_s
        rows.append(
            (
                f"{row.size}, {row.layout}",
                *(number(median(known.get(way, []))) for way in WAYS[:3]),
                number(ratio(known["actor up"], known.get("PyTorch up", [])), 2),
                *(number(median(known.get(way, []))) for way in WAYS[3:]),
                number(ratio(known["actor down"], known.get("PyTorch down", [])), 2),
            )
        )
    yield Sheet(
        "Transfers, GB/s",
        ("", "upload", "PyTorch", "pinned", "ratio", "download", "PyTorch", "pinned", "ratio"),
        tuple(rows),
        "The array on the host is a NumPy array, C-contiguous in N, C, H, W. The buffer is new. NHWC: the "
        "values are put into that order on the way. PyTorch: `from_numpy(a).cuda()` and `.cpu()`. Pinned: "
        "the same from and to pinned memory, which the caller would have to have. Ratio: ours over "
        "PyTorch's.",
    )
