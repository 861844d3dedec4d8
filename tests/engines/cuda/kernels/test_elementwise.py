"""Generated elementwise kernels, compiled for the host and run: they compute what their graphs say."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest

from cudnn_actor.engines.cuda.kernels import elementwise
from cudnn_actor.engines.cuda.kernels.elementwise import Elementwise, describe_elementwise, source
from cudnn_actor.engines.cuda.kernels.expressions import Leaf, Result
from cudnn_actor.engines.cuda.kernels.index_code import divisor
from cudnn_actor.engines.cuda.kernels.kernel import compile_run
from cudnn_actor.engines.cuda.planning.splitting import compile_split
from cudnn_actor.engines.cuda.running.recipe import Buffer, KernelStep
from cudnn_actor.protocol import DType, Graph

from ... import host_cuda
from ...fused_graphs import ELEMENTWISE as GRAPHS
from ..planning.test_partition import array_in, evaluated, filled

Launch = Callable[[Elementwise, Sequence[int]], None]


def kernel_of(graph: Graph) -> KernelStep[Elementwise]:
    (step,) = compile_split(graph.body, None, None).recipe.steps
    assert isinstance(step, KernelStep)
    assert isinstance(step.kernel, Elementwise)
    return KernelStep(step.kernel, step.sources)


def copied(dims: tuple[int, ...], strides: tuple[int, ...], start: int) -> Elementwise:
    """A copy of int16 from elements that lie elsewhere, from an address of that many elements on."""
    packed = np.empty(dims).strides
    steps = [tuple(step // 8 for step in packed), strides]
    return describe_elementwise(
        [Result(Leaf(0, DType.INT16), DType.INT16)], [], dims, steps, [16, 16 if not start else 2]
    )


COPIES = {
    "with a rest": copied((21,), (1,), 0),
    "only a rest": copied((3,), (1,), 0),
    "side by side": copied((3, 8), (16, 1), 0),
    "misaligned": copied((3, 8), (16, 1), 1),
    "transposed": copied((8, 8), (1, 8), 0),
    "reversed": copied((3, 8), (8, -1), 7),
    "in twos": copied((3, 6), (8, 1), 0),
    "repeated": copied((3, 8), (1, 0), 0),
    "odd rows": copied((100, 33), (40, 1), 0),
}


@pytest.fixture(scope="module")
def together() -> None:
    every = [*(kernel_of(graph).kernel for graph in GRAPHS.values()), *COPIES.values()]
    host_cuda.compile_together(map(source, every))


@pytest.fixture
def launch(together: None, monkeypatch: pytest.MonkeyPatch) -> Launch:
    del together
    host_cuda.use(monkeypatch)
    return lambda kernel, addresses: compile_run(kernel.launches())(addresses, ())


@pytest.mark.parametrize("name", GRAPHS)
def test_a_kernel_computes_all_results_of_its_graph(launch: Launch, name: str) -> None:
    graph, step = GRAPHS[name], kernel_of(GRAPHS[name])
    wanted, memories = filled(graph), filled(graph)
    tensors = [graph.body.tensor(uid) for uid in graph.body.bound]
    evaluated(graph.body, [array_in(memory, tensor) for memory, tensor in zip(wanted, tensors, strict=True)])
    numbers = [source.number for source in step.sources if isinstance(source, Buffer)]
    launch(step.kernel, [memories[number].ctypes.data for number in numbers])
    for expected, found in zip(wanted, memories, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_neighbours_are_computed_together_where_memory_allows() -> None:
    together = {name: kernel_of(graph).kernel.together for name, graph in GRAPHS.items()}
    assert together == {
        "nchw": 8,
        "nhwc": 8,
        "odd": 1,
        "mixed": 8,
        "unsigned": 4,
        "single": 1,
        "chain": 4,
        "looked up": 4,
        "looked up in bfloat16": 8,
        "looked up in odd rows": 1,
        "selected in rows": 2,
        "selected in columns": 4,
        "selected by lists": 4,
        "selected twice": 4,
        "mirrored": 4,
        "mirrored channels last": 4,
        "parts": 1,
        "parts in bfloat16": 8,
        "parts of integers": 1,
        "enlarged": 4,
        "enlarged channels last": 4,
        "reduced to a row": 4,
    }
    found = {name: kernel.together for name, kernel in COPIES.items()}
    wanted = {
        "with a rest": 8,
        "only a rest": 8,
        "side by side": 8,
        "misaligned": 1,
        "transposed": 8,
        "reversed": 8,
        "in twos": 2,
        "repeated": 8,
        "odd rows": 1,
    }
    assert found == wanted
    assert {name: kernel.reads_at_once for name, kernel in COPIES.items() if wanted[name] < 8} == {
        "misaligned": 8,
        "in twos": 4,
        "odd rows": 8,
    }, "16 bytes of each thread are under way"


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_finds_every_element(launch: Launch, name: str) -> None:
    kernel = COPIES[name]
    memory = np.arange(4000, dtype=np.int16)
    start = {"misaligned": 1, "reversed": 7}.get(name, 0)
    steps = [2 * step for step in kernel.strides[1]]
    expected = np.lib.stride_tricks.as_strided(memory[start:], kernel.dims, steps)
    result = np.zeros(kernel.dims, np.int16)
    launch(kernel, [result.ctypes.data, memory.ctypes.data + 2 * start])
    np.testing.assert_array_equal(result, expected)


def test_division_by_multiplication_is_exact() -> None:
    """Of the largest numbers below each multiple, for sizes that are next to powers of two and others."""
    most = (1 << 31) - 1
    powers = [1 << n for n in range(31)]
    sizes = {1, 3, 7, 641, 12345, most, *powers, *(p + 1 for p in powers), *(max(p - 1, 1) for p in powers)}
    for size in sizes:
        by = divisor(size)
        factor, shift = by & 0xFFFFFFFF, by >> 32
        times = {0, 1, 2, 1000, most // size // 2, most // size}
        numbers = {n for t in times for n in (t * size - 1, t * size, t * size + 1)} | {most, most - 1}
        for n in numbers:
            if 0 <= n <= most:
                assert n * factor >> shift == n // size, (n, size)


def test_words_of_eight_bytes_are_copied_where_memory_allows() -> None:
    for dtype, last, start, word in (
        (DType.INT8, 128, 256, DType.UINT64),
        (DType.INT8, 12, 256, DType.UINT32),
        (DType.INT8, 7, 256, DType.INT8),
        (DType.BFLOAT16, 8, 2, DType.BFLOAT16),
        (DType.BFLOAT16, 6, 4, DType.UINT32),
        (DType.FLOAT32, 6, 256, DType.UINT64),
        (DType.FLOAT64, 6, 256, DType.FLOAT64),
    ):
        kernel = elementwise.describe_copy(
            (dtype, dtype), (3, last), [(last, 1), (4 * last, 1)], [256, start]
        )
        assert [leaf.dtype for leaf in kernel.leaves()] == [word]
        assert math.prod(kernel.dims) * word.itemsize == 3 * last * dtype.itemsize
    converted = elementwise.describe_copy((DType.FLOAT32, DType.INT32), (4, 8), [(8, 1), (16, 1)], [256, 256])
    assert [leaf.dtype for leaf in converted.leaves()] == [DType.INT32]
