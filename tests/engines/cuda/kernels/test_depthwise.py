"""Kernels for depthwise convolutions, compiled for the host and run: they compute what their graphs say."""

from __future__ import annotations

import functools
from typing import Any

import msgspec
import numpy as np
import pytest

from cudnn_actor.engines.cuda.checking.convolution_reference import Reference
from cudnn_actor.engines.cuda.cudnn.frontend_graph import Refused
from cudnn_actor.engines.cuda.kernels.axes import extent
from cudnn_actor.engines.cuda.kernels.depthwise_geometry import Pass, Tile
from cudnn_actor.engines.cuda.kernels.depthwise_kernels import Depthwise
from cudnn_actor.engines.cuda.kernels.kernel import Pointer
from cudnn_actor.engines.cuda.planning.cuda_builder import CudaBuilder
from cudnn_actor.engines.cuda.planning.depthwise import compile_depthwise, ways_of_depthwise
from cudnn_actor.engines.cuda.planning.partition import Stored, cut
from cudnn_actor.engines.cuda.running.recipe import Buffer, KernelStep
from cudnn_actor.protocol import DType, Graph, GraphBuilder, Layout, OperationGraph

from ....in_one_test import cases_in_one_test
from ....whole import pairwise
from ... import host_cuda
from ...depthwise_graphs import DEPTHWISE as GRAPHS
from ...depthwise_graphs import ONLY_COMPILED
from ..planning.test_partition import array_in, check, evaluated, filled

Place = tuple[int, int]
"""The number of a graph's buffer, and a byte in it."""


def kernels_of(graph: Graph) -> list[tuple[Depthwise, list[Place]]]:
    """The kernel of each choice for the only piece of a graph, and where its tensors lie."""
    body, parts = graph.body, cut(graph.body)
    stored = [Stored(uid) for uid in body.bound]
    if parts is not None:
        ((body, tensors, _),) = parts.pieces
        stored = [parts.stored[uid] for uid in tensors]
    found = []
    for choice in range(ways_of_depthwise(body)):
        (step,) = compile_depthwise(body, None, choice).recipe.steps
        assert isinstance(step, KernelStep)
        assert isinstance(step.kernel, Depthwise)
        places = (stored[source.number] for source in step.sources if isinstance(source, Buffer))
        found.append((step.kernel, [(graph.body.bound.index(root), offset) for root, offset in places]))
    return found


UNEVEN = "filter uneven"


@functools.cache
def choices() -> dict[str, list[int]]:
    """Which choices are run for each graph: in `make test`, each choice for some graph of each kind."""
    every = [(name, choice) for name, graph in GRAPHS.items() for choice in range(len(kernels_of(graph)))]
    found: dict[str, list[int]] = {name: [] for name in GRAPHS}
    for name, choice in pairwise(every, lambda of: (of[0], (of[0].split()[0], of[1])), together=1):
        found[name].append(choice)
    return found | {UNEVEN: [choice for name, choice in every if name == UNEVEN]}


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    some = (kernels_of(GRAPHS[name])[choice] for name, of in choices().items() for choice in of)
    host_cuda.compile_together(launch.source for kernel, _ in some for launch in kernel.launches())


def run(name: str, choice: int, memories: list[np.ndarray], blocks: int = 0) -> None:
    """Run the kernel of that choice for a graph on its buffers; with fewer blocks, if that is given."""
    kernel, places = kernels_of(GRAPHS[name])[choice]
    workspace = np.full(max(kernel.workspace, 1), 0x77, np.uint8)
    tensors = [*(memories[number][offset:] for number, offset in places), workspace]
    for launch in kernel.launches():
        grid = (min(blocks, launch.grid[0]), *launch.grid[1:]) if blocks else launch.grid
        function = host_cuda.RawModule(launch.source).get_function(launch.name)
        given = (tensors[of.number].ctypes.data if isinstance(of, Pointer) else of for of in launch.arguments)
        function(grid, launch.block, tuple(given))


def compare(graph: Graph, found: list[np.ndarray], wanted: list[np.ndarray]) -> None:
    """`wanted`: the graph's buffers before a run."""
    tensors = [graph.body.tensor(uid) for uid in graph.body.bound]
    arrays = [array_in(memory, tensor) for memory, tensor in zip(wanted, tensors, strict=True)]
    with np.errstate(invalid="ignore"):
        evaluated(graph.body, arrays)
    for memory, tensor, expected in zip(found, tensors, arrays, strict=True):
        got = np.asarray(array_in(memory, tensor), np.float64)
        tolerance = 2**-7 if tensor.dtype is DType.BFLOAT16 else 1e-5
        np.testing.assert_allclose(got, np.asarray(expected, np.float64), rtol=tolerance, atol=1e-5)


@cases_in_one_test
@pytest.mark.parametrize("name", GRAPHS)
def test_a_kernel_computes_all_results_of_its_graph(name: str) -> None:
    graph = GRAPHS[name]
    assert choices()[name]
    for choice in choices()[name]:
        found = filled(graph)
        run(name, choice, found)
        compare(graph, found, filled(graph))


def test_a_block_may_have_the_work_of_several() -> None:
    for name in ("forward 3x3", "data 76 channels"):
        ((kernel, _), *_) = kernels_of(GRAPHS[name])
        assert kernel.blocks > 1
        found = filled(GRAPHS[name])
        run(name, 0, found, blocks=1)
        compare(GRAPHS[name], found, filled(GRAPHS[name]))


def test_what_is_read_of_a_stored_value_is_rounded() -> None:
    name = "forward read again"
    body = GRAPHS[name].body
    y, a = (body.tensor(uid).dtype for uid in body.results)
    assert (y, a) == (DType.BFLOAT16, DType.FLOAT32)
    found, wanted = filled(GRAPHS[name]), filled(GRAPHS[name])
    for memory in (found[0], wanted[0]):
        values = memory.view(DType.BFLOAT16.numpy)
        values[:] = np.random.default_rng(0).integers(-200, 200, values.size)
    run(name, 0, found)
    compare(GRAPHS[name], found, wanted)


def test_what_no_result_meets_may_be_infinite() -> None:
    """The last column of x is met by a tap of no place; threads read what is behind their last place."""
    name = UNEVEN
    graph = GRAPHS[name]
    number, *_ = (n for n, uid in enumerate(graph.body.bound) if graph.body.tensor(uid).name == "x")
    x = graph.body.tensor(graph.body.bound[number])
    uneven = [kernel.y[3] % kernel.tile.columns for kernel, _ in kernels_of(graph)]
    assert any(uneven)
    for choice in range(len(uneven)):
        found, wanted = filled(graph), filled(graph)
        for memory in (found[number], wanted[number]):
            array_in(memory, x)[..., -1] = np.inf
        run(name, choice, found)
        compare(graph, found, wanted)


def test_tiles_follow_the_channels_and_the_places() -> None:
    def tile(name: str) -> Tile:
        return kernels_of(GRAPHS[name])[0][0].tile

    vectors = {n: tile(f"forward {n} channels").vector for n in (2, 5, 6, 76)}
    assert vectors == {2: 2, 5: 1, 6: 2, 76: 4}
    assert tile("forward times 3").vector == 1
    assert tile("forward several").vector == 4
    assert all(kernel.tile.columns % 4 == 0 for kernel, _ in kernels_of(GRAPHS["data strides"]))
    assert all(kernel.tile.rows % 3 == 0 for kernel, _ in kernels_of(GRAPHS["data strides"]))
    assert kernels_of(GRAPHS["filter of many"])[0][0].parts > 1
    wide = ONLY_COMPILED["forward bfloat16 wide"], GRAPHS["forward 3x3"]
    assert [kernels_of(graph)[0][0].wide for graph in wide] == [True, False]


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("forward padding", (1 << 30) - (1 << 20)),
        ("filter padding", (1 << 30) - (1 << 20)),
        ("data asymmetric", 1 << 27),
    ],
)
def test_offsets_of_columns_from_which_a_thread_counts_have_room(name: str, step: int) -> None:
    ((kernel, _), *_) = kernels_of(GRAPHS[name])
    (*others, _), *rest = kernel.strides
    dims = kernel.y if kernel.of is Pass.DATA else kernel.x
    # The columns that are read are near enough for 32 bits. Others, from which a thread counts, are not.
    assert extent(dims, (*others, step)) < 1 << 30
    assert not kernel.wide
    assert msgspec.structs.replace(kernel, strides=((*others, step), *rest)).wide


def test_neighbouring_channels_are_read_at_once_only_where_memory_is_aligned() -> None:
    ((kernel, _), *_) = kernels_of(GRAPHS["forward 3x3"])
    assert kernel.packs(0, 4)
    odd = msgspec.structs.replace(kernel, strides=((793, 1, 88, 8), *kernel.strides[1:]))
    assert not odd.packs(0, 4)
    halves = msgspec.structs.replace(kernel, alignments=(4, *kernel.alignments[1:]))
    assert (halves.packs(0, 2), halves.packs(0, 4)) == (True, False)


def test_every_choice_has_a_name_and_can_be_stored() -> None:
    plans = [compile_depthwise(GRAPHS["filter 3x3"].body, None, choice) for choice in range(2)]
    assert len({plan.tag for plan in plans}) == len(plans)
    data = CudaBuilder(0).export(plans[0])
    assert data is not None
    stored = CudaBuilder(0).restore(GRAPHS["filter 3x3"].body, data)
    assert stored.recipe == plans[0].recipe
    assert stored.recipe.workspace >= stored.recipe.steps[0].kernel.workspace > 0  # type: ignore[union-attr]
    (piece,) = stored.explain(GRAPHS["filter 3x3"].body).pieces
    assert piece.steps == ("generated depthwise kernel",)
    with pytest.raises(Refused, match="over the limit"):
        compile_depthwise(GRAPHS["filter 3x3"].body, 1)


def convolution(
    dims: tuple[int, ...], groups: int, layout: Layout = Layout.NHWC, **of: Any
) -> OperationGraph:
    g = GraphBuilder()
    dtype, taps = of.pop("dtype", DType.BFLOAT16), of.pop("taps", (3, 3)[: len(dims) - 2])
    x = g.input("x", dims, dtype, layout=layout)
    w = g.input("w", (8, dims[1] // groups, *taps), dtype, layout=layout)
    return g.build(y=g.conv(x, w, groups=groups, pad=6, **of)).body


@pytest.mark.parametrize(
    "graph",
    [
        convolution((2, 8, 9, 9), 8, Layout.NCHW),
        convolution((2, 8, 9, 9), 4),
        convolution((2, 1, 9, 9), 1),
        convolution((2, 8, 9), 8),
        convolution((2, 8, 9, 9), 8, dtype=DType.FLOAT64),
        convolution((2, 8, 9, 9), 8, taps=(3, 12)),
        convolution((2, 8, 9, 9), 2),
    ],
)
def test_cudnn_keeps_other_convolutions(graph: OperationGraph) -> None:
    assert ways_of_depthwise(graph) == 0
    with pytest.raises(Refused, match="no depthwise"):
        compile_depthwise(graph, None)


def test_what_overwrites_an_operand_is_refused() -> None:
    g = GraphBuilder()
    x, w = g.input("x", (2, 8, 6, 6), layout="NHWC"), g.input("w", (8, 1, 3, 3))
    graph = g.build(updates={"x": g.conv(x, w, groups=8, pad=1)}).body
    assert cut(graph) is None
    with pytest.raises(Refused, match="overwrites"):
        compile_depthwise(graph, None)


def test_all_that_follows_is_one_piece_whatever_else_reads_it() -> None:
    g = GraphBuilder()
    x, w = g.input("x", (2, 8, 6, 6), layout="NHWC"), g.input("w", (8, 1, 3, 3))
    y = g.conv(x, w, groups=8, pad=1)
    silu = y * g.sigmoid(y)
    graph = g.build(y=y, silu=silu, sums=g.sum(silu, axis=(2, 3)))
    parts = check(graph)
    first, sums = (piece.graph for piece in parts.pieces)
    assert [len(first.operations), len(first.results), len(sums.operations)] == [3, 2, 1]
    assert Reference.covers(first)
