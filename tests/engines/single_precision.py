"""The CPU engine in float32: rounding as on a GPU, where there is none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np

from cudnn_actor.engines.cpu import CpuEngine
from cudnn_actor.engines.cpu.exact.evaluation import EvaluatedPlan, Evaluation, NumPy, exact, round_into
from cudnn_actor.protocol import DType, Node, OperationGraph, Pointwise, TensorRole

__all__ = ["SinglePrecision"]


class SinglePrecision(CpuEngine):
    """The operations' definitions, computed in float32 where no operand is float64.

    Parameters
    ----------
    change
        Changes each operation first.
    """

    name = "float32"

    def __init__(self, change: Callable[[Any], Any] = lambda operation: operation) -> None:
        super().__init__()
        self._change = change

    def build(self, graph: OperationGraph, *, workspace_limit: int | None) -> Any:
        plan = super().build(graph, workspace_limit=workspace_limit)
        operations = tuple(map(self._change, graph.operations))
        return _Plan(plan.tag, msgspec.structs.replace(graph, operations=operations))


class _Plan(EvaluatedPlan):
    def bind(self, workspace: Any) -> Evaluation:
        return _Evaluation(self.graph, super().bind(workspace).last)


class _Evaluation(Evaluation):
    def _run(
        self, xp: NumPy, operation: Node, bound: Mapping[int, np.ndarray], values: dict[int, Any]
    ) -> None:
        graph = self.graph
        for uid in operation.reads:
            if uid not in values:
                values[uid] = exact(bound[uid])
        converts = isinstance(operation, Pointwise)
        given = {
            uid: values[uid].astype(np.float32)
            if graph.compute(operation) is DType.FLOAT32 and (converts or values[uid].dtype == np.float64)
            else values[uid]
            for uid in operation.reads
        }
        for uid, result in graph.evaluate(xp, operation, given).items():
            tensor = graph.tensor(uid)
            bound_to = tensor.role is TensorRole.BOUND
            place = bound[uid] if bound_to else np.empty(tensor.dims, tensor.dtype.numpy)
            round_into(np.asarray(result), tensor.dtype, place)
            values[uid] = exact(place)
