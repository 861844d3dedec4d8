"""How long the first run of a network takes with each number of samples, in a new service on a GPU.

    python -m benchmarks.first_answers --folder FOLDER --networks resnet50 vit --out benchmarks/results

Networks are files as of `benchmarks.models`. Each is measured in two processes of its own, in process
isolation, after the worker and its builder have started:

- `first_ms`: with an empty plan store, and an empty folder for the kernels that CuPy compiles; one number of
  samples after the other, in the given order. `again_ms`: the run after it, from the same NumPy arrays.
- `stored_ms`: with what the first process has stored, in a new service that has the first number of samples
  only.

`began_s` is when a first run began, by the machine's monotonic clock.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import onnx
from rich.table import Table

from cudnn_actor import ConvFwd, ConvSpec, spawn
from cudnn_actor.models.sizes import sizes_in
from tests.onnx.networks.recipes import inputs_of, read

from .gpu.setting import gpu_versions
from .recording import Row, attempted, keep

__all__ = ["main"]

_COLUMNS = ("load_ms", "first_ms", "again_ms", "stored_load_ms", "stored_ms")


async def _answers(path: str, batches: Sequence[int], folder: str, device: str) -> list[Row]:
    """A row for each number of samples."""
    proto = onnx.load(path)
    store = Path(folder) / "plans"
    found = []
    async with spawn(device=device, isolation="process", plan_store=store, hang_after_s=600.0) as gpu:
        x, w = [await gpu.upload(np.ones(dims, np.float32)) for dims in ((1, 4, 8, 8), (4, 4, 3, 3))]
        y = await gpu.empty((1, 4, 6, 6))
        await gpu.ask(ConvFwd(x=x, w=w, y=y, conv=ConvSpec.symmetric(2)))
        begin = time.monotonic()
        model = await gpu.load(path)
        load_ms = _ms_since(begin)
        for batch in batches:
            inputs = inputs_of(proto, batch)
            begin = time.monotonic()
            await gpu.run(model, inputs)
            row: Row = {
                "batch": batch,
                "began_s": round(begin, 4),
                "first_ms": _ms_since(begin),
                "load_ms": load_ms,
            }
            begin = time.monotonic()
            await gpu.run(model, inputs)
            found.append(row | {"again_ms": _ms_since(begin)})
        await model.warm(sizes_in(model.inputs, inputs_of(proto, batches[0])))  # its preferred plan is stored
    return found


def _ms_since(begin: float) -> float:
    return round((time.monotonic() - begin) * 1e3, 1)


def _rows(path: Path, batches: Sequence[int], device: str) -> Iterator[Row]:
    """The rows of a file, which lacks its weights."""
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / path.name
        onnx.save(read(path), whole)
        environment = {**os.environ, "CUPY_CACHE_DIR": str(Path(folder) / "kernels")}
        cold = _apart([str(whole), batches, folder, device], environment)
        (stored,) = _apart([str(whole), batches[:1], folder, device], environment)
    for row in cold:
        named: Row = {"network": path.name.partition(".")[0], **row}
        if row is cold[0]:
            named |= {"stored_ms": stored["first_ms"], "stored_load_ms": stored["load_ms"]}
        yield named


def _apart(arguments: list[object], environment: dict[str, str]) -> list[Row]:
    command = [sys.executable, "-m", "benchmarks.first_answers", "--side", json.dumps(arguments)]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    rows: list[Row] = json.loads(done.stdout.splitlines()[-1])
    return rows


def sheet(found: Sequence[Row]) -> Table:
    """The results as a table."""
    table = Table("network", "batch", *(each.removesuffix("_ms") for each in _COLUMNS), title="ms")
    for row in found:
        cells = (f"{row[each]:.0f}" if each in row else "" for each in _COLUMNS)
        table.add_row(row["network"], str(row["batch"]), *cells)
    return table


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--folder", type=Path, help="with NETWORK.OPSET.onnx")
    parser.add_argument("--networks", nargs="+", default=["resnet50", "mobilenet_v2", "vit", "bert"])
    parser.add_argument("--opset", type=int, default=23)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 4, 16])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", type=Path, help="directory for the JSON")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side is not None:
        print(json.dumps(asyncio.run(_answers(*json.loads(given.side)))))
        return

    def rows() -> Iterator[Row]:
        for name in given.networks:
            path = given.folder / f"{name}.{given.opset}.onnx"
            yield from attempted(name, functools.partial(_rows, path, given.batches, given.device))

    known = {} if given.device == "cpu" else gpu_versions()
    keep(rows(), sheet, given.out, "first-answers", versions=known, files=given.folder.name)


if __name__ == "__main__":
    main()
