"""Kernels over lines, compiled for the host and run: they compute what their graphs say."""

from __future__ import annotations

import pytest

from cudnn_actor.engines.cuda.cudnn.frontend_graph import Refused
from cudnn_actor.engines.cuda.kernels.kernel import compile_run
from cudnn_actor.engines.cuda.kernels.line_kernels import Lined, source
from cudnn_actor.engines.cuda.kernels.lines import Form
from cudnn_actor.engines.cuda.planning.fusing import compile_fused
from cudnn_actor.engines.cuda.running.recipe import KernelStep
from cudnn_actor.protocol import GraphBuilder

from ... import host_cuda
from ...fused_graphs import IN_LINES as GRAPHS
from ...fused_pieces import check_results, only_kernel


@pytest.fixture(scope="module")
def together() -> None:
    host_cuda.compile_together(source(only_kernel(graph, Lined)[0]) for graph in GRAPHS.values())


@pytest.mark.usefixtures("together")
@pytest.mark.parametrize("name", GRAPHS)
def test_a_kernel_computes_all_results_of_its_graph(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    host_cuda.use(monkeypatch)
    graph = GRAPHS[name]
    kernel, numbers = only_kernel(graph, Lined)
    check_results(graph, numbers, lambda addresses: compile_run(kernel.launches())(addresses, ()))


def test_each_form_of_lines_is_covered() -> None:
    forms = {name: only_kernel(graph, Lined)[0].lines.form for name, graph in GRAPHS.items()}
    assert forms["short"] is Form.WARP
    assert forms["long"] is Form.BLOCK
    assert forms["columns"] is Form.COLUMN
    assert only_kernel(GRAPHS["long"], Lined)[0].threads().block == (1024,)
    held = {name: "held0" in source(only_kernel(graph, Lined)[0]) for name, graph in GRAPHS.items()}
    assert held["short"]
    assert held["long"]
    assert not held["longer"]
    assert held["taller columns"]
    assert not held["tallest columns"]


def test_neighbouring_columns_belong_to_a_warp_and_few_threads_share_one() -> None:
    g = GraphBuilder()
    x = g.input("x", (8, 64, 28, 28), "bfloat16")
    (step,) = compile_fused(g.build(y=g.softmax(x, 1)).body, None).recipe.steps
    assert isinstance(step, KernelStep)
    assert isinstance(step.kernel, Lined)
    assert step.kernel.lines.form is Form.COLUMN
    assert step.kernel.threads() == ((8 * 28 * 28 // 32, 1), (32, 8))
    assert step.kernel.packs_held == 8


def test_what_has_no_common_lines_is_refused() -> None:
    g = GraphBuilder()
    x = g.input("x", (4, 6))
    y = g.build(y=g.softmax(g.softmax(x, 0), 1)).body
    with pytest.raises(Refused, match="no lines in common"):
        compile_fused(y, None)
    with pytest.raises(Refused, match="no lines in common"):
        compile_fused(g.build(y=x + 1.0).body, None)
    with pytest.raises(Refused, match="no neighbours"):
        compile_fused(g.build(y=g.sum(x, 0)).body, None)
    whole = g.input("whole", (4, 6), "int64")  # reduced exactly, as these kernels do not
    with pytest.raises(Refused, match="no lines in common"):
        compile_fused(g.build(y=g.sum(whole, 0, keepdims=True) + 1).body, None)
