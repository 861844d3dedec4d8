"""The warming of one standby: which of the recent plans it has built, is building, and could not build."""

from __future__ import annotations

from collections.abc import Mapping

from cudnn_actor.actors.logs import Log
from cudnn_actor.broker.message_cache import RecentPlan
from cudnn_actor.broker.warm_batches import cut, warm_of
from cudnn_actor.isolation.process.wire import LONGEST_MESSAGE, encode_message
from cudnn_actor.protocol.errors import ErrorRecord

__all__ = ["Warming"]

_AT_ONCE = 16
"""Plans that a standby is asked to build together."""
_TRIED_ALONE = 3
"""How often the standby tries to build a plan by itself, after it has failed together with others."""

log = Log("cudnn_actor")


class Warming:
    """Decides which plans a standby is asked to build. Used with the host held."""

    def __init__(self) -> None:
        self._building: tuple[str, ...] = ()
        """Digests of the plans that the standby is building now."""
        self._built: set[str] = set()
        """Digests of the recent plans that the standby has built."""
        self._failed: dict[str, int] = {}
        """Plans that it could not build → how often it has tried, with others first and then alone."""

    def next_request(self, recent: Mapping[str, RecentPlan]) -> bytes | None:
        """The next `Warm` for the standby, encoded; None while it builds, or if it lacks nothing.

        It asks for some of the plans: those that were used last go first.
        """
        while not self._building and (batch := self._next_batch(recent)):
            body = encode_message(warm_of([recent[digest].message for digest in batch]))
            if len(body) <= LONGEST_MESSAGE:
                self._building = batch
                return body
            # It asks for a single graph, which is as long as a frame.
            log.info("standby.not_warmed", graph=batch[0][:8], nbytes=len(body))
            self._failed[batch[0]] = _TRIED_ALONE + 1
        return None

    def note_answer(self, error: ErrorRecord | None) -> None:
        """Note how the standby has ended the request: with an error, or with all of the plans built."""
        asked, self._building = self._building, ()
        if error is None:
            self._built.update(asked)
            return
        for digest in asked:
            self._failed[digest] = self._failed.get(digest, 0) + 1
            if self._failed[digest] > _TRIED_ALONE:
                log.warning("standby.build_failed", graph=digest[:8], error=error.kind)

    def lacks_nothing(self, recent: Mapping[str, RecentPlan]) -> bool:
        """Whether the standby has built each of these plans, or cannot. The host need not be held."""
        failed = self._failed
        return not self._building and all(
            digest in self._built or failed.get(digest, 0) > _TRIED_ALONE for digest in tuple(recent)
        )

    def _next_batch(self, recent: Mapping[str, RecentPlan]) -> tuple[str, ...]:
        """The digests of the plans to build next.

        One that fails keeps the others of its message from being built. So plans of a message that has failed
        are tried again one by one, after all others.
        """
        self._built.intersection_update(recent)
        self._failed = {digest: tries for digest, tries in self._failed.items() if digest in recent}
        order = sorted(recent.keys() - self._built, key=lambda digest: -recent[digest].last)
        fresh = [digest for digest in order if digest not in self._failed][:_AT_ONCE]
        if fresh:
            return tuple(fresh[: len(next(cut([recent[digest].message for digest in fresh])))])
        again = [digest for digest in order if self._failed[digest] <= _TRIED_ALONE]
        return tuple(sorted(again, key=self._failed.__getitem__)[:1])
