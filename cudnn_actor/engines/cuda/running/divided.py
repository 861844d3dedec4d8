"""Divides a plan for a deployed model: what is computed from weights alone is computed once for all runs.

A step runs once if it reads only weights, or results of other such steps, and if it writes only scratch
memory. Such a step brings a filter into another form, copies the weights of recurrent layers into one space,
or converts or adds up biases. Those of its results that the steps of each run read lie in memory of their
own, which is one more buffer of both recipes: that of the steps that run once, and that of the steps of each
run.

The same scratch memory has different tensors, one after the other. A step's result can be moved only if the
steps that may read it are known, and no other result is written there meanwhile. Memory behind `Part.own` is
used by the step's own part alone. Other memory is used by the parts from the first to the last that use the
tensor (`Between`). The bytes of a `Scratch` may be more than those that are read or written there, and a
source that a step does not only read counts as written (`reads`). Where either is too much, less is kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec

from cudnn_actor.engines.cuda.kernels.expressions import takes_scalars
from cudnn_actor.engines.cuda.running.overlaps import Overlaps
from cudnn_actor.engines.cuda.running.recipe import (
    Buffer,
    GraphStep,
    KernelStep,
    OperationStep,
    Part,
    Recipe,
    Scratch,
    Source,
    Step,
)

__all__ = ["Divided", "Kept", "divide"]


class Kept(NamedTuple):
    """A tensor that steps which run once compute, and steps of each run read.

    Parameters
    ----------
    value
        A key that is equal for two plans only if they compute the same numbers from the same weights. It
        names weights by their places in `reads`.
    reads
        The places of the buffers that it is computed from.
    nbytes
        Bytes of memory for it.
    """

    value: Hashable
    reads: tuple[int, ...]
    nbytes: int


class Divided(NamedTuple):
    """A recipe in two.

    Parameters
    ----------
    kept
        The values that are kept between runs. Both recipes have a buffer for each of them, in this order,
        behind the buffers of the undivided recipe.
    once
        The steps to run before the first run, and again after a write to a buffer that they read.
    each
        The steps of each run.
    numbers
        The numbers of the steps which run once, in the undivided recipe.
    """

    kept: tuple[Kept, ...]
    once: Recipe
    each: Recipe
    numbers: frozenset[int]


def divide(recipe: Recipe, constant: Collection[int]) -> Divided | None:
    """A recipe in two, for runs in which the buffers at these places keep their values.

    None if no step computes from such buffers alone.
    """
    found = _Constants(recipe, frozenset(constant))
    kept = [value for value in found.values if value.is_read_each_time]
    if not kept:
        return None
    moved = {value: recipe.buffers + number for number, value in enumerate(kept)}
    once, each = list[tuple[Part, list[Step]]](), list[tuple[Part, list[Step]]]()
    numbers = itertools.count()
    for part, steps in _by_part(recipe):
        once.append((part, []))
        each.append((part, []))
        for step in steps:
            number = next(numbers)
            half = once if number in found.steps else each
            half[-1][1].append(_with_sources(step, found.in_place_of(number, moved)))
    whole = msgspec.structs.replace(recipe, buffers=recipe.buffers + len(kept))
    values = tuple(value.keep() for value in kept)
    return Divided(values, _with(whole, once), _with(whole, each), frozenset(found.steps))


class _Value:
    """A value that a step which runs once writes to one place.

    Parameters
    ----------
    writer
        The number of the step, and the number of the source that it writes.
    place
        The place to which it is written.
    parts
        The parts during which the place has the value.
    does
        A key of the step's computation: see `_computation`.
    reads
        The buffers and values that the step reads.
    """

    def __init__(
        self, writer: tuple[int, int], place: Scratch, parts: range, does: Hashable, reads: Sequence[_Read]
    ) -> None:
        self.writer, self.place, self.parts = writer, place, parts
        self._does, self._reads = does, reads
        self.is_read_each_time = False
        """Whether a step of each run reads it."""

    def keep(self) -> Kept:
        """The value as one to keep. It lists each value that it is computed from once."""
        buffers, listed = dict[int, int](), dict[_Value, int]()
        steps, waiting = list[Hashable](), [self]
        while waiting:
            value = waiting[-1]
            of = next((of for of, _ in value._reads if isinstance(of, _Value) and of not in listed), None)
            if of is not None:
                waiting.append(of)
                continue
            reads = tuple(
                (True, listed[of], offset)
                if isinstance(of, _Value)
                else (False, buffers.setdefault(of, len(buffers)), offset)
                for of, offset in value._reads
            )
            steps.append((value._does, value.writer[1], reads))
            listed[waiting.pop()] = len(listed)
        return Kept(tuple(steps), tuple(buffers), self.place.nbytes)


_Read = tuple[int | _Value, int]
"""A buffer's number, or a value, and the offset at which it is read, in bytes."""


class _At(NamedTuple):
    """A step and the number of its part."""

    step: Step
    part: int


class _Use(NamedTuple):
    """A step's use of a place in the scratch memory: the numbers of the step and of its source.

    `reads`: whether the step only reads there.
    """

    number: int
    by: int
    source: Scratch
    reads: bool


class _Constants:
    """Finds the steps of a recipe that run once, by their numbers, and the values that they write."""

    def __init__(self, recipe: Recipe, constant: frozenset[int]) -> None:
        self._recipe, self._constant = recipe, constant
        self._steps = [_At(step, part) for part, (_, steps) in enumerate(_by_part(recipe)) for step in steps]
        self._ends = [0, *itertools.accumulate(part.steps for part in recipe.parts)]
        self._between = Overlaps((Scratch(each.offset, each.nbytes), each) for each in recipe.between)
        uses = [_uses(number, each.step) for number, each in enumerate(self._steps)]
        self._uses = Overlaps((use.source, use) for of_step in uses for use in of_step)
        self._uses_in = [
            Overlaps((use.source, use) for of_step in uses[first:stop] for use in of_step)
            for first, stop in itertools.pairwise(self._ends)
        ]
        """The uses in all parts, and those in each part."""
        self.values: list[_Value] = []
        self.steps: set[int] = set()
        self._shared = Overlaps[_Value]()
        self._own = [Overlaps[_Value]() for _ in recipe.parts]
        """The values so far of steps that run once: those that several parts use, and those of each part."""
        for number in range(len(self._steps)):
            self._add(number)

    def _add(self, number: int) -> None:
        """Add a step. The steps before it have been added."""
        step, part = self._steps[number]
        made = self._values_of(number)
        runs_once = made is not None and all(map(self._can_move, made))
        for place in step.reads:
            value = self._value_at(step.sources[place], part)
            if value is not None and not runs_once:
                value.is_read_each_time = True
        if made is not None and runs_once:
            self.steps.add(number)
            self.values += made
            for value in made:
                known = self._own[part] if len(value.parts) == 1 else self._shared
                known.add(value.place, value)

    def _values_of(self, number: int) -> list[_Value] | None:
        """The values that a step writes, if it reads only weights and values made of weights; else None."""
        step, part = self._steps[number]
        if not _is_known(step):
            return None
        reads = list[_Read]()
        for each in step.reads:
            if (read := self._weight_in(step.sources[each], part)) is None:
                return None
            reads.append(read)
        if not reads:
            return None
        values = []
        for place, source in enumerate(step.sources):
            if place in step.reads:
                continue
            parts = self._parts(source, part) if isinstance(source, Scratch) else None
            if parts is None:
                return None
            assert isinstance(source, Scratch)
            values.append(_Value((number, place), source, parts, _computation(step), reads))
        return values

    def _weight_in(self, source: Source, part: int) -> _Read | None:
        """The identity of a source that is a weight or a value made of weights; None for other sources."""
        if isinstance(source, Buffer):
            return (source.number, source.offset) if source.number in self._constant else None
        value = self._value_at(source, part)
        if value is None:
            return None
        assert isinstance(source, Scratch)
        return value, source.offset - value.place.offset

    def _value_at(self, source: Source, part: int) -> _Value | None:
        """The value that a step of this part reads at a place; None if no step that runs once wrote it."""
        if not isinstance(source, Scratch):
            return None
        known = itertools.chain(self._own[part].of(source), self._shared.of(source))
        return next((each for each in known if part in each.parts and _is_within(source, each.place)), None)

    def _parts(self, place: Scratch, part: int) -> range | None:
        """The parts that may use a result that a step of this part writes to a place; None if not known."""
        if place.offset >= self._recipe.parts[part].own:
            return range(part, part + 1)
        for each in self._between.of(place):
            whole = Scratch(each.offset, each.nbytes)
            if each.first <= part <= each.last and _is_within(place, whole):
                return range(each.first, each.last + 1)
        return None

    def _can_move(self, value: _Value) -> bool:
        """Whether a value can lie elsewhere.

        It can if no step reads it. Else no other step may write to its place during its parts, and each step
        that reads there must come later, and read only bytes of the value.
        """
        is_read, stays = False, False
        first, stop = self._ends[value.parts.start], self._ends[value.parts.stop]
        uses = self._uses_in[value.parts.start] if len(value.parts) == 1 else self._uses
        for use in uses.of(value.place):
            if not first <= use.number < stop:
                continue
            if use.reads:
                is_read = True
                stays |= use.number <= value.writer[0] or not _is_within(use.source, value.place)
            else:
                stays |= (use.number, use.by) != value.writer
            if is_read and stays:
                return False
        return True

    def in_place_of(self, number: int, moved: Mapping[_Value, int]) -> dict[int, Buffer]:
        """The sources of a step that lie in buffers of their own, by their places.

        `moved`: the numbers of these buffers.
        """
        step, part = self._steps[number]
        found = {}
        for place, source in enumerate(step.sources):
            value = self._value_at(source, part)
            if value is not None and value in moved:
                assert isinstance(source, Scratch)
                found[place] = Buffer(moved[value], source.offset - value.place.offset)
        return found


def _is_known(step: Step) -> bool:
    """Whether a step's computation is known, and depends on its operands alone, not on the plan's scalars."""
    if isinstance(step, GraphStep):
        return bool(step.digest)
    return not (isinstance(step, KernelStep) and takes_scalars(step.kernel))


def _computation(step: Step) -> Hashable:
    """The computation of a step, without the places of its operands."""
    match step:
        case GraphStep():
            return step.digest, step.engine, step.uids
        case OperationStep():
            forms = tuple((each.dims, each.strides, each.dtype) for each in step.tensors)
            return step.operation, forms, step.launcher
        case KernelStep():
            return step.kernel
        case _:
            return msgspec.structs.replace(step, sources=())


def _uses(number: int, step: Step) -> list[_Use]:
    """The uses of a step, by its number."""
    reads = frozenset(step.reads)
    return [
        _Use(number, place, source, place in reads)
        for place, source in enumerate(step.sources)
        if isinstance(source, Scratch)
    ]


def _is_within(one: Scratch, other: Scratch) -> bool:
    """Whether all bytes of one place are bytes of another, and there are some."""
    end = one.offset + one.nbytes
    return other.offset <= one.offset < end <= other.offset + other.nbytes


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


def _with_sources(step: Step, moved: Mapping[int, Source]) -> Step:
    """A step with other sources, by their places."""
    changed: Step = msgspec.structs.replace(
        step, sources=tuple(moved.get(place, source) for place, source in enumerate(step.sources))
    )
    return changed
