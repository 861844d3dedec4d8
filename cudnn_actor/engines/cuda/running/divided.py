"""Divides a plan for a deployed model: steps that only rearrange weights run once for all runs.

Such a step writes to scratch memory that only later steps of its part read (`OperationStep.prepares`). If it
reads only buffers that keep their values, it writes to memory of its own in a divided plan. That memory is
one more buffer of both recipes: of the steps that run once, and of the steps of each run.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from cudnn_actor.engines.cuda.running.recipe import Buffer, OperationStep, Part, Recipe, Source, Step

__all__ = ["Divided", "Kept", "divided"]


class Kept(NamedTuple):
    """What a step that runs once writes.

    Parameters
    ----------
    step
        The step.
    reads
        The places of the buffers that it reads.
    nbytes
        Bytes that it writes.
    """

    step: OperationStep
    reads: tuple[int, ...]
    nbytes: int


class Divided(NamedTuple):
    """A recipe in two.

    Parameters
    ----------
    kept
        What is kept between runs. Both recipes have a buffer for each of these, in this order, behind the
        buffers of the undivided one.
    once
        The steps to run before the first run, and again after a write to what they read.
    each
        The steps of each run.
    """

    kept: tuple[Kept, ...]
    once: Recipe
    each: Recipe


def divided(recipe: Recipe, constant: Collection[int]) -> Divided | None:
    """A recipe in two, for runs in which the buffers at these places keep their values.

    None if no step prepares only such buffers.
    """
    kept, once, each = list[Kept](), list[tuple[Part, list[Step]]](), list[tuple[Part, list[Step]]]()
    for part, steps in _by_part(recipe):
        moved = dict[Source, Source]()
        once.append((part, []))
        each.append((part, []))
        for step in steps:
            found = _kept(step, constant)
            if found is not None:
                moved[found.step.sources[found.step.operation.writes[0]]] = Buffer(recipe.buffers + len(kept))
                kept.append(found)
            (each if found is None else once)[-1][1].append(_changed(step, moved))
    if not kept:
        return None
    whole = msgspec.structs.replace(recipe, buffers=recipe.buffers + len(kept))
    return Divided(tuple(kept), _with(whole, once), _with(whole, each))


def _with(recipe: Recipe, parts: Sequence[tuple[Part, Sequence[Step]]]) -> Recipe:
    """A recipe with other steps, those of each part."""
    found: Recipe = msgspec.structs.replace(
        recipe,
        steps=tuple(itertools.chain.from_iterable(steps for _, steps in parts)),
        parts=tuple(msgspec.structs.replace(part, steps=len(steps)) for part, steps in parts),
    )
    return found


def _by_part(recipe: Recipe) -> Iterator[tuple[Part, Sequence[Step]]]:
    """The parts of a recipe, each with its steps."""
    steps = iter(recipe.steps)
    for part in recipe.parts:
        yield part, tuple(itertools.islice(steps, part.steps))


def _kept(step: Step, constant: Collection[int]) -> Kept | None:
    """What is kept of a step that runs once; None for another step."""
    if not isinstance(step, OperationStep) or not step.prepares:
        return None
    reads = [step.sources[number] for number in step.operation.reads]
    places = dict.fromkeys(each.number for each in reads if isinstance(each, Buffer))
    if not all(isinstance(each, Buffer) for each in reads) or not places.keys() <= {*constant}:
        return None
    return Kept(step, tuple(places), step.tensors[step.operation.writes[0]].spec.nbytes)


def _changed(step: Step, moved: Mapping[Source, Source]) -> Step:
    """A step with other places for what is kept."""
    changed: Step = msgspec.structs.replace(
        step, sources=tuple(moved.get(source, source) for source in step.sources)
    )
    return changed
