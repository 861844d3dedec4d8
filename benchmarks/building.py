"""How long plans of graphs take to build: cold, from the plan store, and for new batch sizes.

    python -m benchmarks.building --out benchmarks/results

Needs a GPU; with `--dry-run`, the CPU engine builds small graphs instead, and nothing is stored. Graphs are
chains of equal layers of 10 operations: two convolutions with what follows them, and a group norm. Equal
pieces of a graph are built once.

"Cold" is a process of its own with an empty folder for the kernels that CuPy compiles, and with what CUDA
initialises at the first use; "stored" is another process, later, that has these kernels and the plan's bytes.
Both build as a service does.
A first run is one without a replay, on buffers that are there. For new batch sizes, one builder builds a
ResNet bottleneck for one batch size after the other, as for inference, with and without dynamic shapes, and
as for training. Each plan is built, its self-check included, in the process that measures; as bytes it goes
to a worker. A run of each is timed, too. At the end, a build for another batch size is profiled; and in
another process, the first.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import functools
import json
import os
import pstats
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from cudnn_actor.engines.cpu import CpuEngine
from cudnn_actor.engines.cuda.checking.self_check import SelfCheck
from cudnn_actor.engines.cuda.cudnn.frontend_graph import Refused
from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.planning import compiler
from cudnn_actor.engines.cuda.planning.cuda_builder import CudaBuilder
from cudnn_actor.engines.cuda.planning.tuning import time_plan
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.engines.cuda.running.program import Program
from cudnn_actor.plan_store.plan_file import PlanKey, StoredPlan
from cudnn_actor.plan_store.store import PlanStore
from cudnn_actor.protocol import Graph, GraphBuilder, OperationGraph
from cudnn_actor.trials.bench.record import machine, versions

from .blocks import bottleneck
from .gpu.setting import gpu_versions
from .recording import Row, attempted, ends_at_sigterm, write_found

COUNTS = (10, 100, 500)
LAYER = 10
"""Operations of a layer."""
BATCHES = (32, 16, 24, 7)
_RUNS = 20
_PROFILED = 48
"""The batch size of the build that is profiled."""
_TOLD = {
    "planning/composition.py compose": "all pieces",
    "planning/partition.py cut": "the cut into pieces",
    "planning/candidates.py candidates": "cuDNN's candidates",
    "planning/candidates.py build_candidate": "cuDNN's plans",
    "checking/self_check.py __init__": "self-check: prepared",
    "checking/convolution_reference.py _source": "  sources of references of convolutions",
    "checking/evaluated_reference.py covers": "  sizes of other references",
    "checking/self_check_memory.py fill": "  tensors filled",
    "checking/self_check.py _put_samples": "  values that operations ask for",
    "checking/self_check.py _input_sums": "  checksums of inputs, before and behind: waits for the device",
    "checking/self_check.py fault": "self-check: run and comparison",
    "running/program.py __init__": "  launches prepared",
    "checking/self_check_memory.py read": "  guards and NaN: waits for the device",
    "checking/self_check.py _compare": "  results computed and compared",
    "checking/convolution_reference.py compute": "    of convolutions, by definition",
    "protocol/graphs/operation_graph.py evaluate": "    of others, by definition",
    "checking/comparison.py compare_on_device": "    compared on the device",
    "checking/comparison.py difference": "    compared on the host",
    "checking/self_check.py close": "self-check: memory freed",
    "benchmarks/building.py malloc": "memory taken, in all of it",
    "cuda/compiler.py compile_using_nvrtc": "kernels compiled, but for cuDNN's, in all of it",
}
"""Functions of a build and what they do. Times include those of the functions called."""
_OFTEN = 25
"""How many of the functions that take most time themselves are told."""


def chain(count: int) -> Graph:
    """A graph of so many operations, a multiple of `LAYER`."""
    g = GraphBuilder()
    channels = 64
    x = g.input("x", (8, channels, 28, 28), "bfloat16", layout="NHWC")
    w = g.input("w", (channels, channels, 3, 3), "bfloat16", layout="NHWC")
    scale, bias = (g.input(name, (1, channels, 1, 1), "bfloat16") for name in ("scale", "bias"))
    norm_scale, norm_bias = (g.input(name, (channels,), "bfloat16") for name in ("norm_scale", "norm_bias"))
    for _ in range(count // LAYER):
        y = g.relu(g.conv(x, w, pad=1) * scale + bias)
        y = g.relu(g.conv(y, w, pad=1) * scale + bias + x)
        x = g.group_norm(y, 8, norm_scale, norm_bias)
    graph = g.build(y=x)
    assert len(graph.body.operations) == count, len(graph.body.operations)
    return graph


def ms(call: Callable[[], Any]) -> tuple[float, Any]:
    """Milliseconds of a call, and its result."""
    begin = time.perf_counter()
    result = call()
    return round((time.perf_counter() - begin) * 1e3, 2), result


class Side:
    """The measurements of one process, which has a builder of its own."""

    def __init__(self, *, dynamic_shapes: bool = False) -> None:
        self.builder = CudaBuilder(0, dynamic_shapes=dynamic_shapes)
        self.opened_ms, _ = ms(self.builder.open)

    def build(self, graph: OperationGraph) -> CudaPlan:
        """A plan. Blocks for milliseconds to seconds."""
        return compiler.compile_plan(graph, self.builder.context, None)

    def first_run(self, graph: OperationGraph, plan: CudaPlan) -> float:
        """Milliseconds until a first run has finished, its launches prepared."""
        context = self.builder.context
        check = SelfCheck(graph, context)
        try:
            workspace = check.room_for(plan)
            context.stream.synchronize()

            def run() -> None:
                program = Program(plan, context.handle, context.stream)
                program.run((), check.pointers, check.scalars, workspace.pointer)
                context.stream.synchronize()

            return ms(run)[0]
        finally:
            check.close()

    def run_us(self, graph: OperationGraph, plan: CudaPlan) -> float:
        """Microseconds of a run, replayed as a CUDA graph."""
        check = SelfCheck(graph, self.builder.context)
        try:
            return round(min(time_plan(check, plan, _RUNS) for _ in range(3)), 2)
        finally:
            check.close()

    def key(self, graph: OperationGraph) -> PlanKey:
        """The plan's name in a store."""
        return PlanKey(graph=graph.digest(), fingerprint=self.builder.fingerprint)


def cold(count: int, store: PlanStore) -> Row:
    """A graph's plan from nothing, stored for `stored`."""
    side = Side()
    made_ms, graph = ms(lambda: chain(count))
    body = graph.body
    built_ms, plan = ms(lambda: side.build(body))

    def save() -> None:
        data = side.builder.export(plan)
        assert data is not None
        store.save(side.key(body), StoredPlan(data=data, workspace=plan.workspace))

    stored_ms, _ = ms(save)
    return {
        "operations": count,
        "steps": len(plan.recipe.steps),
        "open_ms": side.opened_ms,
        "graph_ms": made_ms,
        "build_ms": built_ms,
        "save_ms": stored_ms,
        "first_run_ms": side.first_run(body, plan),
    }


def stored(count: int, store: PlanStore) -> Row:
    """The plan that `cold` stored."""
    side, body = Side(), chain(count).body

    def restore() -> CudaPlan:
        found = store.load(side.key(body))
        assert found is not None, "the plan is not in the store"
        return side.builder.restore(body, found.data)

    restored_ms, plan = ms(restore)
    return {"restore_ms": restored_ms, "restored_first_run_ms": side.first_run(body, plan)}


def batches(*, inference: bool, dynamic_shapes: bool) -> Row:
    """Builds of a bottleneck for one batch size after the other, and a profile of one more."""
    side = Side(dynamic_shapes=dynamic_shapes)
    built, runs = {}, {}
    for batch in BATCHES:
        body = bottleneck(batch=batch, inference=inference).forward.body
        built[str(batch)], plan = ms(functools.partial(side.build, body))
        runs[str(batch)] = side.run_us(body, plan)
    row = {"block": _block(inference), "dynamic shapes": dynamic_shapes, "build_ms": built, "run_us": runs}
    return row | profiled(side, _PROFILED, inference)


def first(*, inference: bool) -> Row:
    """A profile of a process' first build."""
    return {"block": _block(inference), **profiled(Side(), BATCHES[0], inference)}


def _block(inference: bool) -> str:
    return "for inference" if inference else "for training"


def profiled(side: Side, batch: int, inference: bool) -> Row:
    """Where the time of a build goes. The profiler itself slows Python down."""
    body = bottleneck(batch=batch, inference=inference).forward.body
    with memory_timed(), tried() as plans, cProfile.Profile() as profile:
        side.build(body)
    sums = dict.fromkeys(_TOLD, 0.0)
    own = []
    for (path, _, name), (_, calls, own_s, all_s, _) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        function = f"{'/'.join(Path(path).parts[-2:])} {name}"
        own.append((function, calls, round(own_s * 1e3, 2)))
        if function in sums:
            sums[function] += all_s * 1e3
    return {
        "profile_ms": {what: round(sums[function], 2) for function, what in _TOLD.items()},
        "own_ms": sorted(own, key=lambda row: -row[2])[:_OFTEN],
        "tried": plans,
    }


@contextlib.contextmanager
def memory_timed() -> Iterator[None]:
    """Have self-checks take memory by a function of Python, which a profile shows."""
    cuda = libraries().cupy.cuda
    given = cuda.MemoryPool

    class Pool:
        def __init__(self) -> None:
            self._pool = given()
            self.free_all_blocks = self._pool.free_all_blocks

        def malloc(self, nbytes: int) -> Any:
            return self._pool.malloc(nbytes)

    cuda.MemoryPool = Pool
    yield
    cuda.MemoryPool = given


@contextlib.contextmanager
def tried() -> Iterator[list[Row]]:
    """cuDNN's candidates for whole pieces that are built meanwhile: names, times, why they are refused."""
    found: list[Row] = []
    build = vars(compiler)["build_candidate"]

    def timed(graph: OperationGraph, lowered: Any, index: int) -> None:
        row: Row = {"candidate": lowered.get_plan_name_at_index(index)}
        begin = time.perf_counter()
        try:
            build(graph, lowered, index)
        except Refused as refusal:
            row["refused"] = str(refusal)
            raise
        finally:
            found.append({**row, "ms": round((time.perf_counter() - begin) * 1e3, 2)})

    vars(compiler)["build_candidate"] = timed
    yield found
    vars(compiler)["build_candidate"] = build


# "batches" takes flags: 1 for inference, 2 for dynamic shapes; "first" takes 1 for inference.
SIDES: dict[str, Callable[[int, Path], Row]] = {
    "cold": lambda count, folder: cold(count, PlanStore(folder / "plans")),
    "stored": lambda count, folder: stored(count, PlanStore(folder / "plans")),
    "batches": lambda count, _: batches(inference=bool(count & 1), dynamic_shapes=bool(count & 2)),
    "first": lambda count, _: first(inference=bool(count)),
    "versions": lambda _, __: dict(gpu_versions()),
}


def apart(side: str, count: int, folder: Path) -> Row:
    """The measurements of a process of its own, whose kernels are kept in the folder. Blocks.

    `count` is passed on to one of `SIDES`.
    """
    command = [sys.executable, "-m", "benchmarks.building", "--side", side, str(count), str(folder)]
    environment = {**os.environ, "CUPY_CACHE_DIR": str(folder / "kernels")}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    row: Row = json.loads(done.stdout.splitlines()[-1])
    return row


def alone(*sides: str, count: int) -> Iterator[Row]:
    """The measurements of these processes, one after the other, with a folder that was empty before."""
    with tempfile.TemporaryDirectory() as folder:
        found = [apart(side, count, Path(folder)) for side in sides]
    yield {name: value for row in found for name, value in row.items()}


Parts = Iterator[tuple[str, Iterator[Row]]]


def on_gpu(counts: Sequence[int]) -> Parts:
    """The name and the rows of each part."""
    for count in counts:
        what = f"{count} operations"
        yield "graphs", attempted(what, functools.partial(alone, "cold", "stored", count=count))
    for part, number in (("batches", 3), ("batches", 1), ("batches", 0), ("first", 1), ("first", 0)):
        yield part, attempted(f"{part}, {number}", functools.partial(alone, part, count=number))


def on_cpu() -> Parts:
    """Small graphs on the CPU engine, to see that all is in order."""
    engine = CpuEngine(exact=True)
    engine.open()
    for count in (10, 20):
        graph_ms, graph = ms(functools.partial(chain, count))
        built_ms, _ = ms(functools.partial(engine.build, graph.body, workspace_limit=None))
        yield "graphs", iter([{"operations": count, "graph_ms": graph_ms, "build_ms": built_ms}])
    found = {}
    for batch in (4, 2, 3):
        body = bottleneck(batch=batch, channels=64, width=16, size=14).forward.body
        found[str(batch)], _ = ms(functools.partial(engine.build, body, workspace_limit=None))
    yield "batches", iter([{"block": "for training", "dynamic shapes": False, "build_ms": found}])
    engine.close()


def tables(found: Mapping[str, Sequence[Row]]) -> Iterator[Table]:
    """The results as tables."""
    names = dict.fromkeys(name for row in found["graphs"] for name in row)
    graphs = Table(*names, title="graphs")
    for row in found["graphs"]:
        graphs.add_row(*(str(row.get(name, "")) for name in names))
    yield graphs
    built = [row for row in found["batches"] if "error" not in row]
    sizes = dict.fromkeys(size for row in built for size in row["build_ms"])
    for name, unit in (("build_ms", "ms"), ("run_us", "µs")):
        rows = [row for row in built if name in row]
        heads = ("a bottleneck", "dynamic shapes", *(f"batch {size}, {unit}" for size in sizes))
        table = Table(*heads, title=f"one batch size after the other: {name.partition('_')[0]}")
        for row in rows:
            table.add_row(row["block"], str(row["dynamic shapes"]), *(str(row[name][size]) for size in sizes))
        yield table
    for title, part in (("a further batch size", "batches"), ("the first build", "first")):
        profiles = [row for row in found[part] if "profile_ms" in row]
        if profiles:
            blocks = (row["block"] + ", dynamic" * row.get("dynamic shapes", False) for row in profiles)
            table = Table("part, ms, profiled", *blocks, title=title)
            for what in profiles[0]["profile_ms"]:
                table.add_row(what, *(str(row["profile_ms"][what]) for row in profiles))
            yield table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, help="directory for the JSON")
    parser.add_argument("--counts", type=int, nargs="+", default=list(COUNTS), help="of operations")
    parser.add_argument("--dry-run", action="store_true", help="small graphs on the CPU engine")
    parser.add_argument("--side", nargs=3, metavar=("WHAT", "COUNT", "FOLDER"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side is not None:
        what, count, folder = given.side
        print(json.dumps(SIDES[what](int(count), Path(folder))))
        return
    known = versions(("numpy", "msgspec"))
    if not given.dry_run:
        known |= next(alone("versions", count=0))
    found: dict[str, list[Row]] = {"graphs": [], "batches": [], "first": []}
    ends_at_sigterm()
    start = time.monotonic()
    try:
        for part, rows in on_cpu() if given.dry_run else on_gpu(given.counts):
            for row in rows:
                found[part].append(row)
                print(json.dumps(row), flush=True)
    finally:
        if given.out is not None:
            seconds = round(time.monotonic() - start, 1)
            about = {"versions": known, "machine": machine(), "dry_run": given.dry_run, "seconds": seconds}
            write_found(given.out, "building", found, **about)
        for table in tables(found):
            Console(width=160).print(table)


if __name__ == "__main__":
    main()
