"""The order of cuDNN's candidates: its fallbacks, which take longest to ask for, are the last."""

from __future__ import annotations

import msgspec
import pytest

from cudnn_actor.protocol import Numerics, OperationGraph

from ..engines import test_ranking
from ..engines.test_kernel_caches import biased, convolution, product
from .building import first_plan, ranked, tried
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


def _with(graph: OperationGraph, **options: tuple[str, ...]) -> OperationGraph:
    return msgspec.structs.replace(graph, numerics=Numerics(**options))  # type: ignore[arg-type]
