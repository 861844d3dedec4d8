"""The program of each task: random, but determined by the seed alone.

A program does not depend on outcomes: with one seed it is the same in every run, whatever faults come. `load`
handles a step whose buffer has been torn, or whose plan has been quarantined.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from cudnn_actor.trials.chaos.answers import VALUES
from cudnn_actor.trials.chaos.computations import HEAVY
from cudnn_actor.trials.chaos.graphs import LIGHT, LOAD
from cudnn_actor.trials.chaos.load_kinds import LoadKind
from cudnn_actor.trials.chaos.settings import Settings

__all__ = ["PLACES", "Action", "Step", "bursts", "problems_of", "program"]

PLACES = 2
"""Buffers that a task has of each kind."""
_LONGEST_BURST = 8
_MOST_OUTPUTS = 12
"""More than the outputs of any operation; `Step.output` is below this."""
_BARE = 0.2
_CANCELLED, _HURRIED = 0.04, 0.04
_SHORT_S = (0.0, 0.0, 0.0005, 0.002, 0.01)
"""After how many seconds a caller gives up."""
_FILLS = (-2.0, 0.0, 1.0, 5.0)
_HEAVY = 0.1
"""The fraction of bursts with large arrays, if there are any."""


class Action(enum.StrEnum):
    """The action of a step. Each action but `APPLY` and `RENEW` is a single request."""

    COMPUTE = "compute"
    ACCUMULATE = "accumulate"
    """Add to the result; where no message does that, the same as `COMPUTE`."""
    APPLY = "apply"
    """Compute into buffers that the service allocates, and that replace the task's own."""
    UPLOAD = "upload"
    FILL = "fill"
    COPY = "copy"
    DOWNLOAD = "download"
    INSPECT = "inspect"
    """Download one of the shared inputs."""
    RENEW = "renew"
    """Read the buffer back, free it and allocate another."""


_WEIGHTS = {
    Action.COMPUTE: 30,
    Action.ACCUMULATE: 30,
    Action.APPLY: 3,
    Action.UPLOAD: 8,
    Action.FILL: 6,
    Action.COPY: 8,
    Action.DOWNLOAD: 14,
    Action.INSPECT: 2,
    Action.RENEW: 2,
}
_HEAVY_WEIGHTS = {Action.COMPUTE: 5, Action.ACCUMULATE: 5, Action.UPLOAD: 60, Action.DOWNLOAD: 30}


class Step(NamedTuple):
    """One step.

    Parameters
    ----------
    action
        What is done.
    problem, operation
        What is computed: a problem, and which of its operations. Other requests use a buffer that this
        operation writes.
    output
        Which of the operation's outputs that is, modulo their number.
    bare
        Whether optional operands are left out.
    first, second
        Which value of the first input, and of all others.
    own_input
        Whether the operation reads the task's own buffers, which are sometimes overwritten, and not the
        shared ones, for the problem's source and for the results of other operations. For an upload, a fill,
        a copy and a download: whether it uses the task's buffer of the source.
    place
        Which of the task's buffers of this role.
    value
        The value of a fill.
    filled
        Whether a buffer that must be allocated first is uploaded with contents.
    timeout_s, cancel_after_s
        When the caller gives up; None for never.
    """

    action: Action
    problem: int
    operation: int
    output: int
    bare: bool
    first: int
    second: int
    own_input: bool
    place: int
    value: float
    filled: bool
    timeout_s: float | None
    cancel_after_s: float | None


def program(
    seed: int, task: int, problems: Sequence[int], *, impatient: bool = True
) -> Iterator[tuple[Step, ...]]:
    """An endless program of bursts. The steps of a burst are sent without waiting for each other's answers.

    They belong to one problem, and mostly to one operation, so they often use the same buffers.

    Parameters
    ----------
    seed, task
        They determine the program.
    problems
        The problems, by number. With the large one, some bursts use large arrays, mostly uploads.
    impatient
        Whether callers sometimes give up.
    """
    chance = random.Random(f"{seed} program {task}")
    light, heavy = [number for number in problems if number != HEAVY], HEAVY in problems
    while True:
        large = chance.random() < _HEAVY and heavy
        problem = HEAVY if large else chance.choice(light)
        operations = range(len(LOAD[problem].operations))
        operation = chance.choice(operations)
        length = 1 if chance.random() < 0.3 else chance.randint(2, _LONGEST_BURST)
        steps = [
            _step(
                chance,
                problem,
                operation if chance.random() < 0.8 else chance.choice(operations),
                _HEAVY_WEIGHTS if large else _WEIGHTS,
            )
            for _ in range(length)
        ]
        yield (
            tuple(steps)
            if impatient
            else tuple(step._replace(timeout_s=None, cancel_after_s=None) for step in steps)
        )


def _step(chance: random.Random, problem: int, operation: int, weights: dict[Action, int]) -> Step:
    (action,) = chance.choices(tuple(weights), tuple(weights.values()))
    timeout_s = cancel_after_s = None
    mood = chance.random()
    if mood < _CANCELLED:
        cancel_after_s = chance.choice(_SHORT_S)
    elif mood < _CANCELLED + _HURRIED:
        timeout_s = chance.choice(_SHORT_S)
    return Step(
        action=action,
        problem=problem,
        operation=operation,
        output=chance.randrange(_MOST_OUTPUTS),
        bare=chance.random() < _BARE,
        first=chance.randrange(VALUES),
        second=chance.randrange(VALUES),
        own_input=chance.random() < 0.3,
        place=0 if chance.random() < 0.8 else 1,
        value=chance.choice(_FILLS),
        filled=chance.random() < 0.5,
        timeout_s=timeout_s,
        cancel_after_s=cancel_after_s,
    )


def bursts(settings: Settings, number: int) -> Iterator[tuple[Step, ...]]:
    """The program of a task."""
    impatient = LoadKind.CANCELS in settings.load
    return program(settings.seed, number, problems_of(settings), impatient=impatient)


def problems_of(settings: Settings) -> Sequence[int]:
    """The numbers of the problems that are run, in order: the engine's, or as many as the settings say.

    The large one is among them if anything is uploaded.
    """
    possible = _possible(settings)
    numbers = [number for number in LIGHT if number in possible]
    if 0 < settings.problems < len(numbers):
        chance = random.Random(f"{settings.seed} problems")
        numbers = sorted(chance.sample(numbers, settings.problems))
    large = [HEAVY] if LoadKind.UPLOADS in settings.load and HEAVY in possible else []
    return sorted([*numbers, *large])


def _possible(settings: Settings) -> Sequence[int]:
    """The numbers of the problems that the engine runs."""
    if settings.engine == "cpu":
        return range(len(LOAD))
    from cudnn_actor.engines.cuda.operations import PARTLY, REFUSED  # noqa: PLC0415 - of this engine alone

    without = REFUSED.keys() | PARTLY.keys()
    return [n for n in range(len(LOAD)) if without.isdisjoint(map(type, LOAD[n].operations))]
