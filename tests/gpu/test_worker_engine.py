"""The engine of a worker process: memory that its parent shares with it, and what it finds imported.

`tests/engines/contract/test_shared.py` has what both engines do, pinned or not. Here is what only a device
does: it copies on its own, while other work runs.
"""

from __future__ import annotations

import gc
import json
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from structlog.typing import EventDict

from cudnn_actor.engines.base import Binding, Engine
from cudnn_actor.engines.cuda import CudaEngine
from cudnn_actor.engines.remote import BuilderHost
from cudnn_actor.protocol import BufferRef, ConvFwd, ConvSpec, DType, Layout, TensorSpec
from cudnn_actor.protocol.messages.lowering import lower

from ..engines.contract.test_shared import settle, spec_of, values_of
from ..engines.shared_memory import SharedMemory, shared_memory
from ..engines.workbench import Workbench, workbench

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
LAYOUTS = [Layout.NCHW, Layout.NHWC, Layout.STRIDED]


@pytest.fixture
def bench(engine: Engine) -> Iterator[Workbench]:
    with workbench(engine) as bench:
        yield bench


@pytest.fixture(params=[True, False], ids=["pinned", "unpinned"])
def shared(engine: Engine, request: pytest.FixtureRequest) -> Iterator[SharedMemory]:
    with shared_memory(engine, pinned=request.param) as shared:
        yield shared
        gc.collect()


def busy(bench: Workbench) -> None:
    """Some milliseconds of work on the engine's stream, so that what is enqueued behind it has to wait."""
    x, w, y = (
        bench.empty(TensorSpec.packed(dims, "float32", "NHWC"))
        for dims in [(4, 64, 56, 56), (64, 64, 3, 3), (4, 64, 56, 56)]
    )
    message = ConvFwd(x=x, w=w, y=y, conv=ConvSpec.symmetric(2, pad=1))
    plan = bench.engine.build(lower(message).graph, workspace_limit=None)
    for _ in range(50):
        bench.execute(plan, message)


def test_this_machine_pins_shared_memory(engine: Engine, logs: list[EventDict]) -> None:
    with shared_memory(engine, pinned=True):
        pass
    assert [line for line in logs if line["event"] == "memory.not_pinned"] == []


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", list(DType))
def test_copies_that_wait_behind_other_work_carry_the_right_values(
    bench: Workbench, shared: SharedMemory, dtype: DType, layout: Layout
) -> None:
    engine, specs = bench.engine, [spec_of(dims, dtype, layout) for dims in [(2, 3, 4, 5), (2, 3, 130, 140)]]
    sources = [shared.holding(values_of(spec), spec) for spec in specs]
    results = [shared.room(spec) for spec in specs]
    there = [bench.empty(spec) for spec in specs]
    back = [bench.empty(spec) for spec in specs]
    busy(bench)
    for ref, source in zip(there, sources, strict=True):
        engine.write(bench.binding(ref), source)
    for src, dst in zip(there, back, strict=True):
        engine.copy(bench.binding(src), bench.binding(dst))
    answers = [engine.fetch(bench.binding(ref), into) for ref, into in zip(back, results, strict=True)]
    for ref in (*there, *back):
        engine.fill(bench.binding(ref), 0)  # behind the copies: it must not be seen
    settle(engine)
    for answer, into, spec in zip(answers, results, specs, strict=True):
        assert answer is not None
        assert answer() is into
        np.testing.assert_array_equal(into, values_of(spec))


def test_one_array_after_another_goes_through_the_same_memory(bench: Workbench, shared: SharedMemory) -> None:
    """As a window of requests uses it: taken again as soon as a fence behind the copies has passed."""
    engine, spec = bench.engine, TensorSpec.packed((2, 3, 130, 140), "float32", "NHWC")
    source, result = shared.room(spec), shared.room(spec)
    binding = bench.binding(bench.empty(spec))
    rng = np.random.default_rng(7)
    for _ in range(30):
        values = rng.standard_normal(spec.dims, np.float32)
        source[...] = values
        engine.write(binding, source)
        answer = engine.fetch(binding, result)
        assert answer is not None
        settle(engine)
        source[...] = np.nan
        np.testing.assert_array_equal(answer(), values)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "unpinned"])
def test_an_array_larger_than_the_staging_memory(engine: Engine, layout: Layout, pinned: bool) -> None:
    spec = spec_of((5, 3, 1100, 1200), DType.FLOAT32, layout)
    fd = engine.create_arena(1, 256 * MIB)
    mapping = mmap.mmap(-1, 256 * MIB)
    view = memoryview(mapping)
    if pinned:
        engine.pin(view)
    source, result = (
        np.frombuffer(view, np.float32, spec.size, offset).reshape(spec.dims) for offset in (0, 128 * MIB)
    )
    source[...] = values_of(spec)
    binding = engine.bind(1, 0, spec)
    engine.fill(binding, -1)
    engine.write(binding, source)
    answer = engine.fetch(binding, result)
    assert (answer is not None) == pinned
    settle(engine)
    got = engine.read(binding, result) if answer is None else answer()
    assert got is result
    np.testing.assert_array_equal(result, source)
    result[...] = 0
    engine.read(binding, result)
    np.testing.assert_array_equal(result, source)
    del source, result, got, answer
    gc.collect()
    engine.unpin(view)
    view.release()
    mapping.close()
    engine.unmap_arena(1)
    os.close(fd)


def test_the_other_process_s_mapping_of_the_same_memory_shows_the_same(
    engine: Engine, bench: Workbench
) -> None:
    fd = os.memfd_create("cudnn-actor-test", os.MFD_CLOEXEC)
    os.ftruncate(fd, 8 * MIB)
    ours, theirs = mmap.mmap(fd, 8 * MIB), mmap.mmap(fd, 8 * MIB)
    os.close(fd)
    view = memoryview(ours)
    engine.pin(view)
    spec = TensorSpec.packed((2, 3, 130, 140), "float32", "NHWC")
    sent, received = (
        np.frombuffer(theirs, np.float32, spec.size, offset).reshape(spec.dims) for offset in (0, 4 * MIB)
    )
    source, result = (
        np.frombuffer(view, np.float32, spec.size, offset).reshape(spec.dims) for offset in (0, 4 * MIB)
    )
    sent[...] = values_of(spec)
    binding = bench.binding(bench.empty(spec))
    engine.write(binding, source)
    engine.read(binding, result)
    np.testing.assert_array_equal(received, values_of(spec))
    del sent, received, source, result
    gc.collect()
    engine.unpin(view)
    view.release()
    ours.close()
    theirs.close()


def test_memory_that_cannot_be_pinned_works_unpinned(
    bench: Workbench, engine: Engine, logs: list[EventDict]
) -> None:
    other = CudaEngine()
    other.open()
    spec = TensorSpec.packed((2, 3, 130, 140), "float32", "NHWC")
    with shared_memory(other, pinned=True) as shared:
        engine.pin(shared.view)  # it is pinned already, which the driver refuses to do twice
        (line,) = [line for line in logs if line["event"] == "memory.not_pinned"]
        assert line["log_level"] == "warning"
        source, into = shared.holding(values_of(spec), spec), shared.room(spec)
        binding = bench.binding(bench.empty(spec))
        engine.write(binding, source)
        engine.read(binding, into)
        np.testing.assert_array_equal(into, source)
        del source, into
        gc.collect()
    assert engine.probe() is None
    other.close()


def test_a_read_only_mapping_is_read(bench: Workbench, engine: Engine) -> None:
    fd = os.memfd_create("cudnn-actor-test", os.MFD_CLOEXEC)
    spec = TensorSpec.packed((2, 3, 130, 140), "float32")
    os.write(fd, values_of(spec).tobytes())
    mapping = mmap.mmap(fd, 0, prot=mmap.PROT_READ)
    os.close(fd)
    view = memoryview(mapping)
    engine.pin(view)  # or not: where the device cannot read what nobody here may write
    array = np.frombuffer(view, np.float32).reshape(spec.dims)
    ref = bench.place(array, spec)
    np.testing.assert_array_equal(bench.read(ref), values_of(spec))
    del array
    gc.collect()
    engine.unpin(view)
    view.release()
    mapping.close()


def test_a_builder_that_only_restores_costs_no_second_process(engine: CudaEngine) -> None:
    x, w, y = (
        BufferRef(slot=slot, generation=1, spec=TensorSpec.packed(dims), device="cuda:0")
        for slot, dims in enumerate([(1, 8, 9, 9), (8, 8, 3, 3), (1, 8, 7, 7)])
    )
    graph = lower(ConvFwd(x=x, w=w, y=y, conv=ConvSpec.symmetric(2))).graph
    with BuilderHost() as builders:
        builder = engine.builder(builders)
        builder.open()
        try:
            data = builder.export(builder.build(graph, workspace_limit=None))
            assert builders.pid is not None
        finally:
            builder.close()
    assert data is not None
    with BuilderHost() as builders:
        another = engine.builder(builders)
        another.open()
        try:
            engine.prepare(another.restore(graph, data))
            assert builders.pid is None
        finally:
            another.close()


FORKED = """
import ctypes, importlib, json, os, sys
import numpy as np

from cudnn_actor.engines import choose_engine
from cudnn_actor.protocol import BufferRef, ConvFwd, ConvSpec, TensorSpec
from cudnn_actor.protocol.messages.lowering import lower

choice = choose_engine("cuda:0", apart=True)
for name in choice.preload:
    importlib.import_module(name)
count = ctypes.c_int()
asleep = ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(count)) == 3  # not initialised
before = set(sys.modules)
child = os.fork()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
module, _, name = choice.worker.make.partition(":")
engine = getattr(sys.modules[module], name)(*choice.worker.arguments)
engine.open()
fd = engine.create_arena(0, 2 << 20)
refs = [
    BufferRef(slot=slot, generation=1, spec=TensorSpec.packed(dims), device="cuda:0")
    for slot, dims in enumerate([(1, 8, 9, 9), (8, 8, 3, 3), (1, 8, 7, 7)])
]
message = ConvFwd(x=refs[0], w=refs[1], y=refs[2], conv=ConvSpec.symmetric(2))
lowered = lower(message)
plan = engine.build(lowered.graph, workspace_limit=None)
places = {name: engine.bind(0, ref.slot << 16, ref.spec) for name, ref in zip("xwy", refs)}
for name, ref in zip("xwy", refs):
    engine.write(places[name], np.ones(ref.spec.dims, np.float32))
scalars = [float(getattr(message, name)) for name in lowered.scalars]
engine.execute(plan, [places[name] for name in lowered.buffers], scalars)
right = bool((engine.read(places["y"]) == 72).all())
engine.close()
late = sorted(set(sys.modules) - before)
sys.stdout.write(json.dumps([asleep, right, late]) + "\\n")
sys.stdout.flush()
os._exit(0)
"""


def test_a_forked_worker_finds_all_packages_imported_and_a_device_that_nobody_woke() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKED], cwd=ROOT, capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 0, done.stderr
    asleep, right, late = json.loads(done.stdout.splitlines()[-1])
    assert asleep, "importing what is preloaded has initialised CUDA: a forked worker cannot use it"
    assert right
    known = sys.stdlib_module_names
    packages = {name.partition(".")[0] for name in late} - known
    assert not packages, f"imported after the fork, and not in EngineChoice.preload: {late}"


def test_the_engine_gets_arenas_while_its_work_runs(engine: Engine, bench: Workbench) -> None:
    monitor = CudaEngine()
    monitor.open()
    spec = TensorSpec.packed((1, 1, 512, 1024))
    descriptors = [monitor.create_arena(number, 16 * MIB) for number in range(8)]
    places: list[Binding] = []
    for number, fd in enumerate(descriptors):
        busy(bench) if number < 2 else None
        engine.map_arena(500 + number, fd, 16 * MIB)
        places.append(engine.bind(500 + number, 0, spec))
        engine.fill(places[-1], number)
    for number, place in enumerate(places):
        assert (engine.read(place) == number).all()
        assert (monitor.read(monitor.bind(number, 0, spec)) == number).all()
    for number, fd in enumerate(descriptors):
        engine.unmap_arena(500 + number)
        os.close(fd)
    monitor.close()
