"""Fair share decides which client's request the service gets next. Pure: no clock, thread or socket.

Deficit round robin (Shreedhar and Varghese, 1996) over device time. Each client with waiting requests has a
credit in microseconds. In its turn, a client gets a quantum, and may send while its credit covers the
estimated time of its next request. When a request ends, the client is charged for the time that it has really
taken. The sum of the estimates bounds the requests that the service has at a time, not their number. So a
client with long requests does not fill the service's queue, and one with short requests keeps the device
busy.

A client without waiting requests keeps no credit, so that it cannot save up turns. It keeps its debt.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
from typing import Generic, TypeVar

__all__ = ["QUANTUM_US", "WINDOW_US", "FairShare"]

QUANTUM_US = 500.0
WINDOW_US = 4000.0
_MOST_DEBT_US = 1e6
C = TypeVar("C", bound=Hashable)
ItemT = TypeVar("ItemT")


class _Queue(Generic[ItemT]):
    def __init__(self) -> None:
        self.waiting: deque[tuple[ItemT, float]] = deque()
        self.credit_us = 0.0


class FairShare(Generic[C, ItemT]):
    """The waiting requests of all clients. Only one thread may use it at a time.

    Parameters
    ----------
    window_us
        The most estimated device time that the service has at once, in microseconds. One request goes to an
        idle service whatever its estimate.
    quantum_us
        The time that a client gets in each turn, in microseconds.
    """

    def __init__(self, window_us: float = WINDOW_US, quantum_us: float = QUANTUM_US) -> None:
        self._window_us, self._quantum_us = window_us, quantum_us
        self._queues: dict[C, _Queue[ItemT]] = {}
        self._turns: deque[C] = deque()
        """The clients with waiting requests; it is the leftmost one's turn."""
        self.outstanding_us = 0.0
        """The estimated time of the requests that the service has now, in microseconds."""
        self.count = 0
        self._begun = False
        """Whether the leftmost client has got the quantum of its present turn."""

    def join(self, client: C) -> None:
        """Add a client."""
        self._queues[client] = _Queue()

    def leave(self, client: C) -> list[ItemT]:
        """Remove a client. Returns its waiting requests. Requests that were handed over end by `finish` all
        the same."""
        queue = self._queues.pop(client)
        if queue.waiting:
            self._begun = self._begun and self._turns[0] != client
            self._turns.remove(client)
        return [item for item, _ in queue.waiting]

    def put(self, client: C, item: ItemT, cost_us: float) -> None:
        """Add a request of a client, with the time that it is expected to take."""
        queue = self._queues[client]
        if not queue.waiting:
            self._turns.append(client)
        queue.waiting.append((item, max(cost_us, 1.0)))

    def pass_through(self, client: C, cost_us: float) -> bool:
        """Hand a client's request over at once, if no request waits and there is room. Returns whether it
        was.

        A request that is handed over is counted. The effect is that of `put` and `take`: if no other client
        waits, turns go by until the client's credit suffices, and it keeps none of the credit.
        """
        cost_us = max(cost_us, 1.0)
        if self._turns or (self.count and self.outstanding_us + cost_us > self._window_us):
            return False
        self._queues[client].credit_us = 0.0
        self.outstanding_us += cost_us
        self.count += 1
        return True

    @property
    def waits(self) -> bool:
        """Whether a request waits."""
        return bool(self._turns)

    @property
    def has_one(self) -> bool:
        """Whether the service has exactly one request."""
        return self.count == 1

    def take(self) -> tuple[C, ItemT, float] | None:
        """The next request for the service, with its client and its estimate; None if no request waits, or if
        the service has enough."""
        if not self._turns:
            return None
        client = self._next_client()
        queue = self._queues[client]
        item, cost_us = queue.waiting[0]
        if self.count and self.outstanding_us + cost_us > self._window_us:
            return None
        queue.waiting.popleft()
        queue.credit_us -= cost_us
        self.outstanding_us += cost_us
        self.count += 1
        if not queue.waiting:
            self._turns.popleft()
            self._begun = False
            queue.credit_us = min(queue.credit_us, 0.0)
        return client, item, cost_us

    def finish(self, client: C, cost_us: float, actual_us: float) -> None:
        """Note that a request has ended. `cost_us`: its estimate. `actual_us`: the time that it has taken."""
        self.count -= 1
        self.outstanding_us = max(0.0, self.outstanding_us - cost_us) if self.count else 0.0
        if (queue := self._queues.get(client)) is not None:
            credit_us = queue.credit_us + cost_us - actual_us
            if credit_us > 0.0 and not queue.waiting:
                credit_us = 0.0
            elif credit_us < -_MOST_DEBT_US:
                credit_us = -_MOST_DEBT_US
            queue.credit_us = credit_us

    def _next_client(self) -> C:
        """The client whose turn it is, once credit covers its next request. Some client waits."""
        while True:
            for _ in range(len(self._turns)):
                queue = self._queues[self._turns[0]]
                if not self._begun:
                    self._begun = True
                    queue.credit_us += self._quantum_us
                if queue.credit_us >= queue.waiting[0][1]:
                    return self._turns[0]
                self._turns.rotate(-1)
                self._begun = False
            # No client's credit suffices in this round. Skip the rounds that the first client to be ready
            # needs, except the last one.
            queues = [self._queues[client] for client in self._turns]
            missing = min(queue.waiting[0][1] - queue.credit_us for queue in queues)
            rounds = max(0, math.ceil(missing / self._quantum_us) - 1)
            for queue in queues:
                queue.credit_us += rounds * self._quantum_us
