"""Which programs a plan stays bound to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cudnn_actor.engines.cpu.fast import bound_programs
from cudnn_actor.engines.cpu.fast.bound_programs import BoundPrograms
from cudnn_actor.engines.cpu.fast.compiler import compile_fast
from cudnn_actor.engines.cpu.fast.plan import FastProgram
from cudnn_actor.engines.cpu.scratch import aligned_bytes
from cudnn_actor.protocol import Graph, GraphBuilder
from cudnn_actor.protocol.types.dtypes import DTypeName

from .kernel_runs import array_of


class _Bindings:
    """Counts how often a program is bound to each buffer."""

    def __init__(self) -> None:
        self.programs = BoundPrograms()
        self.counts: dict[int, int] = {}

    def run(self, buffer: np.ndarray, kept_bytes: int = 0) -> FastProgram:
        def bind() -> FastProgram:
            self.counts[id(buffer)] = self.counts.get(id(buffer), 0) + 1
            return FastProgram((buffer,), (), (), kept_bytes)

        return self.programs.of([buffer], bind)


def test_a_program_that_every_run_uses_is_kept_while_others_come_and_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bound_programs, "_MOST_BYTES", 1024)
    bindings, used = _Bindings(), np.zeros(100, np.float32)
    others = [np.zeros(100, np.float32) for _ in range(50)]
    for other in others:
        bindings.run(used, 100)
        bindings.run(other, 100)
    assert bindings.counts[id(used)] == 1
    bindings.run(others[0])
    assert bindings.counts[id(others[0])] == 2, "the programs are bounded"


def test_other_arrays_on_the_same_memory_have_the_same_program() -> None:
    bindings, buffer = _Bindings(), np.zeros((4, 5), np.float32)
    programs: set[Any] = {bindings.run(each) for each in (buffer, buffer[:], buffer.reshape(4, 5))}
    assert len(programs) == 1
    assert bindings.run(buffer.reshape(5, 4)) not in programs


def _products(dtype: DTypeName) -> Graph:
    g = GraphBuilder()
    return g.build({"y": g.input("a", (256, 250), dtype) @ g.input("b", (250, 128), dtype)})


def _filter_in_another_order() -> Graph:
    g = GraphBuilder()
    filters = g.transpose(g.input("w", (3, 64, 3, 32)), (1, 3, 0, 2))
    return g.build({"y": g.conv(g.input("x", (1, 32, 9, 9)), filters)})


def _sums_of_long_rows() -> Graph:
    g = GraphBuilder()
    return g.build({"y": g.softmax(g.input("x", (4, 1 << 16)), axis=1)})


def _nearest() -> Graph:
    g = GraphBuilder()
    return g.build({"y": g.resize(g.input("x", (1, 1, 8, 8)), sizes=(16, 24), axes=(2, 3))})


def _elements() -> Graph:
    g = GraphBuilder()
    x, indices = g.input("x", (5, 7, 11)), g.input("indices", (5, 3, 11), "int64")
    return g.build({"y": g.take_along_axis(x, indices, axis=1)})


def _causal_attention() -> Graph:
    g = GraphBuilder()
    q, k, v = (g.input(name, (1, 2, 50, 16)) for name in "qkv")
    return g.build({"y": g.attention(q, k, v, causal=True)})


def _bound(graph: Graph) -> FastProgram:
    plan = compile_fast(graph.body, 1)
    assert plan is not None
    specs = (graph.body.tensor(uid).spec for uid in graph.body.bound)
    return plan.bind([array_of(spec) for spec in specs], aligned_bytes(plan.workspace))


@pytest.mark.parametrize(
    ("graph", "nbytes"),
    [
        (_products("float32"), 0),
        (_products("int8"), 4 * (256 * 250 + 250 * 128 + 256 * 128)),
        (_filter_in_another_order(), 4 * 64 * 32 * 9),
        (_sums_of_long_rows(), 4 * (4 << 16) // 64 + 4 * 16 * 4),
        (_nearest(), 8 * (16 + 24)),
        (_elements(), 8 * (5 + 11)),
        (_causal_attention(), 50 * 50),
    ],
    ids=[
        "products of floats",
        "products of integers",
        "a filter in another order",
        "sums of long rows",
        "places of elements that a resampling reads",
        "places of elements that are gathered",
        "scores that are hidden",
    ],
)
def test_programs_count_what_their_kernels_allocate(graph: Graph, nbytes: int) -> None:
    program = _bound(graph)
    assert program.kept_bytes == nbytes


def test_programs_are_dropped_for_what_their_kernels_allocate() -> None:
    bindings = _Bindings()
    buffers = [np.zeros(100, np.float32) for _ in range(5)]
    for buffer in buffers:
        bindings.run(buffer, kept_bytes=1 << 20)
    bindings.run(buffers[-1])
    bindings.run(buffers[0])
    assert [bindings.counts[id(buffer)] for buffer in buffers] == [2, 1, 1, 1, 1]
