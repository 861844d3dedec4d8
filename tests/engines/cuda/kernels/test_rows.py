"""Copies to rows, compiled for the host and run; when there are such; how much is written at once."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from cudnn_actor.engines.cuda.kernels import index_code
from cudnn_actor.engines.cuda.kernels import kernel as kernels
from cudnn_actor.engines.cuda.kernels.joined_kernels import Joined
from cudnn_actor.engines.cuda.kernels.row_copies import Rows, row_concatenation, row_copy, row_source
from cudnn_actor.engines.cuda.planning.partition import cut
from cudnn_actor.engines.cuda.planning.splitting import compile_split
from cudnn_actor.engines.cuda.running.recipe import Buffer, KernelStep
from cudnn_actor.protocol import Graph, GraphBuilder, TensorSpec

from ... import host_cuda
from ...moved_graphs import IN_ROWS
from ..planning.test_partition import array_in, check, evaluated, filled


def step_of(graph: Graph) -> KernelStep[Rows]:
    (step,) = compile_split(graph.body, None, None).recipe.steps
    assert isinstance(step, KernelStep)
    assert isinstance(step.kernel, Rows)
    return KernelStep(step.kernel, step.sources)


@pytest.fixture(scope="module")
def compiled() -> None:
    host_cuda.compile_together(row_source(step_of(graph).kernel) for graph in IN_ROWS.values())


def run(graph: Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare what the kernel writes, bit by bit."""
    host_cuda.use(monkeypatch)
    wanted, memories = filled(graph), filled(graph)
    tensors = [graph.body.tensor(uid) for uid in graph.body.bound]
    evaluated(graph.body, [array_in(memory, tensor) for memory, tensor in zip(wanted, tensors, strict=True)])
    step, pointers = step_of(graph), []
    for source in step.sources:
        assert isinstance(source, Buffer)
        pointers.append(memories[source.number].ctypes.data + source.offset)
    kernels.compile_run(step.kernel.launches())(pointers, ())
    for expected, found in zip(wanted, memories, strict=True):
        np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", IN_ROWS)
@pytest.mark.usefixtures("compiled")
def test_every_element_is_copied(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    run(IN_ROWS[name], monkeypatch)


@pytest.mark.parametrize("name", ["odd channels", "three tensors", "halves in an even number of rows"])
@pytest.mark.usefixtures("compiled")
def test_a_thread_may_have_many_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "BUSY_BLOCKS", 1)
    kernel = step_of(IN_ROWS[name]).kernel
    assert kernel.rows > kernel.row_step * kernel.reads_at_once
    run(IN_ROWS[name], monkeypatch)


def test_places_may_need_64_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_code, "SMALL", 0)
    assert step_of(IN_ROWS["inner halves"]).kernel.wide
    run(IN_ROWS["inner halves"], monkeypatch)


def test_as_many_bytes_are_written_at_once_as_memory_allows() -> None:
    kernels = {name: step_of(graph).kernel for name, graph in IN_ROWS.items()}
    found = {name: (kernel.itemsize, kernel.together, len(kernel.parts)) for name, kernel in kernels.items()}
    assert found == {
        "odd channels": (2, 2, 2),
        "odd channels of one": (2, 2, 2),
        "bytes": (1, 4, 2),
        "bytes in rows of seven": (1, 4, 8),
        "bytes in an odd number of rows": (1, 1, 2),
        "halves in an even number of rows": (2, 2, 2),
        "pairs of halves": (4, 1, 2),
        "three tensors": (4, 1, 3),
        "eight bytes": (8, 1, 2),
        "planes": (2, 2, 4),
        "with none": (4, 1, 2),
        "inner": (4, 1, 1),
        "inner halves": (2, 2, 1),
        "rolled": (2, 2, 2),
        "rows reversed": (4, 1, 2),
    }
    for kernel in kernels.values():
        assert kernel.row_step * kernel.units <= kernel.blocks * 256 < kernel.row_step * kernel.units + 256
        assert kernel.reads_at_once * kernel.together * kernel.itemsize == 16


def test_a_launch_of_a_large_copy_keeps_a_gpu_busy_and_its_threads_for_several_rows() -> None:
    dims, rows = (256, 112, 112, 31), 256 * 112 * 112
    packed = TensorSpec.packed(dims, "float32").strides
    kernel = row_copy(dims, [packed, TensorSpec.packed((*dims[:3], 64), "float32").strides], [16, 4], 4)
    assert kernel is not None
    assert (kernel.rows, kernel.units) == (rows, 31)
    assert kernel.blocks > 2048
    assert math.ceil(rows / kernel.row_step) in (16, 17)


def test_copies_without_need_are_no_rows() -> None:
    def copied(dims: tuple[int, ...], of: tuple[int, ...], start: int = 16) -> object:
        return row_copy(dims, [TensorSpec.packed(dims, "float32").strides, of], [16, start], 4)

    assert copied((9, 0), (1, 1)) is None, "there are no elements"
    assert copied((20, 3), (5, 1)) is not None
    assert copied((20, 4), (8, 1), start=4) is not None
    assert copied((20, 4), (8, 1)) is None, "16 bytes at a time"
    assert copied((20, 3), (3, 1)) is None, "one behind the other"
    assert copied((7, 3), (5, 1)) is None, "few rows"
    assert copied((20, 3), (6, 2)) is None, "not side by side"
    assert copied((20, 3), (1, 20)) is None

    def joined(*operands: tuple[tuple[int, ...], tuple[int, ...]]) -> object:
        return row_concatenation(1, (5, 1), operands, [16] * (1 + len(operands)), 4)

    assert joined(((20, 3), (3, 1)), ((20, 2), (7, 1))) is not None
    assert joined(((20, 3), (3, 1)), ((20, 2), (1, 20))) is None, "one is transposed"
    assert joined(((20, 3), (3, 1)), ((20, 1), (1, 7)), ((20, 1), (1, 1))) is not None
    assert joined() is None
    assert row_concatenation(1, (10, 2), [((20, 3), (3, 1)), ((20, 2), (2, 1))], [16] * 3, 4) is None, "gaps"


def test_parts_may_lie_far_before_a_row() -> None:
    near, far = (row_copy((16, 4, 3), [(12, 3, 1), (3, -step, 1)], [16, 16], 1) for step in (9, 1 << 30))
    assert near is not None
    assert not near.wide
    assert far is not None
    assert far.wide


def test_an_axis_may_be_counted_from_the_last_one() -> None:
    g = GraphBuilder()
    given = [g.input(f"x{size}", (4, 5, size, 3)) for size in (2, 3)]
    body = g.build(y=g.concatenate(given, 2)).body
    (concat,) = body.operations
    negative = msgspec.structs.replace(concat, axis=-2)
    plans = [
        compile_split(msgspec.structs.replace(body, operations=(each,)), None, None)
        for each in (concat, negative)
    ]
    assert plans[0].recipe.steps == plans[1].recipe.steps


# Pieces.


def test_slices_at_odd_places_are_read_by_their_concatenation() -> None:
    g = GraphBuilder()
    x = g.input("x", (20, 64), "bfloat16")
    parts = check(g.build(y=g.concatenate((x[:, :33], x[:, 33:]), 1)))
    (piece,) = parts.pieces
    assert [operation.kind for operation in piece.graph.operations] == ["slice", "concat"]
    assert not parts.between
    (step,) = compile_split(piece.graph, None, None).recipe.steps
    assert isinstance(step, KernelStep)
    assert isinstance(step.kernel, Rows)


def test_they_are_copied_if_something_else_reads_them() -> None:
    g = GraphBuilder()
    x = g.input("x", (20, 64), "bfloat16")
    part = x[:, 33:]
    parts = check(g.build(y=g.concatenate((x[:, :33], part), 1), sums=g.cumsum(part, 1)))
    kinds = [[operation.kind for operation in piece.graph.operations] for piece in parts.pieces]
    assert kinds == [["slice"], ["concat"], ["cumulative"]]


def test_a_slice_between_results_that_are_written_in_place_is_read_twice() -> None:
    g = GraphBuilder()
    x, part = g.input("x", (4, 8)), g.input("z", (3, 8))[::-1][:2]
    check(g.build(y=g.concatenate((part, g.relu(x), part, x * 2.0))))


def test_what_is_overwritten_is_copied_before() -> None:
    g = GraphBuilder()
    x = g.input("x", (20, 8))
    check(g.build(updates={"x": x * 2.0}, y=g.concatenate((x[:, 3:], x[:, 1:3]), 1)))


def test_many_parts_are_copied_one_by_one() -> None:
    g = GraphBuilder()
    parts = [g.input(f"x{n}", (20, 3)) for n in range(17)]
    (step,) = compile_split(g.build(y=g.concatenate(parts, 1)).body, None, None).recipe.steps
    assert isinstance(step, KernelStep)
    assert isinstance(step.kernel, Joined)


def test_graphs_of_slices_that_are_concatenated_are_one_piece() -> None:
    assert cut(IN_ROWS["odd channels of one"].body) is None
