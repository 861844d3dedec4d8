from __future__ import annotations

import fcntl
import os

import ml_dtypes
import numpy as np
import pytest

from cudnn_actor.engines.base import Engine
from cudnn_actor.protocol import (
    ConvBwdData,
    ConvBwdFilter,
    ConvFwd,
    DType,
    InvalidRequest,
    Layout,
    TensorSpec,
)

from ...in_one_test import cases_in_one_test
from ..devices import EngineFactory
from ..problems import PROBLEMS, normal
from ..workbench import ARENA_BYTES, Workbench, spread

SPEC = TensorSpec.packed((2, 3, 4, 5), DType.FLOAT32, Layout.NHWC)
EVERY = list(DType)


def opened(new_engine: EngineFactory) -> Engine:
    engine = new_engine()
    engine.open()
    return engine


def test_an_arena_outlives_the_engine_that_made_it(new_engine: EngineFactory) -> None:
    values = normal(SPEC.dims, SPEC.dtype, 0)
    first = opened(new_engine)
    fd = first.create_arena(0, ARENA_BYTES)
    first.write(first.bind(0, 512, SPEC), values)
    np.testing.assert_array_equal(first.read(first.bind(0, 512, SPEC)), values)
    first.close()
    second = opened(new_engine)
    second.map_arena(7, fd, ARENA_BYTES)
    np.testing.assert_array_equal(second.read(second.bind(7, 512, SPEC)), values)
    second.close()
    os.close(fd)


PLACES = [
    (layout, dims)
    for layout in (Layout.NCHW, Layout.NHWC, Layout.STRIDED)
    for dims in ((), (1,), (3, 4), (2, 3, 4, 5), (0, 3))
    if layout is not Layout.NHWC or len(dims) == 4
]


@cases_in_one_test
@pytest.mark.pairwise
@pytest.mark.parametrize("rows_last", [False, True])
@pytest.mark.parametrize(("layout", "dims"), PLACES)
def test_a_row_is_copied_from_and_to_its_place(
    bench: Workbench, dims: tuple[int, ...], layout: Layout, rows_last: bool
) -> None:
    dtype = DType.BFLOAT16
    engine, count = bench.engine, 4
    spec = spread(dims, dtype) if layout is Layout.STRIDED else TensorSpec.packed(dims, dtype, layout)
    row, last = max(spec.nbytes // dtype.itemsize, 1), spec.strides
    steps = (1, *(count * step for step in last)) if rows_last else (row, *last)
    values = (np.arange(count * spec.size) % 7).reshape(count, *dims).astype(dtype.numpy)
    source, target = (bench.empty(TensorSpec.strided((count, *dims), steps, dtype)) for _ in range(2))
    place = bench.binding(bench.empty(spec))
    engine.write(bench.binding(source), values)
    engine.write(bench.binding(target), np.zeros_like(values))
    load = engine.row_copy(bench.binding(source), place, store=False)
    store = engine.row_copy(bench.binding(target), place, store=True)
    for number in (2, 0, 3):
        load(number)
        store(number)
    values[1] = 0
    np.testing.assert_array_equal(bench.read(target), values)


def test_two_engines_see_the_same_bytes(new_engine: EngineFactory) -> None:
    first, second = opened(new_engine), opened(new_engine)
    fd = first.create_arena(0, ARENA_BYTES)
    second.map_arena(0, fd, ARENA_BYTES)
    values = normal(SPEC.dims, SPEC.dtype, 1)
    second.write(second.bind(0, 256, SPEC), values)
    second.read(second.bind(0, 256, SPEC))
    np.testing.assert_array_equal(first.read(first.bind(0, 256, SPEC)), values)
    first.close()
    second.close()
    os.close(fd)


def test_a_mapping_does_not_need_the_descriptor(new_engine: EngineFactory) -> None:
    engine = opened(new_engine)
    os.close(engine.create_arena(0, ARENA_BYTES))
    engine.fill(engine.bind(0, 0, SPEC), 2.5)
    assert (engine.read(engine.bind(0, 0, SPEC)) == 2.5).all()
    engine.close()


def test_a_descriptor_is_not_inherited_by_programs_that_are_run(new_engine: EngineFactory) -> None:
    engine = opened(new_engine)
    fd = engine.create_arena(0, ARENA_BYTES)
    assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    engine.close()
    os.close(fd)


def test_an_arena_can_be_unmapped_while_its_bindings_are_held(new_engine: EngineFactory) -> None:
    engine = opened(new_engine)
    fd = engine.create_arena(0, ARENA_BYTES)
    held = engine.bind(0, 0, SPEC)
    engine.unmap_arena(0)
    with pytest.raises(KeyError):
        engine.bind(0, 0, SPEC)
    del held
    engine.close()
    os.close(fd)


def test_an_engine_can_be_closed_twice(new_engine: EngineFactory) -> None:
    engine = opened(new_engine)
    os.close(engine.create_arena(0, ARENA_BYTES))
    engine.close()
    engine.close()


@pytest.mark.parametrize("nbytes", [1 << 46, 1 << 62], ids=["that Linux would grant", "past all addresses"])
def test_an_arena_that_no_machine_can_hold_is_refused(engine: Engine, nbytes: int) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    with pytest.raises(MemoryError):
        engine.create_arena(99, nbytes)
    assert sorted(os.listdir("/proc/self/fd")) == before


def test_after_every_fence_all_work_is_done(bench: Workbench) -> None:
    ref = bench.empty(SPEC)
    fence = bench.engine.fence()
    bench.read(ref)
    assert fence is None or bench.engine.has_passed(fence)
    assert bench.engine.probe() is None


@cases_in_one_test
@pytest.mark.parametrize("dtype", EVERY)
@pytest.mark.parametrize("layout", [Layout.NCHW, Layout.NHWC, Layout.STRIDED])
def test_what_is_written_is_read_back(bench: Workbench, dtype: DType, layout: Layout) -> None:
    dims = (2, 3, 4, 5)
    values = np.arange(120).reshape(dims).astype(dtype.numpy)
    spec = spread(dims, dtype) if layout is Layout.STRIDED else TensorSpec.packed(dims, dtype, layout)
    got = bench.read(bench.place(values, spec))
    assert got.flags.c_contiguous
    assert got.flags.owndata
    assert got.dtype == dtype.numpy
    np.testing.assert_array_equal(got, values)


def test_an_array_in_any_strides_can_be_written(bench: Workbench) -> None:
    values = np.arange(120, dtype=np.float32).reshape(5, 4, 3, 2).T[:, ::-1]
    np.testing.assert_array_equal(bench.read(bench.place(values, SPEC)), values)


@cases_in_one_test
@pytest.mark.parametrize("dtype", EVERY)
def test_a_copy_changes_the_layout_and_nothing_else(bench: Workbench, dtype: DType) -> None:
    values = np.arange(120).reshape(SPEC.dims).astype(dtype.numpy)
    src = bench.place(values)
    dst = bench.empty(spread(SPEC.dims, dtype))
    bench.engine.copy(bench.binding(src), bench.binding(dst))
    np.testing.assert_array_equal(bench.read(dst), values)


@pytest.mark.parametrize("how", ["write", "copy", "fill", "forward", "backward data", "backward filter"])
def test_gaps_between_elements_are_never_written(bench: Workbench, how: str) -> None:
    problem = PROBLEMS["padded"]
    x, w, y = (bench.place(normal(d, DType.FLOAT32, 0)) for d in (problem.x, problem.w, problem.y))
    dims = {"backward data": problem.x, "backward filter": problem.w}.get(how, problem.y)
    spec = spread(dims, DType.FLOAT32)
    out = bench.empty(spec)
    before = bench.bytes_of(out).copy()
    match how:
        case "write":
            bench.engine.write(bench.binding(out), normal(dims, DType.FLOAT32, 1))
        case "copy":
            bench.engine.copy(bench.binding(y), bench.binding(out))
        case "fill":
            bench.engine.fill(bench.binding(out), 1.0)
        case "forward":
            bench.run(ConvFwd(x=x, w=w, y=out, conv=problem.conv))
        case "backward data":
            bench.run(ConvBwdData(dy=y, w=w, dx=out, conv=problem.conv))
        case "backward filter":
            bench.run(ConvBwdFilter(x=x, dy=y, dw=out, conv=problem.conv))
    after, element = bench.bytes_of(out), elements_of(spec)
    assert (after[element] != before[element]).any()
    np.testing.assert_array_equal(after[~element], before[~element])


def elements_of(spec: TensorSpec) -> np.ndarray:
    """Which of the bytes that a tensor spans belong to an element."""
    mask = np.zeros(spec.nbytes, bool)
    size = spec.dtype.itemsize
    for index in np.ndindex(spec.dims):
        place = size * sum(i * s for i, s in zip(index, spec.strides, strict=True))
        mask[place : place + size] = True
    return mask


@cases_in_one_test
@pytest.mark.parametrize("dtype", EVERY)
def test_a_fill_sets_every_element(bench: Workbench, dtype: DType) -> None:
    ref = bench.empty(TensorSpec.packed((2, 3, 4, 5), dtype, Layout.NHWC))
    for value in (0, 1) if dtype is DType.BOOL else (3, 1):
        bench.engine.fill(bench.binding(ref), value)
        assert (bench.read(ref) == value).all()


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (DType.INT8, float("nan")),
        (DType.INT32, float("inf")),
        (DType.INT8, 128),
        (DType.INT8, -129),
        (DType.UINT8, -1),
        (DType.INT32, 2.0**31),
        (DType.INT8, 0.5),
        (DType.FLOAT16, 1e6),
        (DType.BFLOAT16, -1e300),
    ],
)
def test_a_fill_with_what_the_dtype_cannot_hold_is_refused(
    bench: Workbench, dtype: DType, value: float
) -> None:
    ref = bench.empty(TensorSpec.packed((2, 2), dtype))
    before = bench.read(ref)
    with pytest.raises(InvalidRequest, match="value="):
        bench.engine.fill(bench.binding(ref), value)
    np.testing.assert_array_equal(bench.read(ref).astype("float64"), before.astype("float64"))


def test_floats_can_be_filled_with_nan_and_infinity(bench: Workbench) -> None:
    for dtype in (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16):
        ref = bench.empty(TensorSpec.packed((3,), dtype))
        bench.engine.fill(bench.binding(ref), float("-inf"))
        assert np.isneginf(bench.read(ref).astype("float32")).all()
        bench.engine.fill(bench.binding(ref), float("nan"))
        assert np.isnan(bench.read(ref).astype("float32")).all()


@cases_in_one_test
@pytest.mark.parametrize(
    "source", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16, np.int64, np.bool_]
)
@pytest.mark.parametrize("dtype", [DType.FLOAT64, DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16])
def test_numbers_are_rounded_into_a_float_buffer(bench: Workbench, source: type, dtype: DType) -> None:
    values: np.ndarray = (np.arange(6).reshape(2, 3) / 3).astype(source)
    ref = bench.place(values, TensorSpec.packed((2, 3), dtype))
    np.testing.assert_array_equal(bench.read(ref), values.astype("float64").astype(dtype.numpy))


def test_a_number_too_large_for_the_buffer_becomes_infinite_without_a_warning(bench: Workbench) -> None:
    for dtype in (DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16):
        ref = bench.place(np.array([1e300, -1e300]), TensorSpec.packed((2,), dtype))
        np.testing.assert_array_equal(bench.read(ref).astype("float32"), [np.inf, -np.inf])


def test_integers_that_fit_are_kept_in_a_narrower_buffer(bench: Workbench) -> None:
    values = np.array([-128, 0, 127], np.int64)
    got = bench.read(bench.place(values, TensorSpec.packed((3,), DType.INT8)))
    np.testing.assert_array_equal(got, values)


@pytest.mark.parametrize(
    ("values", "dtype", "problem"),
    [
        (np.array([1, 300, -5]), DType.INT8, "data=300: does not fit int8"),
        (np.array([1, -1]), DType.UINT8, "data=-1: does not fit uint8"),
        (np.array([2**31]), DType.INT32, f"data={2**31}: does not fit int32"),
        (np.array([2**64 - 1], np.uint64), DType.INT32, f"data={2**64 - 1}: does not fit int32"),
        (np.array([1.0, 2.0]), DType.INT8, "floats would lose.*round and cast it first"),
        (np.array([1.0], ml_dtypes.bfloat16), DType.INT32, "floats would lose"),
        (np.array([1j]), DType.FLOAT32, "not hold real numbers"),
        (np.array(["1"]), DType.FLOAT32, "not hold real numbers"),
        pytest.param(np.array([object()]), DType.FLOAT32, "not hold real numbers", id="an object"),
        (np.array([1], "datetime64[s]"), DType.FLOAT32, "not hold real numbers"),
    ],
    ids=str,
)
def test_values_that_would_change_their_meaning_are_refused(
    bench: Workbench, values: np.ndarray, dtype: DType, problem: str
) -> None:
    ref = bench.empty(TensorSpec.packed(values.shape, dtype))
    before = bench.read(ref)
    with pytest.raises(InvalidRequest, match=problem) as refusal:
        bench.engine.write(bench.binding(ref), values)
    assert refusal.value.field == "data"
    np.testing.assert_array_equal(bench.read(ref).astype("float64"), before.astype("float64"))


@pytest.mark.parametrize("dims", [(3, 2), (6,), (1, 2, 3), (1, 3)])
def test_values_of_other_dims_are_refused(bench: Workbench, dims: tuple[int, ...]) -> None:
    ref = bench.empty(TensorSpec.packed((2, 3), DType.FLOAT32))
    with pytest.raises(InvalidRequest, match="other dims"):
        bench.engine.write(bench.binding(ref), np.zeros(dims, np.float32))
