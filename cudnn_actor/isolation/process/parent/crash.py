"""The end of a worker: takes over its requests and their memory.

A worker may end anywhere in a request. The status page tells which of its requests had finished: they are
answered. It tells which had not begun: they are dispatched again. The broker decides about the others, which
were running: they run again before all others, or are lost (`broker.recovery`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from cudnn_actor.actors import Envelope
from cudnn_actor.actors.logs import Log
from cudnn_actor.broker import Broker
from cudnn_actor.isolation.process.parent.answers import AnswerTaker
from cudnn_actor.isolation.process.parent.in_flight import Claims, InFlightTable, Violation, WorkerRequest
from cudnn_actor.isolation.process.parent.sender import Sender
from cudnn_actor.isolation.process.parent.workers import Workers
from cudnn_actor.isolation.process.wire import Done
from cudnn_actor.isolation.staging import Block, Staging
from cudnn_actor.memory import Slot

__all__ = ["CrashRecovery", "PendingReclaim"]

log = Log("cudnn_actor")


class PendingReclaim:
    """Memory that a dying process may still write. It is held until the process has certainly ended."""

    def __init__(self) -> None:
        self.slots: list[Slot] = []
        self.blocks: list[Block] = []

    def __bool__(self) -> bool:
        return bool(self.slots or self.blocks)

    def add(self, request: WorkerRequest) -> None:
        """Add all that a lost request held."""
        self.slots.extend(request.slots)
        self.blocks.extend(request.held_blocks)


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class CrashRecovery:
    """Takes over the requests of workers that have ended. Used with the host held.

    Parameters
    ----------
    broker, in_flight, workers, staging, sender, answers
        The host's own.
    """

    broker: Broker[WorkerRequest]
    in_flight: InFlightTable
    workers: Workers
    staging: Staging
    sender: Sender
    answers: AnswerTaker

    def take_over_requests(self, cause: str, *, may_still_write: bool) -> PendingReclaim:
        """Answer every request that the worker had, or have it dispatched again, before all others.

        Returns the memory of lost requests, to which the process may still write. Pass it to `reclaim` once
        the process has certainly ended.

        Parameters
        ----------
        cause
            What happened, as text for people.
        may_still_write
            Whether the process could not be ended.
        """
        self.sender.copies.make_all()  # their blocks may soon be another request's
        begun, others = self._take_back()
        again, lost = self.broker.handle_crash(begun, cause, may_still_write=may_still_write)
        pending = PendingReclaim()
        for request in lost:
            pending.add(request)
        self.in_flight.first([*again, *others])
        # Drains, too: an allocation that waits for an arena must be answered before a drain sent after it.
        self._restore(self.broker.take_waiting())
        return pending

    def reclaim(self, pending: PendingReclaim) -> None:
        """Release the memory of a process that has certainly ended."""
        self.broker.memory.release_all(pending.slots)
        for block in pending.blocks:
            self.staging.give_back(block)
        pending.slots.clear()
        pending.blocks.clear()

    def retire(self) -> None:
        """Give all unfinished requests back to the mailbox, because no worker may follow.

        Call it after `take_over_requests`. If a request that had begun does not run again, its
        `ServiceStopped` says that it had begun.
        """
        left = self.in_flight.give_up()
        for request in left:
            self.sender.release(request)
        self._restore([*(request.envelope for request in left), *self.broker.take_waiting()])

    def _take_back(self) -> tuple[list[WorkerRequest], list[WorkerRequest]]:
        """Take back all requests in flight: those that the worker had begun, and the others."""
        worker = self.workers.serving
        unanswered = set() if worker is None else self._complete_finished(worker.claims)
        self.workers.detach()
        self.sender.forget_worker()
        begun: list[WorkerRequest] = []
        others: list[WorkerRequest] = []
        for request in self.in_flight.take_back():
            # A withdrawn request that the worker skipped is marked as begun, too. `gone` excludes it here.
            began = (
                worker is not None
                and not request.gone
                and worker.claims.has_begun(request.place, request.number)
            )
            request.envelope.hand_back(begun=began)
            # These cannot have killed the worker: they had finished, or are control messages. They run again.
            harmless = request.number in unanswered or request.message.control
            (begun if began and not harmless else others).append(request)
        return begun, others

    def _complete_finished(self, claims: Claims) -> set[int]:
        """Answer requests that the worker had finished and not answered, so that they do not run again.

        This is needed for two more reasons. A later request of the same worker may have overwritten their
        input, so that they could not run again. And they did not kill the worker. Returns the numbers of
        finished requests whose answers are lost with the worker (a `Warm`'s, for example): these run again.
        """
        unanswered = set()
        for request in tuple(self.in_flight.requests.values()):
            found = claims.finished_record(request.place, request.number)
            if found is None or request.gone:
                continue
            if not found.started_ns:
                unanswered.add(request.number)
                continue
            try:
                self.answers.complete(Done(request.number, request.place, *found))
            except Violation as violation:  # the page is wrong: the request counts as running
                log.warning("worker.broke_the_protocol", why=str(violation))
        return unanswered

    def _restore(self, envelopes: Sequence[Envelope]) -> None:
        mailbox = self.broker.state.mailbox
        mailbox.restore(sorted(envelopes, key=lambda envelope: envelope.number))
