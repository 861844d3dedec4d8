"""Carrying out the verdicts of `recovery` on the requests that a crash interrupted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from cudnn_actor.actors import Envelope
from cudnn_actor.actors.logs import Log
from cudnn_actor.broker.footprints import footprint, overwritten
from cudnn_actor.broker.recovery import Verdict, judge
from cudnn_actor.broker.state import ServiceState
from cudnn_actor.protocol.buffers import BufferRef
from cudnn_actor.protocol.errors import (
    ContextLost,
    CudnnActorError,
    OutcomeUnknown,
    QuarantinedRequest,
    StaleReason,
)
from cudnn_actor.protocol.messages import COMPUTE

__all__ = ["Interruption"]

log = Log("cudnn_actor")


class Interruption:
    """One crash, and what it means for the requests that were running.

    Parameters
    ----------
    state
        The service's; the caller is its one writer at this moment.
    cause
        For people: what happened.
    outlives_context
        Whether memory outlives the context that died.
    may_still_write
        Whether what crashed may still be writing: a process or a thread that could not be ended.
    """

    def __init__(
        self, state: ServiceState, cause: str, *, outlives_context: bool, may_still_write: bool
    ) -> None:
        self._state = state
        self._cause = cause
        self._outlives_context = outlives_context
        self._may_still_write = may_still_write

    def judge_all(self, running: Sequence[Envelope]) -> Iterator[tuple[Envelope, CudnnActorError | None]]:
        """Each of the requests that were running, in order, and its answer; None when it is to run again."""
        footprints = [footprint(envelope.message, self._state.lowered) for envelope in running]
        for envelope, spoiled in zip(running, overwritten(footprints), strict=True):
            yield envelope, self._judge(envelope, spoiled=spoiled)

    def _judge(self, envelope: Envelope, *, spoiled: bool) -> CudnnActorError | None:
        envelope.crashes += 1
        output, pure, digest = self._effects(envelope.message)
        verdict = judge(
            pure=pure and not spoiled,
            crashes=envelope.crashes,
            outlives_context=self._outlives_context,
            may_still_write=self._may_still_write and output is not None,
        )
        log.warning("request.interrupted", request=envelope.number, verdict=verdict.value, cause=self._cause)
        if verdict is Verdict.RUN_AGAIN:
            self._state.replayed += 1
            return None
        if output is not None:
            self.tear(output)
        return self._error(verdict, envelope.number, digest, spoiled=spoiled)

    def tear(self, ref: BufferRef) -> None:
        """End a buffer whose bytes may be half-written."""
        try:
            slot = self._state.memory.resolve(ref)
        except CudnnActorError:
            return  # freed in the meantime: nobody can read it
        self._state.memory.tear(
            slot, StaleReason.TORN if self._outlives_context else StaleReason.CONTEXT_LOST
        )

    def context_lost(self) -> ContextLost:
        """The answer to whoever waits for a context that has died with its memory."""
        return ContextLost(status="context lost", detail=self._cause)

    def _error(self, verdict: Verdict, number: int, digest: str, *, spoiled: bool) -> CudnnActorError:
        if verdict is Verdict.QUARANTINE:
            self._state.quarantined[digest] = self._cause  # where it is no plan's, nothing asks for it
            return QuarantinedRequest(request_id=number, digest=digest, cause=self._cause)
        if verdict is Verdict.CONTEXT_LOST:
            return self.context_lost()
        why = "it may still be written" if self._may_still_write else "it accumulates"
        if spoiled and not self._may_still_write:
            why = "a later request may have overwritten its input"
        return OutcomeUnknown(request_id=number, cause=self._cause, why=why)

    def _effects(self, message: Any) -> tuple[BufferRef | None, bool, str]:
        """The buffer that a message writes, whether it is pure, and the digest that stands for it."""
        kind = type(message)
        if kind in COMPUTE:
            lowered = self._state.lowered(message)
            return getattr(message, lowered.output), lowered.pure, lowered.graph.digest()
        return getattr(message, "dst", None), True, kind.__name__.lower()
