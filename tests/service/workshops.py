"""Engines whose plans a test builds, tunes or spoils: the device's workshop, behind gates."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import msgspec

from cudnn_actor.engines.base import Effort, EngineFailure, Plan, ProgressCallback, unheard
from cudnn_actor.engines.cpu import CpuEngine
from cudnn_actor.engines.cpu.exact.compiler import compile_plan
from cudnn_actor.engines.cpu.exact.evaluation import EvaluatedPlan
from cudnn_actor.onnx import OnnxModel
from cudnn_actor.protocol.errors import OutOfMemory
from cudnn_actor.protocol.graphs.named_graph import Graph
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import TensorSpec

from ..onnx.small_models import image_model
from ..plain_builder import PlainBuilder
from .rigs import AsynchronousEngine, Device, Gate


class Workshop:
    """Where plans are built: gates before each build, each plan that it tries and each step of tuning.

    And what is to go wrong.
    """

    def __init__(self) -> None:
        self.building = Gate()
        self.trying = Gate()
        self.tuning = Gate()
        self.hurries = False
        """Whether what is to be built soon has another plan, for the time being."""
        self.improving = Gate()
        self.improving_failures: list[Exception] = []
        self.failures: list[Exception | None] = []
        """What the next builds raise, one after the other; None for one that works."""
        self.tuning_failures: list[Exception] = []
        """What the next tunings raise at their second candidate."""
        self.room: int | None = None
        """Bytes of workspace that the device has; None for enough."""
        self.dies = False

    def build(self, graph: OperationGraph, limit: int | None, progress: ProgressCallback) -> Plan:
        self.building.go_through()
        progress(0, 0, "the only one")
        self.trying.go_through()
        failure = self.failures.pop(0) if self.failures else None
        if failure is not None:
            raise failure
        if self.dies:
            self.dies = False
            raise SystemExit("the test ends the build thread")
        return compile_plan(graph, limit)

    def take(self, plan: Plan) -> None:
        if self.room is not None and plan.workspace > self.room:
            raise OutOfMemory(requested=plan.workspace, in_use=0, limit=self.room)


@dataclasses.dataclass(frozen=True, eq=False)
class ProvisionalPlan(EvaluatedPlan):
    """A plan that another is to replace."""

    provisional: ClassVar[bool] = True


class WorkshopBuilder(PlainBuilder):
    """A `Builder` of plans for the CPU engine."""

    def __init__(self, workshop: Workshop) -> None:
        self._workshop = workshop

    def build(
        self,
        graph: OperationGraph,
        *,
        workspace_limit: int | None,
        progress: ProgressCallback = unheard,
        effort: Effort = "best",
    ) -> Plan:
        if effort == "behind":
            self._workshop.improving.go_through()
            if self._workshop.improving_failures:
                raise self._workshop.improving_failures.pop(0)
        plan = self._workshop.build(graph, workspace_limit, progress)
        return (
            ProvisionalPlan(f"{plan.tag}/provisional", graph)
            if effort == "soon" and self._workshop.hurries
            else plan
        )

    def tune(
        self,
        graph: OperationGraph,
        *,
        workspace_limit: int | None,
        progress: ProgressCallback,
    ) -> Plan:
        for done in range(2):
            progress(done, 2, f"candidate {done}")
            self._workshop.tuning.go_through()
            if done and self._workshop.tuning_failures:
                raise self._workshop.tuning_failures.pop(0)
        plan: Any = compile_plan(graph, workspace_limit)
        tuned: Plan = dataclasses.replace(plan, tag=f"{plan.tag}/tuned")
        return tuned

    def restore(self, graph: OperationGraph, data: bytes) -> Plan:
        raise EngineFailure("NO_PLAN", "this builder keeps none")


class KeepingBuilder(WorkshopBuilder):
    """One whose plans can be kept: as the graph that they are made from. Restoring goes through no gate."""

    def __init__(self, workshop: Workshop) -> None:
        super().__init__(workshop)
        self._graphs: dict[int, OperationGraph] = {}

    def build(
        self,
        graph: OperationGraph,
        *,
        workspace_limit: int | None,
        progress: ProgressCallback = unheard,
        effort: Effort = "best",
    ) -> Plan:
        plan = super().build(graph, workspace_limit=workspace_limit, progress=progress, effort=effort)
        self._graphs[id(plan)] = graph
        return plan

    def tune(self, graph: OperationGraph, *, workspace_limit: int | None, progress: ProgressCallback) -> Plan:
        plan = super().tune(graph, workspace_limit=workspace_limit, progress=progress)
        self._graphs[id(plan)] = graph
        return plan

    def export(self, plan: Plan) -> bytes:
        return msgspec.msgpack.encode((self._graphs[id(plan)], plan.tag))

    def restore(self, graph: OperationGraph, data: bytes) -> Plan:
        kept, tag = msgspec.msgpack.decode(data, type=tuple[OperationGraph, str])
        if tag.endswith("/provisional"):
            return ProvisionalPlan(tag, kept)
        plan: Any = compile_plan(kept, None)
        restored: Plan = dataclasses.replace(plan, tag=tag)
        return restored


class BuildingEngine(CpuEngine):
    """The CPU engine with plans from a builder, on a second thread."""

    def __init__(self, workshop: Workshop) -> None:
        super().__init__()
        self._workshop = workshop

    def builder(self, access: object) -> WorkshopBuilder:  # type: ignore[override]
        return WorkshopBuilder(self._workshop)

    def build(self, graph: OperationGraph, *, workspace_limit: int | None) -> Any:
        raise AssertionError("built on the actor's thread")

    def prepare(self, plan: Plan) -> None:
        self._workshop.take(plan)
        super().prepare(plan)


class AsynchronousBuildingEngine(AsynchronousEngine):
    """The same, whose work is done only when the test finishes the fence behind it."""

    def __init__(self, workshop: Workshop, device: Device) -> None:
        super().__init__(device)
        self._workshop = workshop

    def builder(self, access: object) -> WorkshopBuilder:  # type: ignore[override]
        return WorkshopBuilder(self._workshop)

    def prepare(self, plan: Plan) -> None:
        self._workshop.take(plan)
        super().prepare(plan)


class KeepingEngine(BuildingEngine):
    """One whose plans can be kept."""

    def builder(self, access: object) -> KeepingBuilder:  # type: ignore[override]
        return KeepingBuilder(self._workshop)


class MortalBuildingEngine(BuildingEngine):
    """One whose memory dies with its context."""

    outlives_context = False


def image_graph(n: int) -> Graph:
    """The graph of `image_model` for so many images."""
    specs = {"image": TensorSpec.packed((n, 3, 8, 8), DType.FLOAT32)}
    graph = OnnxModel(image_model()).specialise(specs, {}).graph
    assert graph is not None
    return graph
