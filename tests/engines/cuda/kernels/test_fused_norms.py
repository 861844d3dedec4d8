"""Kernels of norms with what is around them, compiled for the host and run: they compute their graphs."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from cudnn_actor.engines.cuda.kernels.kernel import compile_run
from cudnn_actor.engines.cuda.operations.fused_norms import Normed
from cudnn_actor.engines.cuda.planning.composition import compose
from cudnn_actor.engines.cuda.planning.fusing import compile_fused
from cudnn_actor.engines.cuda.planning.partition import cut
from cudnn_actor.engines.cuda.running.recipe import Recipe
from cudnn_actor.protocol import DType

from ... import host_cuda
from ...fused_graphs import NORMS as GRAPHS
from ...fused_pieces import check_results, only_kernel


@pytest.fixture(scope="module")
def together() -> None:
    kernels = (only_kernel(graph, Normed)[0] for graph in GRAPHS.values())
    host_cuda.compile_together(launch.source for kernel in kernels for launch in kernel.launches())


@pytest.mark.usefixtures("together")
@pytest.mark.parametrize("name", GRAPHS)
def test_kernels_compute_all_results_of_their_graph(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    host_cuda.use(monkeypatch)
    graph = GRAPHS[name]
    kernel, numbers = only_kernel(graph, Normed)
    workspace = np.full(kernel.workspace, 0x77, np.uint8)
    check_results(
        graph,
        numbers,
        lambda addresses: compile_run(kernel.launches())([*addresses, workspace.ctypes.data], ()),
        {DType.BFLOAT16: 2**-7, DType.FLOAT16: 2**-10},
    )


def test_a_plan_survives_being_bytes_and_says_how_many_kernels_run() -> None:
    for name, count in (("running", 1), ("running cut", 3)):
        body = GRAPHS[name].body
        parts = cut(body)
        assert parts is not None
        plan = compose(body, parts, lambda piece: compile_fused(piece, None))
        recipe = plan.recipe
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(recipe), type=Recipe) == recipe
        (piece,) = plan.explain(body).pieces
        assert piece.steps == (f"generated kernels of batch_norm_training: {count}",)
        assert [label.split()[0] for label in piece.labels] == ["batch_norm_training", "relu"]


def test_lines_are_cut_where_they_are_few_and_long() -> None:
    counts = {name: len(only_kernel(graph, Normed)[0].launches()) for name, graph in GRAPHS.items()}
    assert counts["training"] == counts["groups"] == counts["inference"] == 1
    cut_ones = {name for name in GRAPHS if name.endswith("cut")}
    assert {name for name, count in counts.items() if count == 3} == cut_ones
    assert counts["instance gradients"] == counts["gradients in place"] == 2
