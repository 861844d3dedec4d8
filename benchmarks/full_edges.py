"""Whether edges of CUDA graphs may stand in the place of barriers: replays compared and timed on a GPU.

    python -m benchmarks.full_edges --folder FOLDER --networks resnet50 --out benchmarks/results

`engines/cuda/running/full_edges.py` says what the edges are. Blocks of networks, and networks as of
`benchmarks.models`, are captured in three CUDA graphs: with barriers, with edges in their place, and with
neither. Each is replayed many times, on other inputs from one replay to the next, and each result is compared
on the device, bit for bit, with that of the graph with barriers, whose replays were waited for one by one.

- `different`: of `replays` replays with edges, how many had another result.
- `different_with_barriers`, `different_without`: the same of `CONTROLS` replays of the other graphs. Where
  the last is 0, a subject does not show what barriers are for.
- `us`, `us_with_barriers`, `us_without`: microseconds of a replay, the median of rounds in turns.
- `early`: how many edges let a kernel begin early, in each of the three graphs.

A version of cuDNN and a driver is proved if no replay of any subject differs, and there are enough of them:
then it can be added to `full_edges.PROVED`.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import re
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from rich.table import Table

from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.planning.cuda_builder import CudaBuilder
from cudnn_actor.engines.cuda.running import full_edges, program
from cudnn_actor.engines.cuda.running.barriers import waits
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.engines.cuda.running.program import Program, Replay
from cudnn_actor.models.source import values_of
from cudnn_actor.onnx import OnnxModel
from cudnn_actor.protocol import Graph, TensorSpec
from tests.onnx.networks.recipes import inputs_of, read

from .gpu.setting import gpu_versions
from .library_faults.races import BLOCKS
from .recording import Row, attempted, keep

__all__ = ["main"]

CONTROLS = 1000
"""Replays of the graphs with barriers, and without."""
_INPUTS = 16
"""Different inputs, one after the other."""
_COLUMNS = (
    "subject",
    "barriers",
    "replays",
    "different",
    "different_with_barriers",
    "different_without",
    "us",
    "us_with_barriers",
    "us_without",
    "early",
)
_AT_ONCE = 500
"""Replays that are enqueued before the device is waited for."""
_ROUNDS, _TIMED = 9, 100
"""Rounds in which the graphs are timed by turns, and replays of each in a round."""
_DIFFER = """
extern "C" __global__ void differ(
    const unsigned char* a, const unsigned char* b, long long n, unsigned* found) {
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)
        if (a[i] != b[i]) *found = 1;
}
"""


class Subject(NamedTuple):
    """A graph, the bytes of what is the same in all runs by the names of inputs, and one that changes.

    `values`: gives the bytes of that, another each time.
    """

    name: str
    graph: Graph
    constant: dict[str, np.ndarray]
    changing: str
    values: Callable[[], np.ndarray]


def blocks(only: str) -> Iterator[Subject]:
    """The blocks of `benchmarks.library_faults`."""
    rng = np.random.default_rng(1)
    for name, block in BLOCKS.items():
        if not re.search(only, name):
            continue
        given, ports = block.values(seed=1), {port.name: port for port in block.forward.inputs}
        spec = ports.pop("x").spec
        constant = {each: laid_out(given[each], port.spec) for each, port in ports.items()}
        values = functools.partial(_normal, rng, spec)
        yield Subject(name, block.forward, constant, "x", values)


def _normal(rng: np.random.Generator, spec: TensorSpec) -> np.ndarray:
    return laid_out(rng.standard_normal(spec.dims), spec)


def network(path: Path, batch: int) -> Subject:
    """A network's file, for so many samples."""
    proto = read(path)
    model = OnnxModel(proto)
    rng, given = np.random.default_rng(1), inputs_of(proto, batch)
    specs = {name: TensorSpec.packed(array.shape, array.dtype) for name, array in given.items()}
    of = model.specialise(specs, {})
    assert of.graph is not None, "it has operations"
    specs = {port.name: port.spec for port in of.graph.inputs}
    constant = {port: laid_out(values_of(weight), specs[port]) for port, (_, weight) in of.weights.items()}
    (changing, port), *others = ((name, port) for name, port in of.inputs.items() if port in specs)
    constant |= {port: laid_out(given[name], specs[port]) for name, port in others}
    first = given[changing]

    def values() -> np.ndarray:
        # Other values of the same kind: tokens stay tokens.
        return laid_out(rng.permutation(first.ravel()).reshape(first.shape), specs[port])

    return Subject(f"{path.name.partition('.')[0]}, N = {batch}", of.graph, constant, port, values)


def laid_out(values: np.ndarray, spec: TensorSpec) -> np.ndarray:
    """The bytes of a tensor of a spec."""
    raw = np.zeros(spec.nbytes, np.uint8)
    steps = [step * spec.dtype.itemsize for step in spec.strides]
    view = np.lib.stride_tricks.as_strided(raw.view(spec.dtype.numpy), spec.dims, steps)
    view[...] = values.astype(spec.dtype.numpy).reshape(spec.dims)
    return raw


class Bench:
    """A subject's plan on a device, and its memory."""

    def __init__(self, subject: Subject, builder: CudaBuilder) -> None:
        cupy = libraries().cupy
        self._subject = subject
        self._stream = builder.context.stream
        self._handle = builder.context.handle
        body = subject.graph.body
        self.plan = builder.build(body, workspace_limit=None)
        with self._stream:
            self._buffers = {uid: cupy.zeros(body.tensor(uid).spec.nbytes, cupy.uint8) for uid in body.bound}
            self._workspace = cupy.zeros(max(self.plan.workspace, 1), cupy.uint8)
            ports = (*subject.graph.inputs, *subject.graph.outputs)
            places = {port.name: self._buffers[port.uid] for port in ports if port.uid is not None}
            for name in subject.constant.keys() & places.keys():
                places[name][:] = cupy.asarray(subject.constant[name])
            self._place = places[subject.changing]
            self._inputs = [cupy.asarray(subject.values()) for _ in range(_INPUTS)]
            self._outputs = [places[port.name] for port in subject.graph.outputs]
            self._differ = cupy.RawKernel(_DIFFER, "differ")
        self._pointers = [int(self._buffers[uid].data.ptr) for uid in body.bound]
        self._key = tuple(self._pointers)
        self._stream.synchronize()

    def replay(self, *, by_edges: bool) -> Replay:
        """The plan, captured: with edges in the place of barriers, or with barriers."""
        runner = Program(self.plan, self._handle, self._stream, full_edges=by_edges)
        return self._captured(runner)

    def replay_without(self) -> Replay:
        """The plan, captured without barriers."""
        with mock.patch.object(program, "waits", lambda steps: [False] * len(steps)):
            runner = Program(self.plan, self._handle, self._stream)
        return self._captured(runner)

    def _captured(self, runner: Program) -> Replay:
        scalars = (1.0,) * self.plan.recipe.scalars
        runner.expect(self._key)
        for _ in range(3):
            if self._key not in runner.replays:
                runner.run(self._key, self._pointers, scalars, int(self._workspace.data.ptr))
        self._stream.synchronize()
        return runner.replays[self._key]

    def results(self, replay: Replay) -> list[list[Any]]:
        """The outputs for each of the inputs, each waited for."""
        found = []
        with self._stream:
            for number in range(_INPUTS):
                self._enqueue(replay, number)
                found.append([output.copy() for output in self._outputs])
                self._stream.synchronize()
        return found

    def _enqueue(self, replay: Replay, number: int) -> None:
        source = self._inputs[number % _INPUTS]
        copy = libraries().runtime.memcpyAsync
        on_device = libraries().runtime.memcpyDeviceToDevice
        copy(self._place.data.ptr, source.data.ptr, source.nbytes, on_device, self._stream.ptr)
        replay.launch(behind=0)

    def different(self, replay: Replay, wanted: Sequence[Sequence[Any]], count: int) -> int:
        """How many of so many replays have other outputs than wanted."""
        cupy = libraries().cupy
        with self._stream:
            flags = cupy.zeros(count, cupy.uint32)
            for number in range(count):
                self._enqueue(replay, number)
                flag = flags[number : number + 1]
                for got, of in zip(self._outputs, wanted[number % _INPUTS], strict=True):
                    blocks = min(256, -(-got.size // 256))
                    self._differ((blocks,), (256,), (got, of, got.size, flag))
                if number % _AT_ONCE == _AT_ONCE - 1:
                    self._stream.synchronize()
            return int(flags.sum())

    def times(self, replays: Sequence[Replay]) -> list[float]:
        """Microseconds of a replay of each, one behind the other."""
        cupy = libraries().cupy
        found: list[list[float]] = [[] for _ in replays]
        for _ in range(_ROUNDS):
            for replay, of in zip(replays, found, strict=True):
                begin, end = cupy.cuda.Event(), cupy.cuda.Event()
                begin.record(self._stream)
                for _ in range(_TIMED):
                    replay.launch(behind=0)
                end.record(self._stream)
                end.synchronize()
                of.append(cupy.cuda.get_elapsed_time(begin, end) * 1e3 / _TIMED)
        return [round(statistics.median(of), 2) for of in found]


def early_edges(replay: Replay) -> int | None:
    """How many edges of a graph let a kernel begin early; None if the driver does not say."""
    graph = getattr(replay.graph, "graph", None)
    library = ctypes.PyDLL("libcuda.so.1")
    if graph is None or not hasattr(library, "cuGraphGetEdges_v2"):
        return None
    count = ctypes.c_size_t()
    of = ctypes.c_void_p(int(graph))
    if library.cuGraphGetEdges_v2(of, None, None, None, ctypes.byref(count)):
        return None
    nodes = [(ctypes.c_void_p * count.value)() for _ in range(2)]
    data = (ctypes.c_uint64 * count.value)()
    if library.cuGraphGetEdges_v2(of, *nodes, data, ctypes.byref(count)):
        return None
    return sum(map(bool, data))


def row_of(subject: Subject, builder: CudaBuilder, replays: int) -> Row:
    """The row of a subject. Blocks for seconds."""
    bench = Bench(subject, builder)
    plan: CudaPlan = bench.plan
    with_barriers, by_edges = bench.replay(by_edges=False), bench.replay(by_edges=True)
    without = bench.replay_without()
    wanted = bench.results(with_barriers)
    told = [int(libraries().cupy.asnumpy(each[0]).astype(np.int64).sum()) for each in wanted]
    assert len({*told}) > 1, "other inputs give other outputs"
    us = bench.times((by_edges, with_barriers, without))
    return {
        "subject": subject.name,
        "steps": len(plan.recipe.steps),
        "barriers": sum(waits(plan.recipe.steps)),
        "replays": replays,
        "different": bench.different(by_edges, wanted, replays),
        "different_with_barriers": bench.different(with_barriers, wanted, CONTROLS),
        "different_without": bench.different(without, wanted, CONTROLS),
        "us": us[0],
        "us_with_barriers": us[1],
        "us_without": us[2],
        "early": [early_edges(each) for each in (by_edges, with_barriers, without)],
    }


def sheet(found: Sequence[Row]) -> Table:
    """The results as a table."""
    table = Table(*_COLUMNS)
    for row in found:
        table.add_row(*(str(row[each]) for each in _COLUMNS))
    return table


def main() -> None:
    """Measure, print and keep."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.full_edges", description=__doc__)
    parser.add_argument("--folder", type=Path, help="with NETWORK.OPSET.onnx")
    parser.add_argument("--networks", nargs="*", default=["resnet50"])
    parser.add_argument("--opset", type=int, default=23)
    parser.add_argument("--batches", type=int, nargs="+", default=[1])
    parser.add_argument("--only", default="", help="blocks in whose name this regular expression is found")
    parser.add_argument("--replays", type=int, default=full_edges.LEAST_REPLAYS)
    parser.add_argument("--out", type=Path, help="directory for the JSON")
    given = parser.parse_args()
    builder = CudaBuilder(0)
    builder.open()

    def subjects() -> Iterator[tuple[str, Callable[[], Subject]]]:
        for each in blocks(given.only):
            yield each.name, functools.partial(lambda subject: subject, each)
        if given.folder is not None:
            for name in given.networks:
                path = given.folder / f"{name}.{given.opset}.onnx"
                for batch in given.batches:
                    yield f"{name}, N = {batch}", functools.partial(network, path, batch)

    def rows() -> Iterator[Row]:
        for name, make in subjects():
            yield from attempted(name, lambda make=make: [row_of(make(), builder, given.replays)])  # type: ignore[misc]

    decided = full_edges.versions()._asdict()
    keep(rows(), sheet, given.out, "full-edges", versions=gpu_versions(), versions_proved=decided)


if __name__ == "__main__":
    main()
