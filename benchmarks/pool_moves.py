"""How fast `Pool.move` moves a buffer from one device to another, and back.

    python -m benchmarks.pool_moves --devices cuda:0 cuda:1 --out benchmarks/results

For each size, medians of the rounds, from the call to its answer: `ms`, and `gb_per_s` (10⁹ bytes a second).
"directly" is the way from device to device, whatever the size; where the devices cannot, "by the host" has
all rows. "download" and "upload" are the two halves of the way by the host, alone. The values are compared
after each round.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from rich.table import Table

from cudnn_actor.pool import Pool, moving, spawn_pool

from .pool import versions_of
from .recording import Row, keep

__all__ = ["main", "rows", "sheet"]


async def _moves(pool: Pool, nbytes: int, rounds: int) -> list[Row]:
    took = defaultdict[str, list[float]](list)
    values = np.random.default_rng(0).integers(0, 256, nbytes, np.uint8)

    def note(way: str, began: float) -> None:
        took[way].append(time.perf_counter() - began)

    ref = await pool.on(0).upload(values)
    for turn in range(rounds + 1):
        for least in (0, nbytes + 1):
            moving.DIRECT_BYTES = least
            for to in (1, 0):
                before, began = pool.statistics().direct_moves, time.perf_counter()
                ref = await pool.move(ref, to=to)
                way = "directly" if pool.statistics().direct_moves > before else "by the host"
                note(f"move {1 - to} to {to}, {way}", began)
        began = time.perf_counter()
        found = await pool.download(ref)
        note("download", began)
        assert np.array_equal(found, values), "the values have moved"
        began = time.perf_counter()
        other = await pool.on(1).upload(values)
        note("upload", began)
        await pool.free(other)
        if turn == 0:  # the memory is there from here on
            took.clear()
    await pool.free(ref)
    return [
        {
            "what": way,
            "bytes": nbytes,
            "ms": round(1e3 * statistics.median(each), 3),
            "gb_per_s": round(nbytes / statistics.median(each) / 1e9, 3),
        }
        for way, each in took.items()
    ]


def rows(devices: list[str], sizes: list[int], rounds: int) -> Iterator[Row]:
    """Yields a row for each size and way. Blocks for it. `devices` are two."""

    async def measured() -> list[Row]:
        async with spawn_pool(devices, isolation="process") as pool:
            return [row for nbytes in sizes for row in await _moves(pool, nbytes, rounds)]

    before = moving.DIRECT_BYTES
    try:
        yield from asyncio.run(measured())
    finally:
        moving.DIRECT_BYTES = before


def sheet(found: list[Row]) -> Table:
    """The table for a terminal."""
    columns = ("what", "bytes", "ms", "gb_per_s")
    table = Table(*columns, title="Moves")
    for row in found:
        table.add_row(*(str(row[name]) for name in columns))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.pool_moves", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--devices", nargs=2, default=["cpu", "cpu"])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1 << 16, 1 << 20, 16 << 20, 256 << 20])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--out", type=Path, help="directory for the JSON")
    given = parser.parse_args()
    found = rows(given.devices, given.sizes, given.rounds)
    keep(found, sheet, given.out, "pool_moves", devices=given.devices, versions=versions_of(given.devices))


if __name__ == "__main__":
    main()
