"""Candidates that errata exclude, built and run all the same."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from cudnn_actor.engines.base import EngineFailure
from cudnn_actor.engines.cuda.checking.self_check import BuildContext, SelfCheck
from cudnn_actor.engines.cuda.cudnn.errata import erratum
from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.planning.candidates import candidates, names_of
from cudnn_actor.engines.cuda.planning.cuda_builder import CudaBuilder
from cudnn_actor.engines.cuda.planning.steps import bound_sources, finish, graph_step
from cudnn_actor.engines.cuda.planning.tuning import time_plan
from cudnn_actor.engines.cuda.running.plan import CudaPlan
from cudnn_actor.engines.cuda.running.program import Program
from cudnn_actor.protocol import DType, MatMul, OperationGraph, TensorSpec
from cudnn_actor.protocol.operations import Convolution
from tests.gpu.bounds import UNIT, error_over_bound
from tests.gpu.cases import Case, arrays
from tests.gpu.oracle import truth

from ..operations import best
from ..recording import Row
from .problems import CASES, PROBLEMS

__all__ = ["excluded", "tried"]

_RUNS = 20
_EVERY_VERSION = 0
"""Older than any version that an erratum is fixed in."""


def excluded(graph: OperationGraph, names: list[str]) -> list[int]:
    """The numbers of the candidates to try: the first of each engine that errata of any version exclude."""
    found: dict[str, int] = {}
    for number, name in enumerate(names):
        if erratum(graph, name, _EVERY_VERSION) is not None:
            found.setdefault(name.split("_")[0], number)
    return list(found.values())


def tried(name: str, number: int) -> Row:
    """The results of one candidate of a problem, and its time. It may end the CUDA context."""
    graph = PROBLEMS[name]
    builder = CudaBuilder(0)
    builder.open()
    context = builder.context
    lowered = candidates(graph, context.handle, None)
    row: Row = {"problem": name, "plan": names_of(lowered)[number], "fault": None}
    cudnn = libraries().cudnn
    try:
        lowered.build_plan_at_index(number)
    except (cudnn.cudnnGraphNotSupportedError, RuntimeError, ValueError) as error:
        return row | {"fault": f"not built: {str(error).splitlines()[0][:150]}"}
    plan = finish(graph, [graph_step(graph, lowered, bound_sources(graph))], [lowered], 0, None)
    chosen = builder.build(graph, workspace_limit=None)
    check = SelfCheck(graph, context)
    row |= {"service": chosen.tag, "service_us": best(lambda: time_plan(check, chosen, _RUNS))}
    try:
        row["fault"] = check.fault(plan)
        if row["fault"] is None:
            row["us"] = best(lambda: time_plan(check, plan, _RUNS))
        problem = CASES[name]
        if isinstance(graph.operations[0], MatMul) or (isinstance(problem, Case) and problem.plain):
            row |= {"off": _error(problem, plan, context), "service_off": _error(problem, chosen, context)}
    except EngineFailure as failure:  # a dead context, in which nothing more can be done
        row["fault"] = f"{type(failure).__name__}: {failure}"
    return row


def _error(problem: Case | OperationGraph, plan: CudaPlan, context: BuildContext) -> float:
    """The error for normal values, over what a sum in float32 and one rounding allow: see `tests.gpu.bounds`.

    Of a product, that of the worst element; of a convolution, that of all elements together, by norm.
    """
    if isinstance(problem, Case):
        given = arrays(problem)
        graph = problem.graph()
        operation = graph.operations[0]
        assert isinstance(operation, Convolution), "it is a convolution alone"
        uids = dict(zip("xwy", operation.of_shape, strict=True))
        got = _ran(graph, {uids[name]: values for name, values in given.items()}, plan, context)
        return round(error_over_bound(problem, got, truth(problem)), 3)
    (product,) = problem.operations
    assert isinstance(product, MatMul), "it is a product alone"
    rng = np.random.default_rng(0)
    values = {
        uid: rng.standard_normal(problem.tensor(uid).dims).astype(problem.tensor(uid).dtype.numpy)
        for uid in (product.a, product.b)
    }
    got = _ran(problem, values, plan, context).astype(np.float64)
    a, b = (values[uid].astype(np.float64) for uid in (product.a, product.b))
    walk = 4 * math.sqrt(a.shape[1]) * UNIT[DType.FLOAT32]
    unit = UNIT[problem.tensor(problem.results[0]).dtype]
    allowed = unit * np.abs(a @ b) + walk * (np.abs(a) @ np.abs(b))
    return round(float((np.abs(got - a @ b) / allowed).max()), 3)


def _ran(
    graph: OperationGraph, given: Mapping[int, np.ndarray], plan: CudaPlan, context: BuildContext
) -> np.ndarray:
    """The graph's only result, as a plan computes it from these operands."""
    cupy, memory = libraries().cupy, {}
    with context.stream:
        for uid in graph.bound:
            spec = graph.tensor(uid).spec
            raw = np.zeros(spec.nbytes // spec.dtype.itemsize, spec.dtype.numpy)
            if uid in given:
                _view(raw, spec)[...] = given[uid]
            memory[uid] = cupy.asarray(raw.view(np.uint8))
        workspace = cupy.zeros(max(1, plan.workspace), cupy.uint8)
        pointers = [memory[uid].data.ptr for uid in graph.bound]
        Program(plan, context.handle, context.stream).run((), pointers, (), workspace.data.ptr)
        context.stream.synchronize()
        (uid,) = graph.results
        spec = graph.tensor(uid).spec
        return np.ascontiguousarray(_view(cupy.asnumpy(memory[uid]).view(spec.dtype.numpy), spec))


def _view(values: np.ndarray, spec: TensorSpec) -> np.ndarray:
    strides = [stride * values.itemsize for stride in spec.strides]
    return np.lib.stride_tricks.as_strided(values, spec.dims, strides)
