"""Copies by tiles, compiled for the host and run; when there are tiles; how much is accessed at once."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pytest

from cudnn_actor.engines.cuda.plans import tiled_kernels
from cudnn_actor.engines.cuda.plans.kernels import merged
from cudnn_actor.engines.cuda.plans.recipe import Buffer, TiledStep
from cudnn_actor.engines.cuda.plans.splitting import compile_split
from cudnn_actor.engines.cuda.plans.tiled_kernels import Tiled, TiledKernel, tiled, tiled_source
from cudnn_actor.protocol import DType, Graph, TensorSpec

from . import host_cuda
from .moved_graphs import TRANSPOSED
from .test_partition import array_in, evaluated, filled


def step_of(graph: Graph) -> TiledStep:
    (step,) = compile_split(graph.body, None, None).recipe.steps
    assert isinstance(step, TiledStep)
    return step


@pytest.fixture(scope="module")
def compiled() -> None:
    host_cuda.compile_together(tiled_source(step_of(graph).kernel) for graph in TRANSPOSED.values())


@pytest.mark.parametrize("name", TRANSPOSED)
@pytest.mark.usefixtures("compiled")
def test_every_element_is_moved(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    host_cuda.use(monkeypatch, tiled_kernels)
    graph, step = TRANSPOSED[name], step_of(TRANSPOSED[name])
    wanted, memories = filled(graph), filled(graph)
    tensors = [graph.body.tensor(uid) for uid in graph.body.bound]
    evaluated(graph.body, [array_in(memory, tensor) for memory, tensor in zip(wanted, tensors, strict=True)])
    numbers = [source.number for source in step.sources if isinstance(source, Buffer)]
    TiledKernel(step.kernel).launch([memories[number].ctypes.data for number in numbers], ())
    for expected, found in zip(wanted, memories, strict=True):
        np.testing.assert_array_equal(found, expected)


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
    }


@pytest.mark.parametrize("kernel", [step_of(graph).kernel for graph in TRANSPOSED.values()], ids=TRANSPOSED)
def test_few_lanes_of_a_warp_want_one_bank(kernel: Tiled) -> None:
    """The words in shared memory of one access of a warp, as in the source: 32 banks of 4 bytes."""
    (reading, writing), size = kernel.lanes, kernel.itemsize
    written = max(kernel.written, kernel.word)

    def place(row: int, column: int) -> int:
        return row * kernel.pitch + row // 32 * kernel.skew + column

    stored = [place(lane // reading, lane % reading * kernel.read) for lane in range(32)]
    loaded = [place(lane % writing * written, lane // writing) for lane in range(32)]
    for places in (loaded,) if kernel.shifted[0] else (stored, loaded):
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
                assert kernel.stored * itemsize <= 48 << 10, kernel


def kernel_of(dims: tuple[int, ...], strides: tuple[int, ...], start: int = 0) -> Tiled | None:
    """Of a copy of float32 from such strides, from so many bytes after an aligned address."""
    packed = TensorSpec.packed(dims, DType.FLOAT32).strides
    return tiled(dims, [packed, strides], [16, start or 16], 4)


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
    assert len(merged((2, 4, 8, 16), [(512, 128, 16, 1), (512, 8, 1, 32)])) == 3
