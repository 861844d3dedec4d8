"""Values between buffers and memory that another process shares: each is written once, where it is wanted."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from cudnn_actor.engines.base import Engine, EngineFailure
from cudnn_actor.protocol import ConvFwd, ConvSpec, DType, Layout, TensorSpec

from ...in_one_test import cases_in_one_test
from ...whole import pairwise
from ..devices import EngineFactory
from ..shared_memory import SharedMemory, shared_memory
from ..workbench import ARENA_BYTES, Workbench, spread

DIMS = (2, 3, 4, 5)
LARGE = (2, 3, 160, 170)
"""Past what is permuted on the host."""
LAYOUTS = [Layout.NCHW, Layout.NHWC, Layout.STRIDED]


@pytest.fixture(params=[False, True], ids=["unpinned", "pinned"])
def shared(engine: Engine, request: pytest.FixtureRequest) -> Iterator[SharedMemory]:
    with shared_memory(engine, pinned=request.param) as shared:
        yield shared
        gc.collect()


def spec_of(dims: tuple[int, ...], dtype: DType, layout: Layout) -> TensorSpec:
    return spread(dims, dtype) if layout is Layout.STRIDED else TensorSpec.packed(dims, dtype, layout)


def values_of(spec: TensorSpec) -> np.ndarray:
    """As many different values as the dtype has."""
    return (np.arange(spec.size).reshape(spec.dims) % 113).astype(spec.dtype.numpy)


def settle(engine: Engine) -> None:
    """Wait for a fence behind all that was enqueued."""
    if not engine.synchronous:
        fence = engine.fence()
        while not engine.has_passed(fence):
            pass


def read(engine: Engine, src: object, into: np.ndarray) -> np.ndarray:
    return engine.read(src, into)


def fetch(engine: Engine, src: object, into: np.ndarray) -> np.ndarray:
    answer = engine.fetch(src, into)
    assert answer is not None
    settle(engine)
    return answer()


WAYS = pytest.mark.parametrize("receive", [read, fetch])
Receive = Callable[[Engine, object, np.ndarray], np.ndarray]


EVERY_SPEC = pytest.mark.parametrize(
    "spec",
    [
        pytest.param(spec_of(dims, dtype, layout), id=f"{dtype}-{layout}-{size}")
        for dtype, layout, (size, dims) in pairwise(
            itertools.product(DType, LAYOUTS, {"small": DIMS, "large": LARGE}.items()), tuple
        )
    ],
)


@cases_in_one_test
@pytest.mark.pairwise
@WAYS
@EVERY_SPEC
def test_values_go_to_where_they_are_wanted(
    bench: Workbench, shared: SharedMemory, receive: Receive, spec: TensorSpec
) -> None:
    values = values_of(spec)
    ref, into = bench.place(values, spec), shared.room(spec)
    assert receive(bench.engine, bench.binding(ref), into) is into
    np.testing.assert_array_equal(into, values)


@cases_in_one_test
@EVERY_SPEC
def test_values_come_from_where_they_are(bench: Workbench, shared: SharedMemory, spec: TensorSpec) -> None:
    values = values_of(spec)
    ref = bench.empty(spec)
    array = shared.holding(values, spec)
    bench.engine.write(bench.binding(ref), array)
    settle(bench.engine)
    array[...] = 0  # from here on the memory is the caller's again
    np.testing.assert_array_equal(bench.read(ref), values)


@cases_in_one_test
@EVERY_SPEC
def test_a_direct_copy_moves_what_is_there_each_time_that_it_is_called(
    bench: Workbench, shared: SharedMemory, spec: TensorSpec
) -> None:
    engine, values = bench.engine, values_of(spec)
    array = shared.holding(values, spec)
    src, dst = (bench.binding(bench.empty(spec)) for _ in range(2))
    copies = [engine.direct_copy(array, src), engine.direct_copy(src, dst)]
    for number in range(3):
        array[...] = np.roll(values, number)
        for copy, (near, far) in zip(copies, ((array, src), (src, dst)), strict=True):
            if copy is not None:
                copy()
            elif near is array:
                engine.write(far, near)
            else:
                engine.copy(near, far)
        settle(engine)
        np.testing.assert_array_equal(engine.read(dst), np.roll(values, number))


@pytest.mark.parametrize("spec", [spec_of(LARGE, DType.BFLOAT16, layout) for layout in LAYOUTS], ids=str)
def test_a_copy_in_parts_moves_those_that_are_asked_for(
    bench: Workbench, shared: SharedMemory, spec: TensorSpec
) -> None:
    engine, values = bench.engine, values_of(spec)
    array, dst = shared.holding(values, spec), bench.binding(bench.empty(spec))
    copy = engine.part_copy(array, dst)
    assert copy is None or spec.layout is Layout.NCHW
    if copy is not None:
        engine.write(dst, np.zeros_like(values))
        half = values.size // 2
        copy(half * values.itemsize, values.nbytes)
        settle(engine)
        flat = engine.read(dst).reshape(-1)
        np.testing.assert_array_equal(flat[half:], values.reshape(-1)[half:])
        assert not flat[:half].any()
        copy(0, half * values.itemsize)
        settle(engine)
        np.testing.assert_array_equal(engine.read(dst), values)


@cases_in_one_test
@EVERY_SPEC
def test_a_direct_copy_out_is_there_behind_a_fence(
    bench: Workbench, shared: SharedMemory, spec: TensorSpec
) -> None:
    engine, values, into = bench.engine, values_of(spec), shared.room(spec)
    src = bench.binding(bench.empty(spec))
    copy = engine.direct_copy(src, into)
    for number in range(3):
        engine.write(src, np.roll(values, number))
        if copy is None:
            into[...] = read(engine, src, np.empty(spec.dims, spec.dtype.numpy))
        else:
            copy()
            settle(engine)
        np.testing.assert_array_equal(into, np.roll(values, number))


@WAYS
def test_not_a_byte_beside_the_target_is_written(
    bench: Workbench, shared: SharedMemory, receive: Receive
) -> None:
    spec = TensorSpec.packed((3, 5, 7), DType.UINT8)
    bytes_of_it = np.frombuffer(shared.view, np.uint8)
    bytes_of_it[:] = 0xC3
    into = bytes_of_it[257 : 257 + spec.size].reshape(spec.dims)
    ref = bench.empty(spec)
    receive(bench.engine, bench.binding(ref), into)
    assert (into == 77).all()
    assert (bytes_of_it == 0xC3).sum() == bytes_of_it.size - into.size


@WAYS
def test_a_target_need_not_be_aligned(bench: Workbench, shared: SharedMemory, receive: Receive) -> None:
    for layout in LAYOUTS:
        spec = spec_of(LARGE, DType.FLOAT32, layout)
        into = shared.room(spec, offset=1)
        ref = bench.place(values_of(spec), spec)
        receive(bench.engine, bench.binding(ref), into)
        np.testing.assert_array_equal(into, values_of(spec))


def test_a_source_need_not_be_aligned(bench: Workbench, shared: SharedMemory) -> None:
    for layout in LAYOUTS:
        spec = spec_of(LARGE, DType.FLOAT32, layout)
        array = shared.room(spec, offset=1)
        array[...] = values_of(spec)
        ref = bench.place(array, spec)
        np.testing.assert_array_equal(bench.read(ref), values_of(spec))


@pytest.mark.parametrize("kind", ["another dtype", "strided"])
def test_what_the_buffer_cannot_hold_as_it_is_has_been_read_when_write_returns(
    bench: Workbench, shared: SharedMemory, kind: str
) -> None:
    spec = TensorSpec.packed(LARGE, DType.FLOAT32)
    array = shared.room(TensorSpec.packed(LARGE, DType.FLOAT64))
    array[...] = values_of(spec)
    if kind == "strided":
        array = array.view(np.float32)[..., ::2]
        array[...] = values_of(spec)
    ref = bench.empty(spec)
    bench.engine.write(bench.binding(ref), array)
    array[...] = 0
    np.testing.assert_array_equal(bench.read(ref), values_of(spec))


@pytest.mark.pairwise
@WAYS
@pytest.mark.parametrize("kind", ["dims", "transposed", "dtype", "strided", "read-only"])
def test_a_target_that_does_not_fit_is_refused_and_not_written(
    bench: Workbench, shared: SharedMemory, receive: Receive, kind: str
) -> None:
    spec = TensorSpec.packed((4, 6), DType.FLOAT32)
    room = shared.room(TensorSpec.packed((8, 12), DType.FLOAT32))
    whole = room.reshape(-1)[:24].reshape(4, 6)
    targets = {
        "dims": room.reshape(-1)[:20].reshape(4, 5),
        "transposed": whole.reshape(6, 4).T,
        "dtype": whole.view(np.int32),
        "strided": room[::2, ::2],
        "read-only": whole.view(),
    }
    into = targets[kind]
    if kind == "read-only":
        into.flags.writeable = False
    before, ref = room.copy(), bench.empty(spec)
    with pytest.raises(EngineFailure, match="BAD_TARGET") as refusal:
        receive(bench.engine, bench.binding(ref), into)
    assert "C-contiguous float32 (4, 6)" in refusal.value.detail
    settle(bench.engine)
    np.testing.assert_array_equal(room, before)


@WAYS
def test_a_target_gets_what_was_sent_before_and_not_what_comes_after(
    bench: Workbench, shared: SharedMemory, receive: Receive
) -> None:
    spec = TensorSpec.packed(LARGE, DType.FLOAT32, Layout.NHWC)
    ref, into = bench.empty(spec), shared.room(spec)
    binding = bench.binding(ref)
    bench.engine.fill(binding, 1)
    answer = bench.engine.fetch(binding, into)
    bench.engine.fill(binding, 2)
    settle(bench.engine)
    assert answer is not None
    assert (answer() == 1).all()
    assert (receive(bench.engine, binding, into) == 2).all()


def test_what_is_written_from_shared_memory_is_there_for_the_next_run(
    bench: Workbench, shared: SharedMemory
) -> None:
    x, w, y = (TensorSpec.packed(dims) for dims in [(1, 1, 90, 90), (1, 1, 1, 1), (1, 1, 90, 90)])
    source, result = shared.holding(values_of(x), x), shared.room(y)
    refs = [bench.empty(spec) for spec in (x, w, y)]
    bench.engine.fill(bench.binding(refs[1]), 3)
    message = ConvFwd(x=refs[0], w=refs[1], y=refs[2], conv=ConvSpec.symmetric(2))
    bench.engine.write(bench.binding(refs[0]), source)
    bench.run(message)
    bench.engine.read(bench.binding(refs[2]), result)
    np.testing.assert_array_equal(result, 3 * source)


def test_pinning_twice_and_unpinning_twice_is_safe(engine: Engine) -> None:
    with shared_memory(engine, pinned=True) as shared:
        engine.pin(shared.view)
        engine.unpin(shared.view)
        engine.unpin(shared.view)


def test_an_engine_that_is_closed_lets_go_of_what_it_pinned(new_engine: EngineFactory) -> None:
    engine = new_engine()
    engine.open()
    with shared_memory(engine, pinned=True) as shared:
        engine.close()
        another = new_engine()
        another.open()
        another.pin(shared.view)  # as the successor of a worker that was closed would
        another.unpin(shared.view)
        another.close()


def test_arenas_come_and_go_between_runs(new_engine: EngineFactory) -> None:
    """An engine that is at work is given arenas one after another, as a worker is by its parent."""
    keeper, worker = new_engine(), new_engine()
    keeper.open()
    worker.open()
    spec = TensorSpec.packed((1, 1, 64, 64), DType.FLOAT32)
    descriptors = [keeper.create_arena(number, ARENA_BYTES) for number in range(3)]
    worker.map_arena(10, descriptors[0], ARENA_BYTES)
    home = worker.bind(10, 0, spec)
    worker.fill(home, 1)
    for lap in range(2):
        for number in (1, 2):
            for _ in range(20):
                worker.copy(home, worker.bind(10, spec.nbytes, spec))  # work that is under way
            worker.map_arena(10 + number, descriptors[number], ARENA_BYTES)
            away = worker.bind(10 + number, 512, spec)
            worker.fill(away, 10 * lap + number)
            worker.copy(away, worker.bind(10 + number, 1 << 20, spec))
            worker.copy(home, away)
            assert (worker.read(worker.bind(10 + number, 1 << 20, spec)) == 10 * lap + number).all()
            settle(worker)
            worker.unmap_arena(10 + number)
            seen = keeper.read(keeper.bind(number, 1 << 20, spec))
            assert (seen == 10 * lap + number).all()
            assert (keeper.read(keeper.bind(number, 512, spec)) == 1).all()
    assert (worker.read(worker.bind(10, spec.nbytes, spec)) == 1).all()
    worker.close()
    keeper.close()
    for fd in descriptors:
        os.close(fd)
