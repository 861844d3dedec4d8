"""The order of cuDNN's candidates: its fallbacks, which take longest to ask for, are the last."""

from __future__ import annotations

import msgspec
import pytest

from cudnn_actor.engines.cuda.running.recipe import Timed
from cudnn_actor.protocol import GraphBuilder, Numerics, OperationGraph

from ..engines.cuda.cudnn.test_kernel_caches import biased, convolution, product
from ..engines.cuda.planning import test_ranking
from .building import first_plan, listed, listed_pieces, ranked, tried
from .child import Child


@pytest.mark.parametrize("graph", [convolution(), biased(8), product()])
def test_fallbacks_come_after_all_other_candidates(child: Child, graph: OperationGraph) -> None:
    without, both = child.call(ranked, graph)
    assert without
    assert both[: len(without)] == without
    assert len(both) > len(without)


def test_each_candidate_is_tried_once_and_in_order(child: Child) -> None:
    _, both = child.call(ranked, product())
    assert child.call(tried, product()) == both


@pytest.mark.parametrize("name", test_ranking.FEW)
def test_small_tiles_are_tried_first_for_few_queries(child: Child, name: str) -> None:
    graph = test_ranking.FEW[name]
    _, both = child.call(ranked, graph)
    small = [configuration for configuration in both if configuration.endswith("k24=3")]
    assert [child.call(first_plan, graph)] == (small or both[:1])  # cuDNN 9.28 offers none


def test_a_plan_is_asked_for_by_name_and_excluded(child: Child) -> None:
    graph = product()
    first, *others = child.call(ranked, graph)[1]
    wanted = next(name for name in others if child.call(first_plan, _with(graph, prefer=(name,))) == name)
    assert wanted != first
    assert child.call(first_plan, _with(graph, exclude=(first,))) != first
    engine = first.partition("_")[0]
    assert engine not in child.call(first_plan, _with(graph, exclude=(engine,))).split("_")


def test_the_plans_that_may_run_a_piece_are_listed(child: Child) -> None:
    graph = convolution()
    without, _ = child.call(ranked, graph)
    (piece,) = child.call(listed, graph).pieces
    of_cudnn = [each for each in piece.candidates if each.kind == "cuDNN's"]
    assert [each.name for each in of_cudnn] == without
    assert [each.name for each in piece.candidates if each.chosen] == [piece.plan.split("/", 3)[-1]]
    first = of_cudnn[0]
    assert first.engine is not None
    assert first.name == "_".join([f"eng{first.engine}", *(f"{k}={v}" for k, v in first.knobs.items())])
    assert {each.heuristic for each in of_cudnn} == {"A"}
    assert any("RUNTIME_COMPILATION" in each.notes for each in of_cudnn)
    (excluding,) = child.call(listed, _with(graph, exclude=(f"eng{first.engine}",))).pieces
    refused = {each.name for each in excluding.candidates if "excluded" in each.refused}
    assert refused == {each.name for each in of_cudnn if each.engine == first.engine}


def test_what_tuning_has_found_out_stands_with_its_candidate(child: Child) -> None:
    graph = convolution()
    _, second, third, *_ = child.call(ranked, graph)[0]
    timed = [Timed(second, 3.5, 4096), Timed(third, None, 0, "it computes 1 instead of 2")]
    (piece,) = child.call(listed, graph, timed).pieces
    by_name = {each.name: each for each in piece.candidates}
    assert (by_name[second].us, by_name[second].workspace, by_name[second].refused) == (3.5, 4096, "")
    assert (by_name[third].us, by_name[third].refused) == (None, "it computes 1 instead of 2")
    untouched = [each for each in piece.candidates if each.name not in (second, third) and not each.chosen]
    assert {(each.us, each.workspace) for each in untouched} == {(None, None)}


def test_each_piece_has_its_own_candidates_and_equal_pieces_the_same(child: Child) -> None:
    g = GraphBuilder()
    x = g.input("x", (8, 64, 28, 28), "bfloat16", layout="NHWC")
    ws = [g.input(f"w{n}", (64, 64, 3, 3), "bfloat16", layout="NHWC") for n in range(2)]
    y = g.conv(g.conv(x, ws[0], pad=1), ws[1], pad=1)
    convolutions = child.call(listed, g.build(y=g.softmax(y, 1)).body).pieces
    first, second, last = convolutions
    assert first.candidates == second.candidates
    assert len([each for each in first.candidates if each.kind == "cuDNN's"]) > 1
    assert [each.chosen for each in last.candidates].count(True) == 1
    assert child.call(listed_pieces, g.build(y=g.softmax(y, 1)).body) >= 2  # the different ones


def _with(graph: OperationGraph, **options: tuple[str, ...]) -> OperationGraph:
    return msgspec.structs.replace(graph, numerics=Numerics(**options))  # type: ignore[arg-type]
