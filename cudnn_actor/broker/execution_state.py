"""The state that running requests needs: buffers, caches and limits.

A worker process has only this part of a service's state. The rest (`service_state`) is in the service's own
process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cudnn_actor.broker.deployments import ModelRun
from cudnn_actor.broker.message_cache import CachedMessage, MessageCache
from cudnn_actor.engines.base import BuilderAccess
from cudnn_actor.memory import Buffers
from cudnn_actor.plan_store.cache import PLAN_CAPACITY
from cudnn_actor.plan_store.store import PlanStore
from cudnn_actor.protocol.graphs.limits import GraphLimits
from cudnn_actor.protocol.graphs.named_graph import Graph
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.messages.lowering import Lowered
from cudnn_actor.protocol.messages.messages import Compute, Warm

__all__ = ["CACHE_BYTES", "ExecutionState"]

CACHE_BYTES = 128 << 20
"""The default of `cache_limit`."""


@dataclass(kw_only=True, eq=False, repr=False)
class ExecutionState:
    """The state that running requests needs. The thread that runs requests uses it; any thread may fill the
    cache of messages.

    Parameters
    ----------
    memory
        The buffers.
    workspace_limit
        Bytes of workspace that plans may use; None for the engine's own bound.
    plan_store
        The store that keeps plans on disk, for later processes; None for no store.
    autotune
        Whether warming a plan measures the library's candidates for it.
    cache_limit
        The bytes of host memory, approximately, for each of the caches of messages, of graphs and of plans.
    plan_capacity
        The most plans, including refusals of graphs, that are kept.
    graph_limits
        How large graphs may be; None in a worker, whose parent has checked them.
    """

    memory: Buffers
    workspace_limit: int | None = None
    plan_store: PlanStore | None = None
    autotune: bool = False
    cache_limit: int = CACHE_BYTES
    plan_capacity: int = PLAN_CAPACITY
    graph_limits: GraphLimits | None = None
    builders: BuilderAccess | None = field(default=None, init=False)
    """Connects to the service's builder process; None if plans are built in this process."""
    generation: int = field(default=0, init=False)
    """The number of the present incarnation: how many incarnations have become ready so far."""
    quarantined: dict[str, str] = field(default_factory=dict, init=False)
    """Digests of graphs that were running at two crashes → the crash's cause. A worker has none: its parent
    refuses their requests."""

    def __post_init__(self) -> None:
        self.messages = MessageCache(self.cache_limit, self.check_graph)
        self.announce_build: Callable[[bool], None] = lambda _: None
        """This is called on the build thread, with True when a build begins, and with False when none is
        running."""

    def cached_message(self, item: Any) -> CachedMessage:
        """The cache entry of an envelope's or a task's message, kept in it. Raises `InvalidRequest`."""
        cached: CachedMessage | None = item.found
        if cached is None:
            item.found = cached = self.messages.of(item.message)
        return cached

    def model_run(self, item: Any) -> ModelRun:
        """The run of a model in a task or an envelope. In a worker, the inbox has looked it up."""
        run: ModelRun = item.found
        return run

    def lower(self, message: Compute) -> Lowered:
        """The graph of a message, cached. Any thread. Raises `InvalidRequest`."""
        return self.messages.of(message).lowered

    def graphs_to_warm(self, message: Warm) -> dict[str, OperationGraph]:
        """The graphs whose plans a `Warm` asks for, by digest. Raises `InvalidRequest`."""
        graphs = [self.lower(request).graph for request in message.messages]
        graphs += [graph.body for graph in message.graphs]
        return {graph.digest(): graph for graph in graphs}

    @property
    def most_operations(self) -> int:
        """How many operations a graph may have."""
        return GraphLimits().operations if self.graph_limits is None else self.graph_limits.operations

    def check_graph(self, graph: Graph) -> None:
        """Raise `InvalidRequest` for a graph over the service's limits. Any thread."""
        if self.graph_limits is not None:
            graph.check(self.graph_limits)
