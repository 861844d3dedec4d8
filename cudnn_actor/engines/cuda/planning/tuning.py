"""Autotuning: times every plan that cuDNN offers for a graph on the device, and keeps the fastest.

Only plans that have passed their self-check are timed; the others are reported.
The few fastest are timed again in turns, so that a change of the GPU's clock
meanwhile favours none of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

from cudnn_actor.actors.logs import Log
from cudnn_actor.engines.base import EngineFailure, ProgressCallback
from cudnn_actor.engines.cuda.checking.self_check import BuildContext, SelfCheck
from cudnn_actor.engines.cuda.cudnn.frontend_graph import Refused
from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.planning.candidates import candidates, check_whole, names_of
from cudnn_actor.engines.cuda.planning.compiler import (
    WORKSPACE_BYTES,
    compile_plan,
    compile_rearranged,
    compile_whole,
    in_pieces,
)
from cudnn_actor.engines.cuda.planning.depthwise import compile_depthwise, ways_of_depthwise
from cudnn_actor.engines.cuda.planning.partition import cut
from cudnn_actor.engines.cuda.planning.product_halves import compile_halves, halves_of
from cudnn_actor.engines.cuda.planning.products import compile_product, product_of
from cudnn_actor.engines.cuda.planning.rearranging import rearrangements
from cudnn_actor.engines.cuda.planning.splitting import compile_split, ways
from cudnn_actor.engines.cuda.planning.widening import compile_widened, is_widened
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.engines.cuda.running.program import Program
from cudnn_actor.engines.cuda.running.recipe import Tuning
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.operations import Convolution

__all__ = ["Candidate", "all_candidates", "time_plan", "tune"]

log = Log("cudnn_actor")

_WARM_UPS, _ROUGH_RUNS, _FINE_RUNS, _FINALISTS, _ROUNDS = 5, 5, 20, 4, 3
_WIDENED, _REARRANGED, _PRODUCTS = 8, 4, 8
"""How many plans are timed with channels of zeros, on rearranged copies, and of products by cuBLASLt."""


def tune(
    graph: OperationGraph,
    context: BuildContext,
    workspace_limit: int | None,
    progress: ProgressCallback,
) -> CudaPlan:
    """Returns the fastest plan for a graph; its `tuning` has the measurements. Blocks for seconds.

    Raises as `compile_plan`, and `MemoryError` if a second set of the graph's tensors does not fit.
    """
    limit = WORKSPACE_BYTES if workspace_limit is None else workspace_limit
    parts = cut(graph)
    if parts is not None:
        return in_pieces(graph, parts, limit, lambda piece: tune(piece, context, limit, progress))
    building = context._replace(trying=lambda what: progress(0, 0, what))
    heuristic = compile_plan(graph, building, workspace_limit)
    check = SelfCheck(graph, context)
    try:
        return _fastest(check, heuristic, all_candidates(graph, context.handle, limit), progress)
    finally:
        check.close()


class Candidate(NamedTuple):
    """A plan, in words, and what builds it."""

    what: str
    build: Callable[[], CudaPlan]


def all_candidates(graph: OperationGraph, handle: Any, limit: int) -> Sequence[Candidate]:
    """All candidates: cuDNN's, those on rearranged copies or with channels of zeros, our kernels of depthwise
    convolutions, and the ways to run the graph in steps unless it is a convolution alone.
    """
    try:
        check_whole(graph)
        lowered = candidates(graph, handle, limit)
        names = names_of(lowered)
    except Refused:
        names = []

    given = graph, handle, limit
    rivals = [Candidate(name, partial(compile_whole, *given, index)) for index, name in enumerate(names)]
    if (product := product_of(graph)) is not None:
        rivals += [
            Candidate(f"by cuBLASLt, {n + 1}", partial(compile_product, graph, product, handle, limit, n))
            for n in range(_PRODUCTS)
        ]
    elif (halves := halves_of(graph)) is not None:
        rivals += [
            Candidate(f"by cuBLASLt and a kernel, {n + 1}", partial(compile_halves, *of))
            for n in range(_PRODUCTS)
            for of in [(graph, halves, handle, limit, n)]
        ]
    rivals += [
        Candidate(f"{of.what}, {n + 1}", partial(compile_rearranged, graph, of, handle, limit, n))
        for of in rearrangements(graph, every=True)
        for n in range(_REARRANGED)
    ]
    wider = range(_WIDENED if is_widened(graph) else 0)
    rivals += [
        Candidate(f"with channels of zeros, {n + 1}", partial(compile_widened, *given, n)) for n in wider
    ]
    rivals += [
        Candidate(f"depthwise, {n + 1}", partial(compile_depthwise, graph, limit, n))
        for n in range(1, ways_of_depthwise(graph))
    ]
    convolves = any(isinstance(operation, Convolution) for operation in graph.operations)
    choices = (len(graph.operations) > 1) if convolves else ways(graph)
    return rivals + [
        Candidate(f"in steps, way {choice + 1}", partial(compile_split, *given, choice=choice))
        for choice in range(choices)
    ]


def _fastest(
    check: SelfCheck,
    heuristic: CudaPlan,
    rivals: Sequence[Candidate],
    progress: ProgressCallback,
) -> CudaPlan:
    """The fastest of the heuristic's plan and the rivals that pass their self-check."""
    times = [(time_plan(check, heuristic, _ROUGH_RUNS), 0, heuristic)]
    discarded: list[str] = []
    for number, (candidate, plan) in enumerate(_built(rivals, progress), start=1):
        fault = check.fault(plan)
        if fault is None:
            times.append((time_plan(check, plan, _ROUGH_RUNS), number, plan))
        else:
            log.info("plan.discarded", plan=plan.tag, reason=fault)
            discarded.append(f"{candidate.what}: {fault}")
    heuristic_us, best_us, best = _final(check, heuristic, [plan for _, _, plan in sorted(times)])
    found = Tuning(heuristic_us, best_us, len(times), tuple(discarded))
    return CudaPlan(msgspec.structs.replace(best.recipe, tuning=found), best.graphs)


def _built(rivals: Sequence[Candidate], progress: ProgressCallback) -> Iterator[tuple[Candidate, CudaPlan]]:
    """Yields the candidates that can be built, each with its plan."""
    for number, candidate in enumerate(rivals):
        progress(number, len(rivals), candidate.what)
        try:
            yield candidate, candidate.build()
        except (Refused, EngineFailure, MemoryError) as error:
            log.debug("plan.not_built", what=candidate.what, reason=str(error))
    progress(len(rivals), len(rivals), "done")


def _final(
    check: SelfCheck, heuristic: CudaPlan, ranked: Sequence[CudaPlan]
) -> tuple[float, float, CudaPlan]:
    """The heuristic's time, the best time, and the best plan, from timing the few fastest in turns."""
    finalists = list(dict.fromkeys([*ranked[:_FINALISTS], heuristic]))
    rounds = [[time_plan(check, plan, _FINE_RUNS) for plan in finalists] for _ in range(_ROUNDS)]
    medians = [sorted(times)[_ROUNDS // 2] for times in zip(*rounds, strict=True)]
    best = min(range(len(finalists)), key=medians.__getitem__)
    return medians[finalists.index(heuristic)], medians[best], finalists[best]


def time_plan(check: SelfCheck, plan: CudaPlan, runs: int) -> float:
    """Microseconds of device time for a run; of a replayed CUDA graph, if the plan can be captured."""
    cupy = libraries().cupy
    stream = check.context.stream
    workspace = check.room_for(plan)
    program = Program(plan, check.context.handle, stream)
    key = tuple(check.pointers)
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    for number in range(_WARM_UPS + runs):
        if number == _WARM_UPS:
            begin.record(stream)
        replay = program.replays.get(key)
        if replay is None:
            program.run(key, check.pointers, check.scalars, workspace.pointer)
        else:
            replay.launch(behind=0)
    end.record(stream)
    end.synchronize()
    return float(cupy.cuda.get_elapsed_time(begin, end)) * 1e3 / runs
