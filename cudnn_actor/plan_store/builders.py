"""Two builders with a plan store: one builds the plans that the store lacks, and the other one never builds.

`RestoringBuilder` has a thread of its own, so that a stored plan never waits for a build.
"""

from __future__ import annotations

from cudnn_actor.actors.logs import Log
from cudnn_actor.engines.base import (
    Builder,
    Effort,
    EngineFailure,
    Plan,
    ProgressCallback,
    StickyError,
    unheard,
)
from cudnn_actor.plan_store.plan_file import PlanKey, StoredPlan
from cudnn_actor.plan_store.store import PlanStore
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph

__all__ = ["NotStored", "RestoringBuilder", "StoringBuilder"]

log = Log("cudnn_actor")


class StoringBuilder:
    """A `Builder` that looks into a plan store before it builds, and stores what it builds.

    Parameters
    ----------
    store
        The plan store.
    builder
        Builds, exports and restores plans. Opened, used and closed only through this object.
    """

    def __init__(self, store: PlanStore, builder: Builder) -> None:
        self._store = store
        self._builder = builder

    @property
    def fingerprint(self) -> str:
        """The builder's fingerprint."""
        return self._builder.fingerprint

    def expect_builds(self) -> None:
        """Call the builder's `expect_builds`, unless the store has plans: then no build may be needed."""
        if self._store.is_empty():
            self._builder.expect_builds()

    def open(self) -> None:
        """Open the builder. Raises `EngineFailure`. Blocks."""
        self._builder.open()

    def close(self) -> None:
        """Close the builder. Safe to call twice."""
        self._builder.close()

    def build(
        self,
        graph: OperationGraph,
        *,
        workspace_limit: int | None,
        progress: ProgressCallback = unheard,
        effort: Effort = "best",
    ) -> Plan:
        """The stored plan, tuned or not; else a new one, which is then stored.

        A stored plan that is provisional is for the effort "soon" alone. Raises and blocks like
        `Builder.build`.
        """
        plan = self.find(graph, workspace_limit, effort)
        if plan is None:
            plan = self._builder.build(
                graph, workspace_limit=workspace_limit, progress=progress, effort=effort
            )
            self._keep(self._key(graph, workspace_limit), plan, tuned=False)
        return plan

    def find(
        self, graph: OperationGraph, workspace_limit: int | None, effort: Effort = "best"
    ) -> Plan | None:
        """The stored plan, as `build` takes it; None if there is none. Raises `StickyError`."""
        key = self._key(graph, workspace_limit)
        stored = self._store.load(key)
        if stored is not None and stored.provisional and effort != "soon":
            return None
        return self._restore(graph, key, stored)

    def tune(self, graph: OperationGraph, *, workspace_limit: int | None, progress: ProgressCallback) -> Plan:
        """The stored tuned plan; else the winner of a new measurement, which is then stored.

        Raises and blocks like `Builder.tune`. A stored plan is not measured again; `progress` is not called
        then.
        """
        plan = self.find_tuned(graph, workspace_limit)
        if plan is None:
            plan = self._builder.tune(graph, workspace_limit=workspace_limit, progress=progress)
            self._keep(self._key(graph, workspace_limit), plan, tuned=True)
        return plan

    def find_tuned(self, graph: OperationGraph, workspace_limit: int | None) -> Plan | None:
        """The stored plan, if it is tuned; None if there is none. Raises `StickyError`."""
        key = self._key(graph, workspace_limit)
        stored = self._store.load(key)
        return self._restore(graph, key, stored) if stored is not None and stored.tuned else None

    def interrupt(self) -> None:
        """Call the builder's `interrupt`. Any thread."""
        self._builder.interrupt()

    def export(self, plan: Plan) -> bytes | None:
        """Call the builder's `export`."""
        return self._builder.export(plan)

    def restore(self, graph: OperationGraph, data: bytes) -> Plan:
        """Call the builder's `restore`. Raises `EngineFailure`."""
        return self._builder.restore(graph, data)

    def _key(self, graph: OperationGraph, workspace_limit: int | None) -> PlanKey:
        return PlanKey(graph=graph.digest(), fingerprint=self.fingerprint, workspace_limit=workspace_limit)

    def _restore(self, graph: OperationGraph, key: PlanKey, stored: StoredPlan | None) -> Plan | None:
        if stored is None:
            return None
        try:
            return self._builder.restore(graph, stored.data)
        except EngineFailure as error:
            self._store.reject(key, f"the library refuses it: {error}")
            if isinstance(error, StickyError):  # the plan may have caused it: the next start does not load it
                raise
            return None

    def _keep(self, key: PlanKey, plan: Plan, *, tuned: bool) -> None:
        if not plan.checked:
            return  # the next process may have the memory for a self-check
        try:
            data = self._builder.export(plan)
        except EngineFailure as error:  # the plan itself can still be used
            log.warning("plan_store.not_exported", plan=plan.tag, error=str(error))
            return
        if data is not None:
            stored = StoredPlan(
                data=data, workspace=plan.workspace, tuned=tuned, provisional=plan.provisional and not tuned
            )
            self._store.save(key, stored)


class NotStored(Exception):
    """Raised when the store does not have a plan, so that it must be built."""


class RestoringBuilder(StoringBuilder):
    """A `Builder` that only restores plans which the store has. See the module's docstring."""

    def expect_builds(self) -> None:
        """Do nothing, because this builder never builds."""

    def build(
        self,
        graph: OperationGraph,
        *,
        workspace_limit: int | None,
        progress: ProgressCallback = unheard,  # noqa: ARG002 - it tries none
        effort: Effort = "best",
    ) -> Plan:
        """The stored plan. Raises `NotStored`, `StickyError`. Blocks for the disk and for restoring."""
        plan = self.find(graph, workspace_limit, effort)
        if plan is None:
            raise NotStored(graph.digest())
        return plan

    def tune(
        self,
        graph: OperationGraph,
        *,
        workspace_limit: int | None,
        progress: ProgressCallback,  # noqa: ARG002 - it measures nothing
    ) -> Plan:
        """The stored plan, if it is tuned. Raises and blocks as `build`."""
        plan = self.find_tuned(graph, workspace_limit)
        if plan is None:
            raise NotStored(graph.digest())
        return plan
