"""The program of each task: random, but determined by the seed alone.

A program does not depend on outcomes: with one seed it is the same in every run, whatever faults come. `load`
handles a step whose buffer has been torn, or whose plan has been quarantined.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Iterator
from typing import NamedTuple

from cudnn_actor.cli.chaos.convolutions import HEAVY, VALUES, Kind

__all__ = ["PLACES", "Action", "Step", "program"]

PLACES = 2
"""Buffers that a task has of each kind."""
_LONGEST_BURST = 8
_CANCELLED, _HURRIED = 0.04, 0.04
_SHORT_S = (0.0, 0.0, 0.0005, 0.002, 0.01)
"""After how many seconds a caller gives up."""
_FILLS = (-2.0, 0.0, 1.0, 5.0)
_HEAVY = 0.1
"""The fraction of bursts with large arrays, if there are any."""


class Action(enum.StrEnum):
    """What a step does. All but `RENEW` are one request."""

    CONVOLVE = "convolve"
    ACCUMULATE = "accumulate"
    UPLOAD = "upload"
    FILL = "fill"
    COPY = "copy"
    DOWNLOAD = "download"
    INSPECT = "inspect"
    """Download one of the shared inputs."""
    RENEW = "renew"
    """Read the buffer back, free it and allocate another."""


_WEIGHTS = {
    Action.CONVOLVE: 30,
    Action.ACCUMULATE: 30,
    Action.UPLOAD: 8,
    Action.FILL: 6,
    Action.COPY: 8,
    Action.DOWNLOAD: 14,
    Action.INSPECT: 2,
    Action.RENEW: 2,
}
_HEAVY_WEIGHTS = {Action.CONVOLVE: 5, Action.ACCUMULATE: 5, Action.UPLOAD: 60, Action.DOWNLOAD: 30}


class Step(NamedTuple):
    """One step.

    Parameters
    ----------
    action
        What is done.
    kind, problem
        The convolution. For other requests they name the buffer: the one that such a convolution writes.
    first, second
        Which inputs.
    own_input
        Whether x is the task's own buffer, which is sometimes overwritten, and not a shared one. For an
        upload, a fill, a copy and a download: whether x is the buffer that they use.
    place
        Which of the task's buffers of this kind.
    value
        The value of a fill.
    filled
        Whether a buffer that must be allocated first is uploaded with contents.
    timeout_s, cancel_after_s
        When the caller gives up; None for never.
    """

    action: Action
    kind: Kind
    problem: int
    first: int
    second: int
    own_input: bool
    place: int
    value: float
    filled: bool
    timeout_s: float | None
    cancel_after_s: float | None


def program(
    seed: int, task: int, *, heavy: bool = True, impatient: bool = True
) -> Iterator[tuple[Step, ...]]:
    """An endless program: bursts of steps, each sent without waiting for the previous one.

    The steps of a burst have one problem, and mostly one kind: so they often use the same buffers.

    Parameters
    ----------
    seed, task
        They determine the program.
    heavy
        Whether some bursts use large arrays, mostly uploads.
    impatient
        Whether callers sometimes give up.
    """
    chance = random.Random(f"{seed} program {task}")
    kinds = tuple(Kind)
    while True:
        large = chance.random() < _HEAVY and heavy
        problem, kind = chance.randrange(HEAVY), chance.choice(kinds)
        length = 1 if chance.random() < 0.3 else chance.randint(2, _LONGEST_BURST)
        steps = [
            _step(
                chance,
                HEAVY if large else problem,
                kind if chance.random() < 0.8 else chance.choice(kinds),
                _HEAVY_WEIGHTS if large else _WEIGHTS,
            )
            for _ in range(length)
        ]
        yield (
            tuple(steps)
            if impatient
            else tuple(step._replace(timeout_s=None, cancel_after_s=None) for step in steps)
        )


def _step(chance: random.Random, problem: int, kind: Kind, weights: dict[Action, int]) -> Step:
    (action,) = chance.choices(tuple(weights), tuple(weights.values()))
    timeout_s = cancel_after_s = None
    mood = chance.random()
    if mood < _CANCELLED:
        cancel_after_s = chance.choice(_SHORT_S)
    elif mood < _CANCELLED + _HURRIED:
        timeout_s = chance.choice(_SHORT_S)
    return Step(
        action=action,
        kind=kind,
        problem=problem,
        first=chance.randrange(VALUES),
        second=chance.randrange(VALUES),
        own_input=chance.random() < 0.3,
        place=0 if chance.random() < 0.8 else 1,
        value=chance.choice(_FILLS),
        filled=chance.random() < 0.5,
        timeout_s=timeout_s,
        cancel_after_s=cancel_after_s,
    )
