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
- tuned, with `--tune`: the same after `load(tune=True)`; `tune_s` is how long that took, `stored_tune_s` how
  long it takes in the other process, which finds it in the store, and `changed` how many pieces have other
  plans.
- With `--prepared`, all plans are built beforehand, of all networks side by side while PyTorch compiles. Then
  there is no cold start, and one process measures a file instead of two.
- PyTorch, where it is installed: the network's own operators, eagerly and by `torch.compile`. All networks
  are compiled side by side, before anything is measured. Networks in `--max-autotune` are compiled in that
  mode, too, for their largest batch size; its columns begin with `autotuned_`. With `--baseline module` it
  runs the module of torchvision or transformers instead of the program that `torch.export` made of it, with
  random weights and without a mask, so that its attention can be flash attention, and may not be products
  and a softmax; `compiled_attention` has the names of the kernels of attention that ran, `compiled_kernels`
  the longest of all, with microseconds of a run.

A run is timed with its inputs on the device and its outputs left there, until the device has finished, and
from NumPy to NumPy (of PyTorch: from pageable memory to pageable memory): the median, of the service in a
process of its own. `device` is what a run takes on the device: here from its start to its end, of PyTorch the
sum of its kernels.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import functools
import importlib
import importlib.util
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import onnx
from rich.table import Table

from cudnn_actor import CudnnRef, TensorSpec, spawn
from cudnn_actor.messages import RunModel
from cudnn_actor.models import Model
from cudnn_actor.models.sizes import sizes_in
from cudnn_actor.models.source import NeedsValues
from cudnn_actor.onnx import OnnxModel
from cudnn_actor.trials.bench.record import machine, versions
from tests.onnx.networks.programs import module, program, tensors
from tests.onnx.networks.recipes import inputs_of, read

from .gpu.setting import gpu_versions
from .recording import Row, attempted, keep

_SMALL = Path(__file__).parents[1] / "tests" / "onnx" / "networks" / "data"
_READY = "ready"
_OURS = (
    "load_ms",
    "import_ms",
    "first_ms",
    "stored_first_ms",
    "device_ms",
    "tuned_device_ms",
    "run_ms",
    "numpy_ms",
    "tuned_numpy_ms",
)
_COLUMNS = (
    *_OURS,
    "eager_ms",
    "compiled_device_ms",
    "compiled_ms",
    "compiled_numpy_ms",
    "autotuned_compiled_device_ms",
    "tune_s",
    "stored_tune_s",
)
_MODES = {"reduce-overhead": 2, "max-autotune": 4}
"""Of `torch.compile`, and how many threads compile a network's kernels."""
_BASELINES = ("program", "module")
_LONGEST_KERNELS = 8
_WARM = 10
"""How many runs of a kind, of ours and of PyTorch's, are not counted, before those that are."""
_ATTENTION = re.compile("flash|fmha|sdpa|attention", re.IGNORECASE)
"""In the names of kernels of attention."""


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
        return ms(lambda: source.specialise(specs, {}))[0]
    except NeedsValues as needs:
        values = {name: inputs[name] for name in needs.names}
        return ms(lambda: source.specialise(specs, values))[0]


class Job(NamedTuple):
    """The work of one process: an ONNX file with weights, at some batch sizes.

    `folder`: where plans and kernels are stored. `tune`: whether the model is tuned, too. `mode`: of
    `torch.compile`. `baseline`: what PyTorch runs.
    """

    path: str
    batches: list[int]
    device: str
    folder: str
    runs: int
    tune: bool = False
    mode: str = "reduce-overhead"
    baseline: str = _BASELINES[0]


async def service(job: Job) -> Row:
    """The measurements of a file in a new service, for each batch size."""
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
            row["numpy_ms"] = await _numpy_ms(gpu, model, inputs, job.runs)
            explanation = await model.explain(inputs, measure=True)
            assert explanation.run_us is not None
            row["device_ms"] = round(explanation.run_us / 1e3, 4)
        if job.tune:
            async with await gpu.load(job.path, tune=True) as tuned:
                for batch in job.batches:
                    found[str(batch)] |= await _tuned(gpu, tuned, inputs_of(proto, batch), job.runs)
    return found


async def prepare(job: Job) -> None:
    """Store the plans for each batch size."""
    proto = onnx.load(job.path)
    store = Path(job.folder) / "plans"
    async with (
        spawn(device=job.device, isolation="process", plan_store=store, hang_after_s=600.0) as gpu,
        await gpu.load(job.path) as model,
    ):
        for batch in job.batches:
            await gpu.run(model, inputs_of(proto, batch))


async def _tuned(gpu: CudnnRef, model: Model, inputs: dict[str, np.ndarray], runs: int) -> Row:
    """Columns of a row: seconds of tuning, milliseconds of a tuned run, and which pieces have changed."""
    begin = time.perf_counter()
    await model.warm(sizes_in(model.inputs, inputs))
    row: Row = {"tune_s": round(time.perf_counter() - begin, 2)}
    explanation = await model.explain(inputs, measure=True)
    assert explanation.run_us is not None
    changed = [piece for piece in explanation.pieces if piece.measured and piece.measured.instead_of]
    row["tuned_device_ms"] = round(explanation.run_us / 1e3, 4)
    row["tuned_numpy_ms"] = await _numpy_ms(gpu, model, inputs, runs)
    row["changed"] = len(changed)
    row["changes"] = sorted(
        {
            f"{piece.labels[0]}: {piece.measured.instead_of} {piece.measured.heuristic_us:.1f} -> "
            f"{piece.plan.split('/', 3)[-1]} {piece.measured.tuned_us:.1f}"
            for piece in changed
            if piece.measured
        }
    )
    return row


async def _numpy_ms(gpu: CudnnRef, model: Model, inputs: dict[str, np.ndarray], runs: int) -> float:
    """Milliseconds of a run from NumPy to NumPy."""
    took = [await _timed(gpu.run(model, inputs)) for _ in range(_WARM + runs)]
    return median_ms(took[_WARM:])


async def _timed(run: Awaitable[object]) -> float:
    """Seconds until a run is answered."""
    begin = time.perf_counter()
    await run
    return time.perf_counter() - begin


async def _runs(gpu: CudnnRef, model: Model, inputs: dict[str, np.ndarray], runs: int) -> Any:
    """Seconds of each run, with inputs and outputs on the device."""
    given = {name: await gpu.upload(array) for name, array in inputs.items()}
    outputs = await gpu.run(model, given, keep=[each.name for each in model.outputs])
    message = RunModel.of(model.ref, given, outputs)
    for number in range(_WARM + runs):
        seconds = await _timed(gpu.ask(message))
        if number >= _WARM:
            yield seconds
    for ref in (*given.values(), *outputs.values()):
        await gpu.free(ref)


class InTorch:
    """A network in PyTorch, eager and compiled, with its inputs on the host and on the device."""

    def __init__(self, job: Job) -> None:
        self.torch: Any = importlib.import_module("torch")
        self.torch.backends.cudnn.allow_tf32 = self.torch.backends.cuda.matmul.allow_tf32 = False
        self.where, self.runs = "cpu" if job.device == "cpu" else "cuda", job.runs
        if job.baseline == "module":
            self.torch.backends.cuda.enable_math_sdp(False)  # flash attention or the like, or it fails
            self.eager = module(_name(Path(job.path)), self.where)
        else:
            self.eager = program(_program(Path(job.path)), self.where)
        self.compiled = self.torch.compile(self.eager, mode=job.mode, dynamic=False)
        proto = onnx.load(job.path)
        self.on_host = {str(batch): tensors(inputs_of(proto, batch).values(), "cpu") for batch in job.batches}
        self.given = {batch: [each.to(self.where) for each in given] for batch, given in self.on_host.items()}

    def run(self, way: Callable[..., Any], batch: str) -> None:
        """A run with inputs on the device, whose outputs stay there."""
        self.torch.compiler.cudagraph_mark_step_begin()
        way(*self.given[batch])
        if self.where == "cuda":
            self.torch.cuda.synchronize()

    def from_host(self, batch: str) -> None:
        """A run from pageable memory to pageable memory."""
        self.torch.compiler.cudagraph_mark_step_begin()
        for output in self.compiled(*[each.to(self.where) for each in self.on_host[batch]]):
            output.cpu()

    def on_device(self, batch: str) -> Row:
        """Milliseconds of all kernels of a compiled run, and the names of those of attention."""
        profiler = self.torch.profiler
        with profiler.profile(activities=[profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(self.runs):
                self.run(self.compiled, batch)
        kernels = profile.key_averages()
        took_us: float = sum(each.self_device_time_total for each in kernels)
        return {
            "compiled_device_ms": round(took_us / self.runs / 1e3, 4),
            "compiled_attention": sorted({each.key[:120] for each in kernels if _ATTENTION.search(each.key)}),
            "compiled_kernels": {
                each.key[:120]: round(each.self_device_time_total / self.runs, 1)
                for each in sorted(kernels, key=lambda each: -each.self_device_time_total)[:_LONGEST_KERNELS]
            },
        }

    def row(self, batch: str) -> Row:
        """The row of a batch size."""

        def median_of(call: Callable[[], object]) -> float:
            return median_ms([ms(call)[0] / 1e3 for _ in range(_WARM + self.runs)][_WARM:])

        row: Row = {
            "eager_ms": median_of(lambda: self.run(self.eager, batch)),
            "compiled_ms": median_of(lambda: self.run(self.compiled, batch)),
        }
        if self.where == "cuda":
            row["compiled_numpy_ms"] = median_of(lambda: self.from_host(batch))
            row |= self.on_device(batch)
        return row


def torch_side(job: Job) -> Row:
    """PyTorch's times for each batch size, measured when a line is there to read: then all is compiled."""
    network = InTorch(job)
    with network.torch.no_grad():
        for batch in network.given:
            for way in (network.eager, network.compiled):
                for _ in range(3):
                    network.run(way, batch)
        print(_READY, flush=True)
        sys.stdin.readline()
        return {batch: network.row(batch) for batch in network.given}


class TorchSide:
    """A process that compiles a network in PyTorch at once, and measures it when it is asked to."""

    def __init__(self, job: Job) -> None:
        environment = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": str(_MODES[job.mode])}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            _side("torch", job), env=environment, stdin=pipe, stdout=pipe, text=True
        )

    def await_ready(self, deadline: float) -> None:
        """Wait until it has compiled the network or has failed; at the deadline (monotonic), end it."""
        assert self._process.stdout is not None
        timer = threading.Timer(max(0.0, deadline - time.monotonic()), self._process.kill)
        timer.start()
        try:
            for line in self._process.stdout:
                if line.strip() == _READY:
                    return
        finally:
            timer.cancel()

    def result(self) -> Row:
        """The next result of the process. Raises `RuntimeError` if it has failed, which it has told."""
        out, _ = self._process.communicate("measure\n")
        if self._process.returncode:
            raise RuntimeError(f"PyTorch's process ended with {self._process.returncode}")
        row: Row = json.loads(out.splitlines()[-1])
        return row

    def end(self) -> None:
        """End it, whatever it does."""
        self._process.kill()
        self._process.communicate()


def _name(path: Path) -> str:
    return path.name.partition(".")[0]


def _program(path: Path) -> Path:
    return path.with_name(f"{_name(path)}.json")


def apart(job: Job) -> Row:
    """The measurements of a new service in a process whose kernels are kept in the job's folder. Blocks."""
    done = subprocess.run(
        _side("service", job), env=_environment(job), stdout=subprocess.PIPE, text=True, check=True
    )
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


def _environment(job: Job) -> dict[str, str]:
    return {**os.environ, "CUPY_CACHE_DIR": str(Path(job.folder) / "kernels")}


def _side(what: str, job: Job) -> list[str]:
    return [sys.executable, "-m", "benchmarks.models", "--side", what, json.dumps(job)]


def measured(
    wanted: dict[Path, Job],
    sides: Sequence[str],
    *,
    prepared: bool,
    patience_s: float,
    autotune: Collection[Path] = (),
) -> Iterator[Row]:
    """A row for each file, which lacks its weights, and each batch size.

    `wanted`: each file's job, whose path and folder are still empty. `patience_s`: for PyTorch to compile.
    `autotune`: files that PyTorch also compiles with `mode="max-autotune"`, for their largest batch size.
    """
    paths = list(wanted)
    with contextlib.ExitStack() as stack:
        jobs = [_job(path, job, stack) for path, job in wanted.items()]
        preparing = []
        for job in jobs if prepared and "service" in sides else ():
            preparing.append(
                subprocess.Popen(_side("prepare", job), env=_environment(job), stdout=subprocess.DEVNULL)
            )
            stack.callback(preparing[-1].kill)
        rivals = []
        if "torch" in sides and importlib.util.find_spec("torch") is not None:
            autotuned = [_autotuned(job) for path, job in zip(paths, jobs, strict=True) if path in autotune]
            for job in (*jobs, *autotuned):
                rivals.append((job, TorchSide(job)))
                stack.callback(rivals[-1][1].end)
        deadline = time.monotonic() + patience_s
        for _, rival in rivals:
            rival.await_ready(deadline)
        for process in preparing:
            process.wait()
        in_torch: dict[str, dict[str, Row]] = {job.path: {} for job in jobs}
        for job, rival in rivals:
            part = f"{Path(job.path).name} in PyTorch, {job.mode}"
            for found in attempted(part, lambda rival=rival: [rival.result()]):  # type: ignore[misc]
                if "error" in found:
                    yield found
                else:
                    in_torch[job.path][job.mode] = found
        for job in jobs:
            part = Path(job.path).name
            yield from attempted(part, functools.partial(_rows_of, job, in_torch[job.path], sides, prepared))


def _autotuned(job: Job) -> Job:
    return job._replace(mode="max-autotune", batches=[max(job.batches)])


def _job(path: Path, wanted: Job, stack: contextlib.ExitStack) -> Job:
    """The file with its weights, in a folder that lives as long as the stack."""
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    job = wanted._replace(path=str(Path(folder) / path.name), folder=folder)
    onnx.save(read(path), job.path)
    _program(Path(job.path)).write_bytes(_program(path).read_bytes())
    return job


def _rows_of(job: Job, in_torch: dict[str, Row], sides: Sequence[str], prepared: bool) -> Iterator[Row]:
    """A row for each batch size. Where the service fails, they say what PyTorch took; then it raises."""
    name, opset = Path(job.path).stem.split(".")
    services, failure = [], None
    try:
        services = [apart(job) for _ in range(1 if prepared else 2)] if "service" in sides else []
    except subprocess.CalledProcessError as error:
        failure = error
    for batch in map(str, job.batches):
        row = {"network": name, "opset": int(opset), "batch": int(batch)}
        if services:
            first, last = services[0], services[-1]
            row |= {"load_ms": first["load_ms"], **first[batch], "stored_first_ms": last[batch]["first_ms"]}
            if prepared:
                del row["first_ms"]
            elif job.tune:
                row["stored_tune_s"] = last[batch]["tune_s"]
        for mode, found in in_torch.items():
            prefix = "" if mode == job.mode else "autotuned_"
            row |= {f"{prefix}{key}": each for key, each in found.get(batch, {}).items()}
        yield row
    if failure is not None:
        raise failure


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
    parser.add_argument(
        "--networks", nargs="+", help="all in the folder unless given; gpt2:1,4 has batch sizes of its own"
    )
    parser.add_argument("--opset", type=int, default=20)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--sides", nargs="+", choices=("service", "torch"), default=["service", "torch"])
    parser.add_argument("--tune", action="store_true", help="measure what tuning gains, too")
    parser.add_argument("--prepared", action="store_true", help="build plans beforehand, side by side")
    parser.add_argument("--mode", choices=_MODES, default="reduce-overhead", help="of torch.compile")
    parser.add_argument(
        "--max-autotune", nargs="+", default=[], help="networks that are compiled in that mode, too"
    )
    parser.add_argument("--baseline", choices=_BASELINES, default=_BASELINES[0], help="what PyTorch runs")
    parser.add_argument("--patience", type=float, default=3600.0, help="seconds for PyTorch to compile")
    parser.add_argument("--out", type=Path, help="directory for the JSON")
    parser.add_argument("--side", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side is not None:
        what, text = given.side
        job = Job(*json.loads(text))
        sides: dict[str, Callable[[Job], Coroutine[Any, Any, object]]] = {
            "service": service,
            "prepare": prepare,
        }
        print(json.dumps(torch_side(job) if what == "torch" else asyncio.run(sides[what](job))))
        return
    paths = {path.name.split(".")[0]: path for path in sorted(given.folder.glob(f"*.{given.opset}.onnx"))}
    job = Job("", given.batches, given.device, "", given.runs, given.tune, given.mode, given.baseline)
    wanted = {}
    for name, _, batches in (each.partition(":") for each in given.networks or paths):
        if name in paths:
            wanted[paths[name]] = job._replace(batches=[*map(int, batches.split(","))]) if batches else job
    if not wanted:
        parser.error(f"no such networks of opset {given.opset} in {given.folder}")
    known = versions(("numpy", "msgspec", "onnx", "torch"))
    known |= {} if given.device == "cpu" else gpu_versions()
    about = {
        "machine": machine(),
        "device": given.device,
        "files": given.folder.name,
        "compiled": given.mode,
        "baseline": given.baseline,
    }
    rows = measured(
        wanted,
        given.sides,
        prepared=given.prepared,
        patience_s=given.patience,
        autotune=[paths[name] for name in given.max_autotune if name in paths],
    )
    keep(rows, sheet, given.out, "models", versions=known, **about)


if __name__ == "__main__":
    main()
