"""Copies by tiles, compiled for the host and run; when there are tiles; how much is accessed at once."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any, NamedTuple

import numpy as np
import pytest

from cudnn_actor.engines.cuda.kernels import index_code
from cudnn_actor.engines.cuda.kernels.axes import merge_dims
from cudnn_actor.engines.cuda.kernels.kernel import compile_run
from cudnn_actor.engines.cuda.kernels.skewed_tiles import describe_skewed
from cudnn_actor.engines.cuda.kernels.transposes import Tiled, describe_tiled, tiled_source
from cudnn_actor.engines.cuda.planning.splitting import compile_split
from cudnn_actor.engines.cuda.running.recipe import Buffer, KernelStep
from cudnn_actor.protocol import DType, Graph, TensorSpec

from ....in_one_test import cases_in_one_test
from ... import host_cuda
from ...moved_graphs import TRANSPOSED
from ..planning.test_partition import array_in, evaluated, filled


def step_of(graph: Graph) -> KernelStep[Tiled]:
    (step,) = compile_split(graph.body, None, None).recipe.steps
    assert isinstance(step, KernelStep)
    assert isinstance(step.kernel, Tiled)
    return KernelStep(step.kernel, step.sources)


@pytest.fixture(scope="module")
def together() -> None:
    host_cuda.compile_together(tiled_source(step_of(graph).kernel) for graph in TRANSPOSED.values())


@pytest.mark.parametrize("name", TRANSPOSED)
@pytest.mark.usefixtures("together")
def test_every_element_is_moved(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host_cuda.use(monkeypatch)
    graph, step = TRANSPOSED[name], step_of(TRANSPOSED[name])
    wanted, memories = filled(graph), filled(graph)
    tensors = [graph.body.tensor(uid) for uid in graph.body.bound]
    evaluated(graph.body, [array_in(memory, tensor) for memory, tensor in zip(wanted, tensors, strict=True)])
    numbers = [source.number for source in step.sources if isinstance(source, Buffer)]
    compile_run(step.kernel.launches())([memories[number].ctypes.data for number in numbers], ())
    for expected, found in zip(wanted, memories, strict=True):
        np.testing.assert_array_equal(found, expected)


class Case(NamedTuple):
    """Skewed tiles of two matrices: the stride from row to row, and what else there is to it."""

    itemsize: int
    step: int
    wide: bool = False


SKEWED = {
    **{f"{itemsize} bytes, odd rows": Case(itemsize, 1001) for itemsize in (1, 2, 4, 8)},
    **{f"{itemsize} bytes, even rows": Case(itemsize, 1002) for itemsize in (1, 2, 4, 8)},
    "2 bytes, aligned rows": Case(2, 1008),
    "rows in reverse": Case(2, -1001),
    "places of 64 bits": Case(4, 1003, wide=True),
}


def skewed_kernel(case: Case, rows: int, columns: int) -> Tiled:
    """A copy of two matrices; the result's rows, and the matrices, lie apart by odd numbers of elements."""
    strides = [((rows + 2) * columns + 5, rows + 2, 1), (rows * abs(case.step) + 3, 1, case.step)]
    found = describe_tiled((2, columns, rows), strides, [case.itemsize] * 2, case.itemsize)
    assert found is not None
    assert found.skewed_tiles is not None
    return found


def around(case: Case) -> list[tuple[int, int]]:
    """Numbers of rows and columns around those of a tile."""
    rows, columns = skewed_kernel(case, 500, 500).tile
    return [
        (rows - 1, columns),
        (rows, columns + 1),
        (rows + 1, columns - 1),
        (2 * rows - 32 // case.itemsize + 1, columns),
        (2 * rows + 3, 2 * columns + 3),
    ]


def constants(patch: pytest.MonkeyPatch, case: Case) -> None:
    patch.setattr(index_code, "SMALL", 0 if case.wide else 1 << 31)


@pytest.fixture(scope="module")
def together_skewed() -> None:
    with pytest.MonkeyPatch.context() as patch:
        sources = []
        for case in SKEWED.values():
            constants(patch, case)
            sources += [tiled_source(skewed_kernel(case, *sizes)) for sizes in around(case)]
        host_cuda.compile_together(sources)


def test_places_behind_the_rows_of_a_skewed_tile_are_counted_too() -> None:
    step = (1 << 20) + 1
    most = (1 << 31) // step
    wide = []
    for rows in (most - 400, most - 130):
        found = describe_tiled((500, rows), [(rows + 2, 1), (1, step)], [1, 1], 1)
        assert found is not None
        assert found.skewed_tiles is not None
        assert (rows + found.tile[0]) * step + 1000 < 1 << 31
        wide.append(found.wide)
    assert wide == [False, True]


@pytest.mark.parametrize("name", SKEWED)
@pytest.mark.usefixtures("together_skewed")
def test_skewed_tiles_end_anywhere(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host_cuda.use(monkeypatch)
    case = SKEWED[name]
    constants(monkeypatch, case)
    dtype = np.dtype(f"u{case.itemsize}")
    random = np.random.default_rng(case.step + 2000)
    for start, (rows, columns) in enumerate(around(case)):
        kernel = skewed_kernel(case, rows, columns)
        (to, of) = ([each[n] for each in kernel.batch] for n in (1, 2))
        # Behind an address that is a multiple of 32 bytes by as many elements as the number of the sizes.
        x, y = (aligned(step * 2 + start, dtype) for step in (of[0], to[0]))
        x[...] = random.integers(0, 1 << 8 * case.itemsize, x.size, dtype, endpoint=False)
        y[...] = 7
        wanted, first = y.copy(), start + (rows - 1) * max(-case.step, 0)
        for matrix in range(2):
            at = first + matrix * of[0] + case.step * np.arange(rows) + np.arange(columns)[:, None]
            place = (
                start + matrix * to[0] + np.arange(rows) + kernel.column_step * np.arange(columns)[:, None]
            )
            wanted[place] = x[at]
        pointers = [y.ctypes.data + start * case.itemsize, x.ctypes.data + first * case.itemsize]
        compile_run(kernel.launches())(pointers, ())
        np.testing.assert_array_equal(y, wanted)


def aligned(count: int, dtype: np.dtype[Any]) -> np.ndarray:
    """An array that begins at a multiple of 32 bytes."""
    memory = np.empty(count * dtype.itemsize + 32, np.uint8)
    return memory[-memory.ctypes.data % 32 :][: count * dtype.itemsize].view(dtype)


def test_matrices_that_fill_tiles_are_skewed_if_they_are_not_aligned() -> None:
    def kernel(rows: int, columns: int) -> Tiled:
        found = describe_tiled((columns, rows), [(rows, 1), (1, columns)], [256, 256], 2)
        assert found is not None
        return found

    assert kernel(8191, 8193).skewed_tiles is not None
    assert kernel(8192, 8191).skewed_tiles is not None, "what is read is not aligned"
    assert kernel(8191, 8192).skewed_tiles is not None, "what is written is not aligned"
    assert kernel(8192, 8192).skewed_tiles is None
    assert kernel(8188, 8190).skewed_tiles is not None, "what is read is aligned to 4 bytes"
    assert kernel(8188, 8196).skewed_tiles is None, "both are aligned to 8"
    tiles = kernel(8193, 8191).skewed_tiles
    assert tiles is not None
    assert kernel(8193, 8191).counts[1] == -(-(8193 + 15) // tiles.rows)
    assert kernel(8191, 31).skewed_tiles is None, "too few columns"
    assert kernel(31, 8191).skewed_tiles is None, "too few rows"


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_few_lanes_want_one_bank_of_a_skewed_tile(itemsize: int) -> None:
    """None the same if the rows' stride is odd; of bytes, multiples of 4 are left to the other tiles."""
    for step in range(-64, 65):
        tiles = describe_skewed(itemsize, 4096, 4096, step)
        if tiles is None:
            assert (itemsize, step % 4) == (1, 0)
            continue
        for before in range(tiles.chunk):
            places = [(before + lane * tiles.word * tiles.pitch) * itemsize for lane in range(32)]
            for part in [places] if itemsize <= 4 else [places[:16], places[16:]]:
                words = {place // 4 for place in part}
                banks = Counter(word % 32 if itemsize <= 4 else word // 2 % 16 for word in words)
                assert max(banks.values()) <= 2 - step % 2


def test_chunks_of_a_skewed_tile_do_not_meet() -> None:
    """A row's chunks end before those of the next row begin, and within the memory."""
    for itemsize, step, columns in itertools.product((1, 2, 4, 8), range(-17, 18), (16, 32, 64, 128, 4096)):
        tiles = describe_skewed(itemsize, 4096, columns, step)
        if tiles is None:
            continue
        chunk = tiles.chunk
        assert (tiles.pitch - step) % chunk == 0
        assert tiles.shared_elements * itemsize <= 48 << 10
        for shift, row in itertools.product(range(chunk), (0, 1, tiles.rows + 32 // itemsize - 2)):
            begin = shift + row * tiles.pitch
            ends = -(-(begin + tiles.columns) // chunk) * chunk
            assert ends - begin // chunk * chunk <= tiles.chunks * chunk
            assert ends <= (begin + tiles.pitch) // chunk * chunk
            assert ends <= tiles.shared_elements


def test_as_many_bytes_are_accessed_at_once_as_memory_allows() -> None:
    found = {
        name: (step_of(graph).kernel.read, step_of(graph).kernel.written)
        for name, graph in TRANSPOSED.items()
    }
    assert found == {
        "bytes": (16, 16),
        "bytes, some together": (8, 4),
        "odd bytes": (1, 1),
        "halves": (8, 8),
        "odd halves": (2, 1),
        "batches": (4, 4),
        "odd": (1, 1),
        "wide": (2, 2),
        "odd and wide": (1, 1),
        "channels last": (8, 8),
        "channels first": (4, 4),
        "to channels last": (8, 8),
        "from channels last": (4, 4),
        "eight axes": (8, 8),
        "repeated": (4, 2),
        "repeated, channels last": (16, 16),
        "three channels": (1, 8),
        "to three channels": (4, 1),
        "depth to space": (8, 2),
        "odd depth to space": (1, 2),
        "depth to space, channels last": (8, 8),
        "space to depth": (2, 2),
        "space to depth of halves": (2, 8),
        "space to depth of bytes": (2, 16),
        "ends of odd halves": (1, 1),
        "ends of odd bytes": (1, 1),
        "few odd halves": (1, 1),
    }


@cases_in_one_test
@pytest.mark.parametrize(
    "kernel",
    [
        pytest.param(kernel, id=name)
        for name, graph in TRANSPOSED.items()
        if (kernel := step_of(graph).kernel).skewed_tiles is None
    ],
)
def test_few_lanes_of_a_warp_want_one_bank(kernel: Tiled) -> None:
    """The words in shared memory of one access of a warp, as in the source: 32 banks of 4 bytes."""
    (reading, writing), size = kernel.lanes, kernel.itemsize
    written = max(kernel.written, kernel.word)

    def place(row: int, column: int) -> int:
        return row * kernel.pitch + row // 32 * kernel.skew + column

    stored = [place(lane // reading, lane % reading * kernel.read) for lane in range(32)]
    loaded = [place(lane % writing * written, lane // writing) for lane in range(32)]
    for places in (loaded,) if kernel.shifts_words[0] else (stored, loaded):
        for part in [places] if size <= 4 else [places[:16], places[16:]]:
            words = {place * size // 4 for place in part}
            banks = Counter(word % 32 if size <= 4 else word // 2 % 16 for word in words)
            assert max(banks.values()) <= (2 if kernel.tile[0] >= 16 else 4)


def test_a_tile_fits_into_shared_memory() -> None:
    """Into the 48 KiB that a kernel may have without being asked for more."""
    sizes = (1, 2, 3, 4, 5, 8, 9, 16, 31, 64, 100, 128, 257, 4096, 1 << 20)
    for itemsize, rows, columns in itertools.product((1, 2, 4, 8), sizes, sizes):
        for read, written in itertools.product([1 << n for n in range(5) if itemsize << n <= 16], repeat=2):
            if rows % written == 0 == columns % read:
                kernel = Tiled(itemsize, rows, columns, columns, rows, (), read, written)
                assert kernel.shared_elements * itemsize <= 48 << 10, kernel


def kernel_of(dims: tuple[int, ...], strides: tuple[int, ...], start: int = 0) -> Tiled | None:
    """Of a copy of float32 from such strides, from so many bytes after an aligned address."""
    packed = TensorSpec.packed(dims, DType.FLOAT32).strides
    return describe_tiled(dims, [packed, strides], [16, start or 16], 4)


def test_copies_without_need_have_no_tiles() -> None:
    assert kernel_of((64, 64), (64, 1)) is None, "side by side in both"
    assert kernel_of((64, 64), (1, 128)) is not None
    assert kernel_of((64, 64), (2, 128)) is None, "not side by side anywhere"
    assert kernel_of((8, 8), (1, 8)) is None, "too few rows and columns"
    assert kernel_of((3, 40), (1, 3)) is None, "too few columns"
    assert kernel_of((3, 4096), (1, 3)) is not None, "enough of both together"
    assert kernel_of((64, 64), (0, 1)) is None
    assert kernel_of((64, 64), (1, 0)) is None, "each element in a whole row"
    assert kernel_of((4096, 2), (1, 0)) is not None
    assert kernel_of((0, 64), (1, 64)) is None
    assert kernel_of((), ()) is None


def test_addresses_and_strides_decide_too() -> None:
    found = kernel_of((2, 64, 64), (8193, 1, 128), start=8)
    assert found is not None
    assert (found.read, found.written) == (1, 4), "the batch's stride is odd"
    found = kernel_of((2, 64, 64), (8192, 1, 128), start=8)
    assert found is not None
    assert (found.read, found.written) == (2, 4), "the address is a multiple of 8"
    found = kernel_of((2, 64, 64), (-8192, 1, 128))
    assert found is not None
    assert found.batch == ((2, 4096, -8192),), "in reverse"


def test_axes_that_stay_neighbours_are_one() -> None:
    kernel = step_of(TRANSPOSED["channels last"]).kernel
    assert (kernel.rows, kernel.columns, kernel.batch) == (16, 32, ((2, 512, 512),))
    assert len(merge_dims((2, 4, 8, 16), [(512, 128, 16, 1), (512, 8, 1, 32)])) == 3
