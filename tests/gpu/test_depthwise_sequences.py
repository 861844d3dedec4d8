"""Depthwise convolutions of several spatial sizes, run in turns: each is right each time.

cuDNN's notes on 9.24 say that some are not before it, without naming an engine. A self-check of one plan
cannot see that. Here every engine runs, whether errata exclude it or not: one that is found wrong must be
excluded.
With cuDNN 9.19 on an H200, none was found wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest

from cudnn_actor.engines.cuda import CudaEngine
from cudnn_actor.engines.cuda.checking.self_check import BuildContext, SelfCheck
from cudnn_actor.engines.cuda.cudnn.errata import erratum
from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.planning.candidates import candidates
from cudnn_actor.engines.cuda.planning.steps import bound_sources, finish, graph_step
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.protocol import ConvSpec, DType, Layout, OperationGraph, TensorSpec

from .cases import Case, Kind

SIZES = ((56, 56), (28, 28), (33, 65), (14, 14), (7, 7))
SAMPLES, CHANNELS = 8, 96


def depthwise(
    kind: Kind, size: tuple[int, int], dtype: DType, layout: Layout, window: tuple[int, int]
) -> OperationGraph:
    taps, stride = window
    conv = ConvSpec.symmetric(2, pad=taps // 2, stride=stride, groups=CHANNELS)
    x, w = (SAMPLES, CHANNELS, *size), (CHANNELS, 1, taps, taps)
    dims = {"x": x, "w": w, "y": conv.output_dims(x, w)}
    specs: dict[str, Any] = {name: TensorSpec.packed(of, dtype, layout) for name, of in dims.items()}
    return Case(kind=kind, conv=conv, **specs).graph()


def engines_of(graph: OperationGraph, handle: Any) -> dict[str, int]:
    """The engines that cuDNN offers for a graph → the first candidate of each."""
    offered = candidates(graph, handle, None)
    found: dict[str, int] = {}
    for index in range(offered.get_execution_plan_count()):
        found.setdefault(offered.get_plan_name_at_index(index).split("_")[0], index)
    return found


def built(graph: OperationGraph, handle: Any, candidate: int) -> CudaPlan | None:
    """The plan of a candidate, whatever the errata say; None if it cannot be built."""
    lowered = candidates(graph, handle, None)
    try:
        lowered.build_plan_at_index(candidate)
    except (libraries().cudnn.cudnnGraphNotSupportedError, RuntimeError, ValueError):
        return None
    return finish(graph, [graph_step(graph, lowered, bound_sources(graph))], [lowered], 0, None)


@pytest.fixture
def context() -> Iterator[BuildContext]:
    engine = CudaEngine()
    engine.open()
    yield BuildContext(engine.handle, engine.stream)
    engine.close()


@pytest.mark.parametrize("window", [(3, 1), (5, 2)], ids=["3x3", "5x5 stride 2"])
@pytest.mark.parametrize("layout", [Layout.NHWC, Layout.NCHW])
@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16, DType.FLOAT32])
@pytest.mark.parametrize("kind", Kind)
def test_an_engine_that_is_wrong_after_another_size_is_excluded(
    context: BuildContext, kind: Kind, dtype: DType, layout: Layout, window: tuple[int, int]
) -> None:
    graphs = [depthwise(kind, size, dtype, layout, window) for size in SIZES]
    offers = [engines_of(graph, context.handle) for graph in graphs]
    checks = [SelfCheck(graph, context) for graph in graphs]
    wrong: dict[str, str] = {}
    for engine in dict.fromkeys(name for offer in offers for name in offer):
        good: list[tuple[SelfCheck, CudaPlan]] = []
        for graph, offer, check in zip(graphs, offers, checks, strict=True):
            plan = built(graph, context.handle, offer[engine]) if engine in offer else None
            if plan is None or check.fault(plan) is not None:
                continue  # a self-check finds it
            good.append((check, plan))
            for earlier, other in (*good, *reversed(good)):  # all plans so far, in both orders
                if (fault := earlier.fault(other)) is not None:
                    wrong.setdefault(engine, f"{other.tag}, after {plan.tag}: {fault}")
        found = f"{len(good)} sizes, {wrong.get(engine, 'right')}"
        sys.stdout.write(f"{kind} {dtype} {layout} {window[0]}x{window[0]} {engine}: {found}\n")
    for check in checks:
        check.close()
    version = libraries().cudnn.backend_version()
    missed = {name: fault for name, fault in wrong.items() if erratum(graphs[0], name, version) is None}
    assert not missed, f"no erratum excludes {missed}"
