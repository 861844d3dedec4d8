"""Networks as ONNX files: their import, first result and runs, beside PyTorch.

    python -m benchmarks.models --out benchmarks/results
    python -m benchmarks.models --folder FOLDER --batches 1 32 --device cuda:0 --out benchmarks/results

Without a folder, the small networks of `tests/onnx/networks`; `python -m tests.onnx.networks.export --full`
writes those in their usual size. Each file is measured in processes of its own:

- cold: a new service with an empty plan store, and an empty folder for the kernels that CuPy compiles; its
  worker has started, and nothing has been built.
  `load` reads the file; `import` makes the graph for a batch size; `first` is the first run with this batch
  size, in which the graph is made again, weights are uploaded and plans are built.
- stored: the first run of a new service in another process, with what the first one stored.
- PyTorch, where it is installed: the network's own operators, eagerly and by `torch.compile`.

A run is timed with its inputs on the device and its outputs left there, until the device has finished: the
median, of the service in a process of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import importlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from rich.table import Table

from cudnn_actor import CudnnRef, TensorSpec, spawn
from cudnn_actor.cli.bench.machine import machine, versions
from cudnn_actor.models import Model, NeedsValues
from cudnn_actor.onnx import OnnxModel
from tests.onnx.networks.programs import program, tensors
from tests.onnx.networks.recipes import inputs_of, read

from .gpu.setting import gpu_versions
from .recording import Row, attempted, keep

_SMALL = Path(__file__).parents[1] / "tests" / "onnx" / "networks" / "data"
_COLUMNS = ("load_ms", "import_ms", "first_ms", "run_ms", "stored_first_ms", "eager_ms", "compiled_ms")


def ms(call: Callable[[], Any]) -> tuple[float, Any]:
    """Milliseconds of a call, and its result."""
    begin = time.perf_counter()
    result = call()
    return round((time.perf_counter() - begin) * 1e3, 3), result


def median_ms(samples: Sequence[float]) -> float:
    """The median of seconds, in milliseconds."""
    return round(statistics.median(samples) * 1e3, 3)


def import_ms(source: OnnxModel, inputs: dict[str, np.ndarray]) -> float:
    """How long the graph for these inputs takes to make."""
    specs = {name: TensorSpec.packed(array.shape, array.dtype) for name, array in inputs.items()}
    try:
        return ms(lambda: source.specialised(specs, {}))[0]
    except NeedsValues as needs:
        values = {name: inputs[name] for name in needs.names}
        return ms(lambda: source.specialised(specs, values))[0]


class Job(NamedTuple):
    """What one process measures: of which file with weights, with a folder for what is stored."""

    path: str
    batches: list[int]
    device: str
    folder: str
    runs: int


async def service(job: Job) -> Row:
    """What a new service measures of a file, for each batch size."""
    found: Row = {}
    proto = onnx.load(job.path)
    store = Path(job.folder) / "plans"
    async with spawn(device=job.device, isolation="process", plan_store=store, hang_after_s=600.0) as gpu:
        await gpu.free(await gpu.upload(np.zeros(1, np.float32)))  # the worker has started, and runs requests
        begin = time.perf_counter()
        model = await gpu.load(job.path)
        found["load_ms"] = median_ms([time.perf_counter() - begin])
        source = OnnxModel(job.path)
        for batch in job.batches:
            inputs = inputs_of(proto, batch)
            row = found[str(batch)] = {"import_ms": import_ms(source, inputs)}
            begin = time.perf_counter()
            await gpu.run(model, inputs)
            row["first_ms"] = median_ms([time.perf_counter() - begin])
            row["run_ms"] = median_ms([each async for each in _runs(gpu, model, inputs, job.runs)])
    return found


async def _runs(gpu: CudnnRef, model: Model, inputs: dict[str, np.ndarray], runs: int) -> Any:
    """Seconds of each run, with inputs and outputs on the device."""
    given = {name: await gpu.upload(array) for name, array in inputs.items()}
    names = [each.name for each in model.outputs]
    for number in range(runs + 2):
        begin = time.perf_counter()
        outputs = await gpu.run(model, given, keep=names)
        seconds = time.perf_counter() - begin
        for ref in outputs.values():
            await gpu.free(ref)
        if number >= 2:
            yield seconds
    for ref in given.values():
        await gpu.free(ref)


def torch_side(job: Job) -> Row:
    """PyTorch's times for each batch size."""
    torch = importlib.import_module("torch")
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    where = "cpu" if job.device == "cpu" else "cuda"
    eager = program(_program(Path(job.path)), where)
    ways = {"eager_ms": eager, "compiled_ms": torch.compile(eager, mode="reduce-overhead")}
    proto, found = onnx.load(job.path), Row()
    with torch.no_grad():
        for batch in job.batches:
            torch.compiler.reset()
            given = tensors(inputs_of(proto, batch).values(), where)
            found[str(batch)] = {
                name: _torch_ms(torch, functools.partial(way, *given), where, job.runs)
                for name, way in ways.items()
            }
    return found


def _torch_ms(torch: Any, call: Callable[[], Any], where: str, runs: int) -> float:
    def run() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        call()
        if where == "cuda":
            torch.cuda.synchronize()

    for _ in range(3):
        run()
    return median_ms([ms(run)[0] / 1e3 for _ in range(runs)])


def _program(path: Path) -> Path:
    return path.with_name(f"{path.name.partition('.')[0]}.json")


def apart(what: str, job: Job) -> Row:
    """What a process of its own measures, whose kernels are kept in the job's folder. Blocks."""
    command = [sys.executable, "-m", "benchmarks.models", "--side", what, json.dumps(job)]
    environment = {**os.environ, "CUPY_CACHE_DIR": str(Path(job.folder) / "kernels")}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


def measure(
    path: Path, batches: Sequence[int], device: str, runs: int, sides: Sequence[str]
) -> Iterator[Row]:
    """A row for each batch size of a network's file, which lacks its weights."""
    name, opset = path.stem.split(".")
    rows: dict[str, Row] = {
        str(batch): {"network": name, "opset": int(opset), "batch": batch} for batch in batches
    }
    with tempfile.TemporaryDirectory() as folder:
        job = Job(str(Path(folder) / path.name), list(batches), device, folder, runs)
        onnx.save(read(path), job.path)
        _program(Path(job.path)).write_bytes(_program(path).read_bytes())
        if "service" in sides:
            cold, stored = apart("service", job), apart("service", job)
            for batch, row in rows.items():
                row.update({"load_ms": cold["load_ms"], **cold[batch]})
                row["stored_first_ms"] = stored[batch]["first_ms"]
        if "torch" in sides and importlib.util.find_spec("torch") is not None:
            for found in attempted(f"{path.name} in PyTorch", lambda: [apart("torch", job)]):
                if "error" in found:
                    yield found
                else:
                    for batch, row in rows.items():
                        row.update(found[batch])
    yield from rows.values()


def sheet(found: Sequence[Row]) -> Table:
    """The results as a table."""
    table = Table("network", "opset", "batch", *(each.removesuffix("_ms") for each in _COLUMNS), title="ms")
    for row in found:
        cells = (f"{row[each]:.2f}" if each in row else "" for each in _COLUMNS)
        table.add_row(row["network"], str(row["opset"]), str(row["batch"]), *cells)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--folder", type=Path, default=_SMALL, help="with NETWORK.OPSET.onnx and NETWORK.json"
    )
    parser.add_argument("--networks", nargs="+", help="all in the folder unless given")
    parser.add_argument("--opset", type=int, default=20)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--sides", nargs="+", choices=("service", "torch"), default=["service", "torch"])
    parser.add_argument("--out", type=Path, help="directory for the JSON")
    parser.add_argument("--side", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side is not None:
        what, text = given.side
        job = Job(*json.loads(text))
        print(json.dumps(torch_side(job) if what == "torch" else asyncio.run(service(job))))
        return
    paths = sorted(given.folder.glob(f"*.{given.opset}.onnx"))
    names = given.networks or [path.name.split(".")[0] for path in paths]
    chosen = [path for name in names for path in paths if path.name.split(".")[0] == name]
    if not chosen:
        parser.error(f"no such networks of opset {given.opset} in {given.folder}")
    known = versions(("numpy", "msgspec", "onnx", "torch"))
    known |= {} if given.device == "cpu" else gpu_versions()

    def rows() -> Iterator[Row]:
        for path in chosen:
            measured = functools.partial(measure, path, given.batches, given.device, given.runs, given.sides)
            yield from attempted(path.name, measured)

    about = {"machine": machine(), "device": given.device, "files": given.folder.name}
    keep(rows(), sheet, given.out, "models", versions=known, **about)


if __name__ == "__main__":
    main()
