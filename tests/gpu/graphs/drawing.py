"""Draws programs of 1 to 12 operations, and gradients of what some of them give."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from cudnn_actor.protocol import InvalidRequest, Layout, Numerics

from ..choices import Choices
from .moves import MOVES, gradient, image
from .programs import Call, Of, Program, operands_of
from .sketch import FLOATS, MOST_WITH_GRADIENTS, Sketch

__all__ = ["MOST_OPERATIONS", "draw"]

MOST_OPERATIONS = 12
"""Without gradients, and without those that a function of images begins with."""
_TRIES = 80
_DIFFERENTIATED, _GRADIENT_TRIES = 0.32, 8
"""Of so many programs gradients are tried, with so many choices of what by what: a quarter has some then."""
_WITH_IMAGES, _IMAGE_TRIES = 0.15, 4
_OFTEN = tuple(move for move, share in MOVES for _ in range(share))


def draw(seed: int, number: int) -> Program:
    """Program `number` of a seed: the same in every process, whatever was drawn before it."""
    choose = Choices(np.random.default_rng([seed, number]))
    sketch = Sketch(choose)
    wanted = 1 + int(choose.rng.integers(MOST_OPERATIONS))
    sketch.input(sketch.some_dims(), choose.one(FLOATS))
    program: Program | None = None
    first = 0
    if choose.chance(_WITH_IMAGES) and any(sketch.attempt(image) for _ in range(_IMAGE_TRIES)):
        program = _whole(sketch)
        first = _operations(program)
    for _ in range(_TRIES):
        before = sketch.statements[:], sketch.values[:], set(sketch.inputs)
        if not sketch.attempt(choose.one(_OFTEN)):
            continue
        grown = _whole(sketch)
        if _operations(grown) > first + MOST_OPERATIONS:
            sketch.statements, sketch.values, sketch.inputs = before
            continue
        program = grown
        if _operations(grown) >= first + wanted:
            break
    assert program is not None, "no move has made sense"
    if choose.chance(_DIFFERENTIATED) and any(sketch.attempt(gradient) for _ in range(_GRADIENT_TRIES)):
        program = _whole(sketch)
    return _with_extras(sketch, program)


def _whole(sketch: Sketch) -> Program:
    """The program so far. Its outputs are the results that nothing reads."""
    read = {n for call in sketch.statements if isinstance(call, Call) for n in operands_of(call)}
    leaves = [n for n in range(len(sketch.values)) if n not in read and n not in sketch.inputs]
    return Program(tuple(sketch.statements), tuple((f"y{n}", Of(n)) for n in leaves))


def _operations(program: Program) -> int:
    return len(program.build().graph.body.operations)


def _with_extras(sketch: Sketch, program: Program) -> Program:
    """The program with more outputs, updates, strides, as far as that makes sense."""
    choose = sketch.choose
    shares = [0.03 if number in sketch.inputs else 0.15 for number in range(len(sketch.values))]
    known = {of.number for _, of in program.outputs}
    more = [(f"y{n}", Of(n)) for n, share in enumerate(shares) if choose.chance(share) and n not in known]
    outputs = (*program.outputs, *more)
    changes: list[dict[str, Any]] = [{"outputs": outputs}]
    if choose.chance(0.1):
        changes.append({"outputs": (*outputs, ("again", choose.one(outputs)[1]))})
    if choose.chance(0.25):
        changes.append({"updates": tuple(_updates(sketch))})
    if choose.chance(0.1):
        changes.append({"numerics": Numerics(deterministic=True)})
    for change in changes:
        program = _changed(program, **change)
    if choose.chance(0.3):
        ports = [port for port in program.build().graph.ports if choose.chance(0.5)]
        specs = ((p.name, choose.spec(p.spec.dims, p.spec.dtype, Layout.STRIDED)) for p in ports)
        program = _changed(program, strided=tuple(specs))
    return program


def _changed(program: Program, **change: Any) -> Program:
    """The program with a change, if it makes sense."""
    changed = dataclasses.replace(program, **change)
    differentiated = any(isinstance(each, Call) and each.function == "grad" for each in program.statements)
    most = MOST_WITH_GRADIENTS if differentiated else MOST_OPERATIONS
    try:
        return changed if _operations(changed) <= most else program
    except InvalidRequest:
        return program


def _updates(sketch: Sketch) -> Iterator[tuple[str, Of]]:
    """Some inputs, and a result of the same dims for each."""
    for number in sorted(sketch.inputs):
        dims = sketch.dims(Of(number))
        fitting = [n for n, v in enumerate(sketch.values) if v.shape == dims and n not in sketch.inputs]
        if fitting and sketch.choose.chance(0.5):
            yield f"x{number}", Of(sketch.choose.one(fitting))
