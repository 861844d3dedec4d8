"""Thread isolation: the actor runs on a thread of the service's own process."""

from __future__ import annotations

from cudnn_actor.actors import Mailbox
from cudnn_actor.broker.progress import Progress
from cudnn_actor.broker.service_state import ServiceState
from cudnn_actor.engines import EngineChoice
from cudnn_actor.engines.remote import SERVING, BuilderHost
from cudnn_actor.isolation.base import READY_WITHIN_S, StandbyState, check_lost_thread, if_lost, limit_arenas
from cudnn_actor.isolation.thread.cudnn_actor import CudnnActor
from cudnn_actor.memory import MemoryTable
from cudnn_actor.options import Options
from cudnn_actor.protocol.messages.receipts import PlanCounts
from cudnn_actor.supervision import Backoff

__all__ = ["ThreadIsolation"]


class ThreadIsolation:
    """The actor on a thread of this process.

    Parameters
    ----------
    options, engine
        The service's options and engine.
    """

    name = "thread"
    worker_pid = None
    worker_host_bytes = 0
    standby_host_bytes = 0
    backoff = Backoff()
    ready_within_s = READY_WITHIN_S

    def __init__(self, options: Options, engine: EngineChoice) -> None:
        self.replaceable = engine.outlives_context
        self._options = options
        self.engine = engine
        self._state: ServiceState | None = None
        """The state, with the memory of the present life or the last one; None before the first."""
        self._actor: CudnnActor | None = None
        self._builders: BuilderHost | None = None

    def mailbox(self) -> Mailbox:
        """A mailbox that the actor's thread reads."""
        return Mailbox(self._options.mailbox)

    def memory(self, device: str) -> MemoryTable:
        """A table in this process."""
        return MemoryTable(device, limit=self._options.memory_limit)

    def begin(self, state: ServiceState) -> None:
        """Store the state. A builder process starts when a plan must be built."""
        self._state = state
        state.builders = self._builders = BuilderHost(
            (SERVING, *self.engine.preload), self._options.executable
        )

    def actor(self, incarnation: int) -> CudnnActor:
        """The actor itself."""
        check_lost_thread(self._actor)
        state = self._state
        assert state is not None
        limit_arenas(state.memory, self._options, self.engine)  # no actor lives, and nothing else uses it
        self._actor = CudnnActor(state, self.engine.make, incarnation)
        return self._actor

    def progress(self) -> Progress:
        """The actor's progress."""
        actor = self._actor
        return Progress() if actor is None else actor.progress()

    @property
    def in_flight(self) -> int:
        """The messages that the actor has begun."""
        actor = self._actor
        return 0 if actor is None else actor.in_flight

    @property
    def standby(self) -> StandbyState:
        """A thread has none."""
        return StandbyState.NONE

    @property
    def plans(self) -> PlanCounts:
        """The counts of the actor's plan cache."""
        actor = self._actor
        return PlanCounts() if actor is None else actor.plans

    def end(self) -> None:
        """Forget the actor and end the builder process. The actor and the table release everything else."""
        self._actor = if_lost(self._actor)
        builders, self._builders = self._builders, None
        if builders is not None:
            builders.close()
