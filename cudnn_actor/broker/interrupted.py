"""Carries out the verdicts on the requests that were running at a crash. `recovery` decides them.

A request that does not run again is answered, and the buffers that it writes are torn. One that runs again is
checked once more before its second run, since the crash may have torn its input.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from cudnn_actor.actors import Envelope
from cudnn_actor.actors.logs import Log
from cudnn_actor.broker.deployments import Deployed, ModelRun, not_deployed
from cudnn_actor.broker.footprints import are_inputs_overwritten
from cudnn_actor.broker.recovery import Interrupted, Outcome, Verdict, graph_is_cause, verdict_on
from cudnn_actor.broker.service_state import ServiceState, quarantine_error
from cudnn_actor.broker.work import Work
from cudnn_actor.protocol.errors import (
    ContextLost,
    CudnnActorError,
    ExecutionFailed,
    OutcomeUnknown,
    QuarantinedRequest,
    StaleBufferError,
    StaleReason,
)
from cudnn_actor.protocol.messages.lowering import Lowered
from cudnn_actor.protocol.messages.messages import COMPUTE, WriteWeights
from cudnn_actor.protocol.messages.operands import operands

__all__ = ["InterruptedRequests"]

W = TypeVar("W", bound=Work)

log = Log("cudnn_actor")


class Answering(Protocol):
    """The part of a broker that is used here."""

    def fail(self, envelope: Envelope, error: BaseException) -> None:
        """Answer with an error."""

    def end_unreceived(self, work: Work) -> None:
        """Free the buffer that a request was to fill, because no caller receives it now."""

    def forget_ended(self, graphs: Sequence[Deployed]) -> None:
        """Let the host drop its data on models' graphs that have ended."""


class InterruptedRequests(Generic[W]):
    """Answers the requests that were running at a crash, or has them run again.

    Parameters
    ----------
    state
        The service's state: its memory table, its models and its quarantine.
    broker
        Answers requests.
    """

    def __init__(self, state: ServiceState, broker: Answering) -> None:
        self._state = state
        self._memory = state.memory
        self._broker = broker

    def settle(
        self, begun: Sequence[W], cause: str, *, may_still_write: bool, memory_survives: bool
    ) -> tuple[list[W], list[W]]:
        """See `Broker.handle_crash`."""
        if may_still_write:
            for work in begun:
                if work.run is not None:
                    self._forget_graph(work.run)
        self._count_for_graphs(begun, cause)
        overwritten = are_inputs_overwritten([work.footprint(self._state.lower) for work in begun])
        again, lost = [], []
        for work, is_overwritten in zip(begun, overwritten, strict=True):
            verdict = verdict_on(
                self._count_crash(work, is_input_overwritten=is_overwritten),
                memory_survives=memory_survives,
                may_still_write=may_still_write,
            )
            log.warning(
                "request.interrupted", request=work.number, verdict=verdict.outcome.value, cause=cause
            )
            if verdict.outcome is Outcome.RUN_AGAIN:
                self._note_second_run(work, cause)
                again.append(work)
            else:
                self._lose(work, self._error(work, verdict, cause))
                lost.append(work)
        return again, lost

    def why_not_again(self, work: W) -> CudnnActorError | None:
        """Why a request cannot run again: its input is torn, or its plan is quarantined. None if it can."""
        if work.injects:  # its message has not been checked yet
            return None
        for name, ref in operands(work.message).items():
            try:
                self._memory.resolve(ref, name)
            except StaleBufferError as error:
                # A later message has freed it. The bytes are held for this request, so it still runs on them.
                if error.reason is not StaleReason.FREED or not self._memory.is_withheld(ref):
                    return error
        if (run := work.run) is not None:
            assert run.deployed is not None
            if run.has_lost_places:
                specs = run.deployed.of.specs.items()
                return not_deployed(
                    work.message.model, ((name, spec.dims, spec.dtype) for name, spec in specs)
                )
            try:
                self._state.models.check_whole(run.deployed)
            except StaleBufferError as error:  # a write of its weights, sent before it, has torn them
                return error
        cached = work.cached if work.run is None else work.run.cached
        return None if cached is None else self._state.why_quarantined(cached.lowered.graph, work.number)

    def error_of_second_run(self, work: W, error: CudnnActorError) -> CudnnActorError:
        """The error for a request whose first run was interrupted and whose second run failed.

        The first run may have left its output half-written, so the caller must learn that the output holds
        no result. `ExecutionFailed` and `QuarantinedRequest` say so themselves; any other error is replaced.
        Weights are torn in any case: a run that did not know of the error would read some old, some new.
        """
        writes = not work.injects and work.footprint(self._state.lower).writes
        if not writes:
            return error
        if isinstance(error, ExecutionFailed) and type(work.message) is not WriteWeights:
            return error
        self._tear_output(work)
        if isinstance(error, ExecutionFailed | QuarantinedRequest):
            return error
        why = f"its second run was refused: {error}"
        return OutcomeUnknown(request_id=work.number, cause="a worker that has died", why=why)

    # Models' graphs.

    def _forget_graph(self, run: ModelRun) -> None:
        """Forget a model's graph whose places a worker may still write. Its runs are refused."""
        deployed = run.deployed
        assert deployed is not None
        deployed.has_lost_places = True
        if self._state.models.forget(deployed):
            self._broker.forget_ended([deployed])

    def _count_for_graphs(self, begun: Sequence[W], cause: str) -> None:
        """Count a crash for the models' graphs that were running, and quarantine those that have had too
        many."""
        for deployed in {work.run.deployed for work in begun if work.run is not None}:
            assert deployed is not None
            deployed.crashes += 1
            if graph_is_cause(crashes=deployed.crashes, finished=deployed.finished):
                self._state.quarantined[deployed.cached.lowered.graph.digest()] = cause

    # One request.

    def _lower(self, work: W) -> Lowered | None:
        """The graph that a request runs; None if it runs none."""
        if work.run is not None:
            return work.run.cached.lowered
        return self._state.lower(work.message) if type(work.message) in COMPUTE else None

    def _count_crash(self, work: W, *, is_input_overwritten: bool) -> Interrupted:
        """Count the crash for a request. Returns the facts on which the verdict depends."""
        envelope, message, lowered = work.envelope, work.message, self._lower(work)
        envelope.crashes += 1
        is_run = work.run is not None
        return Interrupted(
            crashes=envelope.crashes + (message.crashes if is_run else 0),
            pure=lowered is None or lowered.graph.pure,
            again=not is_run or message.again,
            writes=lowered is not None or hasattr(message, "dst") or type(message) is WriteWeights,
            has_staging=work.has_staging,
            is_input_overwritten=is_input_overwritten,
        )

    def _note_second_run(self, work: W, cause: str) -> None:
        """Note that a request runs again. From then on it is a suspect, which runs alone."""
        work.suspect = work.alone = True
        self._state.replayed += 1
        if (observer := self._state.counters.observer) is not None:
            observer.replayed(work.envelope, cause)

    def _error(self, work: W, verdict: Verdict, cause: str) -> CudnnActorError:
        """The error that a request that does not run again gets."""
        if verdict.outcome is Outcome.CONTEXT_LOST:
            return ContextLost(status="context lost", detail=cause)
        if verdict.outcome is Outcome.QUARANTINE:
            return self._quarantine(work, cause)
        torn = not work.injects and bool(work.footprint(self._state.lower).writes)
        return OutcomeUnknown(request_id=work.number, cause=cause, why=verdict.why, torn=torn)

    def _quarantine(self, work: W, cause: str) -> QuarantinedRequest:
        """The error of a request that was running at two crashes. Quarantines the graph of a message, too."""
        lowered = self._lower(work)
        if lowered is None:
            kind = type(work.message).__name__
            return QuarantinedRequest(request_id=work.number, digest="", cause=cause, message=kind)
        if work.run is None:  # else `_count_for_graphs` has decided whether its graph is quarantined
            self._state.quarantined[lowered.graph.digest()] = cause
        return quarantine_error(lowered.graph, work.number, cause)

    def _lose(self, work: W, error: CudnnActorError) -> None:
        """Fail a request that does not run again. Its output is torn."""
        reason = StaleReason.CONTEXT_LOST if isinstance(error, ContextLost) else StaleReason.TORN
        self._tear_output(work, reason)
        self._broker.end_unreceived(work)
        self._broker.fail(work.envelope, error)

    def _tear_output(self, work: W, reason: StaleReason = StaleReason.TORN) -> None:
        """Mark the output of a request that does not run again as torn.

        If a later message has freed that buffer, the buffer is revived first: a request that was sent before
        the free, and has yet to read the buffer, must find it torn.
        """
        if work.injects:
            return
        written = set(work.footprint(self._state.lower).writes)
        for ref in operands(work.message).values():
            if ref.slot in written:
                self._memory.revive(ref)
                if self._memory.is_live(ref):
                    self._memory.tear(self._memory.resolve(ref), reason)
