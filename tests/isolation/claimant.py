"""A worker for the tests of the status page.

    python -m tests.isolation.claimant PAGE_FD TURNS_FD WINDOW ROUNDS

It begins requests 1 to ROUNDS, or fewer if the parent says so, each in the place that its number says, and
writes down for each whether it ran it. The parent sets the moment of each round, on the clock that both have,
so that the two claims come as close to each other as two processes can bring them.
"""

from __future__ import annotations

import mmap
import os
import sys
import time

from cudnn_actor.isolation.process.status import StatusPage

from ..patience import PATIENCE_S

RAN, LEFT = 1, 2
ROUND, MOMENT, DONE, LAST, WORDS = range(5)
LEAD_NS = 10_000
"""From setting a moment until it comes: the other side looks out for it every microsecond."""


class Turns:
    """What both sides share beside the page: whose turn it is, and a byte for what came of each request."""

    def __init__(self, fd: int, rounds: int) -> None:
        self._map = mmap.mmap(fd, turns_bytes(rounds))
        self._all = memoryview(self._map)
        self._words = self._all[: 8 * WORDS].cast("Q")
        self.ran = self._all[8 * WORDS :]
        self._rounds = rounds

    def open_round(self, number: int) -> None:
        """Set the moment of a round. The parent's."""
        self._words[MOMENT] = time.monotonic_ns() + LEAD_NS
        self._words[ROUND] = number

    def await_moment(self, number: int) -> None:
        """Wait for the moment of a round."""
        self._wait_for(ROUND, number)
        moment = self._words[MOMENT]
        while time.monotonic_ns() < moment:
            pass

    def end_with(self, number: int) -> None:
        """Have this round be the last, before it is opened. The parent's."""
        self._words[LAST] = number

    def is_last(self, number: int) -> bool:
        """Whether no round comes behind this one, which has been opened."""
        return number in (self._words[LAST], self._rounds)

    def done(self, number: int) -> None:
        """Note the end of a round. The worker's."""
        self._words[DONE] = number

    def await_done(self, number: int) -> None:
        """Wait for that. Raises `TimeoutError`."""
        self._wait_for(DONE, number)

    def close(self) -> None:
        for view in (self._words, self.ran, self._all):
            view.release()
        self._map.close()

    def _wait_for(self, word: int, number: int) -> None:
        until = time.monotonic() + PATIENCE_S
        while self._words[word] < number:
            os.sched_yield()
            if time.monotonic() > until:
                raise TimeoutError(f"the other side did not come to {number}: has it died?")


def turns_bytes(rounds: int) -> int:
    return 8 * WORDS + rounds + 1


def main(page_fd: int, turns_fd: int, window: int, rounds: int) -> None:
    page, turns = StatusPage.attach(page_fd, window), Turns(turns_fd, rounds)
    for number in range(1, rounds + 1):
        turns.await_moment(number)
        turns.ran[number] = RAN if page.begin(number % window, number) else LEFT
        last = turns.is_last(number)
        turns.done(number)
        if last:
            break


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
