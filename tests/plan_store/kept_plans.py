"""Keys, plans and a builder whose plans are real CPU plans, kept as the graph that they are made from."""

from __future__ import annotations

import msgspec

from cudnn_actor.engines.base import Effort, EngineFailure, Plan, ProgressCallback, unheard
from cudnn_actor.engines.cpu.exact.compiler import compile_plan
from cudnn_actor.plan_store.plan_file import PlanKey, StoredPlan
from cudnn_actor.protocol import BufferRef, ConvFwd, ConvSpec, TensorSpec
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.messages.lowering import lower


def key(number: int = 0, fingerprint: str = "cudnn 9.19 on sm_90", limit: int | None = None) -> PlanKey:
    return PlanKey(graph=f"{number:064x}", fingerprint=fingerprint, workspace_limit=limit)


def plan(
    data: bytes = b"a plan", workspace: int = 0, *, tuned: bool = False, provisional: bool = False
) -> StoredPlan:
    return StoredPlan(data=data, workspace=workspace, tuned=tuned, provisional=provisional)


def graph(size: int = 4) -> OperationGraph:
    """A 1x1 convolution of `size` by `size` points."""
    x, w = (
        BufferRef(slot=slot, generation=1 << 32 | 1, spec=TensorSpec.packed(dims, "float32"), device="cpu")
        for slot, dims in enumerate([(1, 1, size, size), (1, 1, 1, 1)])
    )
    return lower(ConvFwd(x=x, w=w, y=x, conv=ConvSpec.symmetric(2))).graph


class GraphBuilder:
    """A builder of CPU plans; what it exports is their graph, which its `restore` insists on."""

    def __init__(self, fingerprint: str = "numpy on a cpu") -> None:
        self.fingerprint = fingerprint
        self.work: list[str] = []
        """What it was asked to do, and did."""
        self.refuses: EngineFailure | None = None
        """What `restore` and `export` raise."""
        self.is_open = False
        self._graphs: dict[int, OperationGraph] = {}

    def expect_builds(self) -> None:
        """Nothing to get ready."""

    def open(self) -> None:
        self.is_open = True

    def close(self) -> None:
        self.is_open = False

    def interrupt(self) -> None:
        self.work.append("interrupt")

    def build(
        self,
        graph: OperationGraph,
        *,
        workspace_limit: int | None,
        progress: ProgressCallback = unheard,
        effort: Effort = "best",
    ) -> Plan:
        self.work.append("build")
        return self._made(graph, workspace_limit)

    def tune(self, graph: OperationGraph, *, workspace_limit: int | None, progress: ProgressCallback) -> Plan:
        self.work.append("tune")
        progress(0, 1, "the only one")
        return self._made(graph, workspace_limit)

    def export(self, plan: Plan) -> bytes | None:
        self._may_refuse()
        return msgspec.msgpack.encode(self._graphs[id(plan)])

    def restore(self, graph: OperationGraph, data: bytes) -> Plan:
        self._may_refuse()
        try:
            exported = msgspec.msgpack.decode(data, type=OperationGraph)
        except msgspec.DecodeError as error:
            raise EngineFailure("BAD_PLAN", str(error)) from error
        if exported != graph:
            raise EngineFailure("BAD_PLAN", "of another graph")
        self.work.append("restore")
        return self._made(exported, None)

    def _made(self, graph: OperationGraph, workspace_limit: int | None) -> Plan:
        plan = compile_plan(graph, workspace_limit)
        self._graphs[id(plan)] = graph
        return plan

    def _may_refuse(self) -> None:
        if self.refuses is not None:
            raise self.refuses
