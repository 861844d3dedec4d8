"""What a request of a deployed model costs beside its run on the device, and where: stage by stage.

    python -m benchmarks.stages --folder FOLDER --opset 23 --networks resnet50 vit --out benchmarks/results

Networks are files as of `benchmarks.models`, for one sample. A row for each network and isolation:

- `device_us`: a run on the device, from its start to its end.
- `request_us` and `numpy_us`: one request at a time, with inputs and outputs on the device, and from NumPy to
  NumPy: p50 and p90. `over_us` is the p50 of the former, less `device_us`.
- `per_s`: samples a second in runs of `--batch` samples, with one, two and three in flight, from NumPy and
  from `gpu.staging`.
- `floor_us`, in process isolation: what a request to a plain process costs beside such a run, the least that
  any second process costs here. Each way is named by who sleeps: see `second_process`.
- `stages_us`, in process isolation: when a request on the device reaches each stage, since it was asked; the
  median of the requests. A stamp takes about a microsecond, so these requests are slower than the others.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
from rich.table import Table

from cudnn_actor import CudnnRef, spawn
from cudnn_actor.messages import RunModel
from cudnn_actor.models import Model
from cudnn_actor.service import Spawning
from tests.onnx.networks.recipes import inputs_of, read

from .gpu.setting import gpu_versions
from .recording import Row, attempted, keep
from .second_process import request_floors
from .stages_side import STAMPS, stages_of, stamped_caller, stamped_service

__all__ = ["NETWORKS", "main", "on_device", "request_us", "stages_of"]

NETWORKS = Path(__file__).parents[1] / "tests" / "onnx" / "networks" / "data"
_WARM = 20
_IN_FLIGHT = (1, 2, 3)
Isolation = Literal["thread", "process"]
Arrays = dict[str, np.ndarray]


async def request_us(call: Callable[[], Awaitable[object]], runs: int) -> dict[str, float]:
    """Percentiles of requests, one at a time."""
    took = []
    for _ in range(_WARM + runs):
        begin = time.perf_counter()
        await call()
        took.append(time.perf_counter() - begin)
    took = sorted(took[_WARM:])
    return {"p50": round(statistics.median(took) * 1e6, 1), "p90": round(took[runs * 9 // 10] * 1e6, 1)}


async def on_device(gpu: CudnnRef, model: Model, inputs: Arrays) -> RunModel:
    """A run with its inputs and outputs on the device."""
    given = {name: await gpu.upload(array) for name, array in inputs.items()}
    outputs = await gpu.run(model, given, keep=[each.name for each in model.outputs])
    return RunModel.of(model.ref, given, outputs)


async def _per_s(gpu: CudnnRef, model: Model, inputs: Arrays, batch: int, seconds: float) -> Row:
    """Samples a second for each number of runs in flight, from NumPy and from staging memory."""
    lent: list[Arrays] = []
    for _ in range(max(_IN_FLIGHT)):
        arrays: Arrays = {}
        for each in model.inputs:
            named = {dim: batch for dim in each.dims or () if isinstance(dim, str)}
            arrays[each.name] = await gpu.staging(each, **named)
            arrays[each.name][...] = inputs[each.name]
        lent.append(arrays)
    found: Row = {}
    for way, given in (("numpy", [inputs]), ("staging", lent)):
        for count in _IN_FLIGHT:
            runs, begin = [0], time.perf_counter()

            async def client(arrays: Arrays, runs: list[int], end: float) -> None:
                while time.perf_counter() < end or not runs[0]:
                    await gpu.run(model, arrays)
                    runs[0] += 1

            clients = itertools.islice(itertools.cycle(given), count)
            await asyncio.gather(*(client(arrays, runs, begin + seconds) for arrays in clients))
            found[f"{way}, {count}"] = round(runs[0] * batch / (time.perf_counter() - begin), 1)
    return found


async def _costs(path: str, isolation: Isolation, given: argparse.Namespace, store: Path) -> Row:
    proto = onnx.load(path)
    inputs, many = inputs_of(proto, 1), inputs_of(proto, given.batch)
    async with spawn(device=given.device, isolation=isolation, plan_store=store, hang_after_s=600.0) as gpu:
        model = await gpu.load(path)
        message = await on_device(gpu, model, inputs)
        request = await request_us(lambda: gpu.ask(message), given.runs)
        host = await request_us(lambda: gpu.run(model, inputs), given.runs)
        explained = await model.explain(inputs, measure=True)
        device_us = explained.run_us
        await gpu.run(model, many)
        per_s = await _per_s(gpu, model, many, given.batch, given.seconds)
        device_many_us = (await model.explain(many, measure=True)).run_us
    assert device_us is not None
    assert device_many_us is not None
    row: Row = {
        "network": Path(path).stem.split(".")[0],
        "isolation": isolation,
        "device_us": round(device_us, 1),
        "request_us": request,
        "over_us": round(request["p50"] - device_us, 1),
        "numpy_us": host,
        "batch": given.batch,
        "device_per_s": round(given.batch / device_many_us * 1e6, 1),
        "per_s": per_s,
    }
    if isolation == "process":
        row["floor_us"] = await request_floors(given.device, len(explained.pieces), device_us, given.runs)
    return row


async def _stamped(path: str, given: argparse.Namespace, store: Path, folder: Path) -> None:
    """Send requests whose stamps are in `STAMPS` and, once this has returned, in the folder."""
    service = stamped_service(given.device, folder, plan_store=store)
    with stamped_caller():
        async with Spawning(service) as gpu:
            model = await gpu.load(path)
            message = await on_device(gpu, model, inputs_of(onnx.load(path), 1))
            for number in range(_WARM + given.runs):
                if number == _WARM:
                    STAMPS.clear()
                await gpu.ask(message)
            asked = list(STAMPS)
    (folder / "caller.json").write_text(json.dumps(asked))


def _row(path: Path, isolation: Isolation, given: argparse.Namespace, store: Path) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as name:
        folder, file = Path(name), str(Path(name) / path.name)
        onnx.save(read(path), file)
        row = asyncio.run(_costs(file, isolation, given, store))
        if isolation == "process":
            asyncio.run(_stamped(file, given, store, folder))
            stamps = [each for one in folder.glob("*.json") for each in json.loads(one.read_text())]
            row["stages_us"] = stages_of(stamps)
        yield row


def rows(paths: Sequence[Path], given: argparse.Namespace) -> Iterator[Row]:
    """Yields a row for each network and isolation."""
    with tempfile.TemporaryDirectory() as name:
        for path in paths:
            for isolation in given.isolations:
                part = functools.partial(_row, path, isolation, given, Path(name))
                yield from attempted(f"{path.name}, {isolation}", part)


def sheet(found: list[Row]) -> Table:
    """The table for a terminal."""
    table = Table(
        "network", "isolation", "device", "request", "over", "NumPy", "samples a second", title="us"
    )
    for row in found:
        per_s = ", ".join(f"{name}: {rate:,.0f}" for name, rate in row["per_s"].items())
        request, host = (f"{row[each]['p50']:,.0f}" for each in ("request_us", "numpy_us"))
        costs = (f"{row['device_us']:,.1f}", request, f"{row['over_us']:,.1f}", host)
        table.add_row(row["network"], row["isolation"], *costs, per_s)
        if "stages_us" in row:
            stages = "; ".join(f"{name} {at:,.0f}" for name, at in row["stages_us"].items())
            table.add_row("", "", "", "", "", "", stages)
        if "floor_us" in row:
            floors = ((name, each["p50"]) for name, each in row["floor_us"].items() if name != "device_us")
            table.add_row("", "floor", "", "", "", "", "; ".join(f"{way}: {us:,.0f}" for way, us in floors))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.stages", description=__doc__)
    parser.add_argument("--folder", type=Path, default=NETWORKS, help="with NETWORK.OPSET.onnx")
    parser.add_argument("--networks", nargs="+", default=["resnet50", "vit"])
    parser.add_argument("--opset", type=int, default=20)
    parser.add_argument(
        "--isolations", nargs="+", default=["process", "thread"], choices=["process", "thread"]
    )
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--batch", type=int, default=32, help="samples of a run with others in flight")
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=0.5, help="for how long runs are in flight")
    parser.add_argument("--out", type=Path, help="directory for the JSON")
    given = parser.parse_args()
    paths = [given.folder / f"{name}.{given.opset}.onnx" for name in given.networks]
    versions: dict[str, Any] = {} if given.device == "cpu" else gpu_versions()
    keep(rows(paths, given), sheet, given.out, "stages", versions=versions)


if __name__ == "__main__":
    main()
