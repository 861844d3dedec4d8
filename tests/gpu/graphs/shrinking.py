"""Makes a program smaller for as long as it fails."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from cudnn_actor.protocol import DType, InvalidRequest, Layout, Numerics, Operation

from .bounds import rounded, stored
from .programs import Call, Input, Of, Program, mapped, operands_of

__all__ = ["shrunk"]

Fails = Callable[[Program], bool]


def shrunk(program: Program, fails: Fails, *, most: int = 400) -> Program:
    """A small program that fails too; at most so many are tried.

    Steps try simpler programs: of fewer results, of fewer operations, with smaller dims, other dtypes,
    layouts and values. Each is taken as often as it leads to one that fails, and all of them again until none
    does.
    """
    left, before = most, None
    while program is not before:
        before = program
        for step in _STEPS:
            found: Program | None = program
            while found is not None:
                program, found = found, None
                for simpler in map(_pruned, step(program)):
                    if simpler == program or not _makes_sense(simpler):
                        continue
                    if not left:
                        return program
                    left -= 1
                    if fails(simpler):
                        found = simpler
                        break
    return program


def _makes_sense(program: Program) -> bool:
    try:
        program.build()
    except (InvalidRequest, IndexError):
        return False
    return True


def _pruned(program: Program) -> Program:
    """The program without what its results do not need."""
    needed = {of.number for _, of in (*program.outputs, *program.updates)}
    names = {name for name, _ in program.updates}
    kept: list[tuple[int, Input | Call]] = []
    for number, statement in reversed([*program.given()]):
        own = range(number, number + statement.count)
        if isinstance(statement, Input):
            keeps = bool(needed.intersection(own)) or statement.name in names
        else:
            keeps = bool(needed.intersection(own))
            needed.update(operands_of(statement) if keeps else ())
        if keeps:
            kept.insert(0, (number, statement))
    new: dict[int, int] = {}
    for number, statement in kept:
        for place in range(statement.count):
            new[number + place] = len(new)
    return _renumbered(program, [statement for _, statement in kept], new)


def _renumbered(program: Program, statements: list[Input | Call], new: dict[int, int]) -> Program:
    def moved(value: Any) -> Any:
        return mapped(value, lambda number: Of(new[number]))

    names = {statement.name for statement in statements if isinstance(statement, Input)}
    names.update(name for name, _ in program.outputs)
    return replace(
        program,
        statements=tuple(
            each
            if isinstance(each, Input)
            else replace(each, arguments=moved(each.arguments), keywords=moved(dict(each.keywords)))
            for each in statements
        ),
        outputs=moved(program.outputs),
        updates=moved(program.updates),
        strided=tuple((name, spec) for name, spec in program.strided if name in names),
    )


def _less_given(program: Program) -> Iterator[Program]:
    """One tensor, the first that is wrong; or a result less."""
    pairs = (*program.outputs, *program.updates)
    least = pairs[0][1].number if len(program.outputs) == len(pairs) == 1 else math.inf
    for number in _made(program):
        if number < least:
            yield replace(program, outputs=(("y", Of(number)),), updates=(), strided=())
    for left_out in pairs if len(pairs) > 1 else ():
        yield replace(
            program,
            outputs=tuple(pair for pair in program.outputs if pair is not left_out),
            updates=tuple(pair for pair in program.updates if pair is not left_out),
        )


def _less_differentiated(program: Program) -> Iterator[Program]:
    """With one gradient: of an earlier result by an operand of its call, of one by one, or of a sum."""
    call = program.statements[-1]
    if not (isinstance(call, Call) and call.function == "grad"):
        return
    outputs, wrt, *upstream = call.arguments
    several = (wrt,) if isinstance(wrt, Of) else wrt
    last = (outputs[-1].number, several[-1].number if len(several) == 1 else -1)
    simpler: list[tuple[Any, ...]] = [
        ((Of(made),), Of(read))
        for number, each in program.given()
        if isinstance(each, Call) and each is not call
        for made in range(number, number + each.count)
        for read in dict.fromkeys(operands_of(each))
        if made < last[0] or (made == last[0] and read > last[1])
    ]
    if len(outputs) > 1 or len(several) > 1:
        ways = itertools.product(range(len(outputs)), several)
        simpler += [(outputs[n : n + 1], by, *(given[n : n + 1] for given in upstream)) for n, by in ways]
    elif upstream:
        simpler.append((outputs, wrt))
    number = sum(each.count for each in program.statements[:-1])
    for arguments in simpler:
        statements = (*program.statements[:-1], replace(call, arguments=arguments, count=1))
        yield replace(program, statements=statements, outputs=(("y", Of(number)),), updates=(), strided=())
        if arguments[0][0].number < last[0]:  # whose gradient is not the same everywhere, as in the program
            of = _values(program)[arguments[0][0].number]
            given = Input("u", np.arange(1, of.size + 1, dtype=of.dtype).reshape(of.shape))
            weighed = replace(call, arguments=(*arguments, (Of(number),)), count=1)
            yield replace(
                program,
                statements=(*program.statements[:-1], given, weighed),
                outputs=(("y", Of(number + 1)),),
                updates=(),
                strided=(),
            )


def _cut_off(program: Program) -> Iterator[Program]:
    """With a call's results as inputs."""
    calls = [(number, each) for number, each in program.given() if isinstance(each, Call)]
    if len(calls) < 2:
        return
    values = _values(program)
    for number, call in reversed(calls):
        statements: list[Input | Call] = []
        for first, each in program.given():
            if first != number:
                statements.append(each)
                continue
            statements += [Input(f"c{n}", values[n]) for n in range(number, number + call.count)]
        yield replace(program, statements=tuple(statements))


def _made(program: Program) -> list[int]:
    """The tensors that are results of calls."""
    calls = [(number, each) for number, each in program.given() if isinstance(each, Call)]
    return [number for first, call in calls for number in range(first, first + call.count)]


def _values(program: Program) -> dict[int, np.ndarray]:
    """What each result of a call holds where it is stored."""
    made = [
        n
        for number, each in program.given()
        if isinstance(each, Call)
        for n in range(number, number + each.count)
    ]
    all_given = replace(program, outputs=tuple((f"r{n}", Of(n)) for n in made), updates=(), strided=())
    built = all_given.build()
    return {int(name[1:]): values for name, values in stored(built.graph, built.values).items()}


def _bypassed(program: Program) -> Iterator[Program]:
    """With an operand in place of a call's result."""
    for number, call in program.given():
        if not isinstance(call, Call) or len(program.statements) < 3:
            continue
        for operand in dict.fromkeys(operands_of(call)):
            new = {n: n for n in range(sum(each.count for each in program.statements))} | {number: operand}
            yield _renumbered(program, list(program.statements), new)


def _plainer(program: Program) -> Iterator[Program]:
    """Packed, in the usual order, with the usual numerics, and without parameters."""
    if program.numerics != Numerics():
        yield replace(program, numerics=Numerics())
    for left_out in program.strided:
        yield replace(program, strided=tuple(pair for pair in program.strided if pair is not left_out))
    for place, each in enumerate(program.statements):
        if isinstance(each, Input) and each.layout is not Layout.NCHW:
            yield _with(program, place, replace(each, layout=Layout.NCHW))
        if isinstance(each, Call):
            for operation in filter(lambda one: isinstance(one, Operation), each.arguments):
                given = [name for name in operation.optional if getattr(operation, name) is not None]
                for name in given:
                    bare = msgspec.structs.replace(operation, **{name: None})
                    yield _with(program, place, replace(each, arguments=(bare,)))
            for name in each.keywords:
                kept = {other: value for other, value in each.keywords.items() if other != name}
                yield _with(program, place, replace(each, keywords=kept))


def _with(program: Program, place: int, statement: Input | Call) -> Program:
    statements = [*program.statements]
    statements[place] = statement
    return replace(program, statements=tuple(statements))


def _smaller(program: Program) -> Iterator[Program]:
    """With a size made smaller: wherever it occurs, or of one input; or with dims of 1 that were implied."""
    inputs = [(place, each) for place, each in enumerate(program.statements) if isinstance(each, Input)]
    rank = max((each.values.ndim for _, each in inputs), default=0)
    for place, each in inputs:
        if missing := rank - each.values.ndim:
            values = each.values.reshape((1,) * missing + each.values.shape)
            yield replace(_with(program, place, replace(each, values=values)), strided=())
    for size in sorted({size for _, each in inputs for size in each.values.shape if size > 1}, reverse=True):
        for new in dict.fromkeys((1, 2, size // 2, size - 1)):
            if new >= size:
                continue
            statements = [_resized(each, size, new) for each in program.statements]
            yield replace(program, statements=tuple(statements), strided=())
    for place, each in inputs:
        for axis, size in enumerate(each.values.shape):
            for new in dict.fromkeys((1, size // 2, size - 1)):
                if 0 < new < size:
                    part = each.values[(slice(None),) * axis + (slice(0, new),)]
                    changed = replace(_with(program, place, replace(each, values=part)), strided=())
                    yield changed
                    yield from _with_fitting_upstream(changed)


def _with_fitting_upstream(program: Program) -> Iterator[Program]:
    """With the part of the given gradient that fits the result, which has become smaller."""
    call = program.statements[-1]
    if not (isinstance(call, Call) and call.function == "grad" and len(call.arguments) == 3):
        return
    outputs, _, gradients = call.arguments
    if len(outputs) != 1 or len(gradients) != 1:
        return
    result, upstream = outputs[0], gradients[0]
    place = next(
        (n for n, (number, _) in enumerate(program.given()) if number == upstream.number),
        len(program.statements),
    )
    given = program.statements[place]
    before = replace(program, statements=program.statements[:-1], outputs=(("y", result),), updates=())
    try:
        (port,) = before.build().graph.outputs
    except (InvalidRequest, IndexError):
        return
    if isinstance(given, Input) and port.spec.dims != given.values.shape:
        part = given.values[tuple(slice(0, size) for size in port.spec.dims)]
        if part.shape == port.spec.dims:
            yield _with(program, place, replace(given, values=part))


def _resized(statement: Input | Call, size: int, new: int) -> Input | Call:
    if isinstance(statement, Input):
        part = tuple(slice(0, new if this == size else this) for this in statement.values.shape)
        return replace(statement, values=statement.values[part])
    if statement.function != "reshape":
        return statement
    x, dims = statement.arguments
    return replace(statement, arguments=(x, tuple(new if this == size else this for this in dims)))


def _other_dtypes(program: Program) -> Iterator[Program]:
    """In float32."""
    floats = [
        place
        for place, each in enumerate(program.statements)
        if isinstance(each, Input) and each.dtype.is_floating and each.dtype is not DType.FLOAT32
    ]
    for places in itertools.chain([floats], ([place] for place in floats)) if floats else ():
        changed = program
        for place in places:
            each: Any = program.statements[place]
            changed = _with(changed, place, replace(each, values=each.values.astype(np.float32)))
        yield changed


def _simple_values(program: Program) -> Iterator[Program]:
    """Whole numbers, or ones."""
    for place, each in enumerate(program.statements):
        if isinstance(each, Input) and each.dtype.is_floating:
            values = each.values.astype(np.float64)
            whole = np.clip(np.nan_to_num(np.round(values)), -3, 4)
            for simple in (np.ones(values.shape), whole):
                if np.array_equal(simple, values):
                    break
                yield _with(program, place, replace(each, values=rounded(simple, each.dtype)))


_STEPS = (
    _less_given,
    _less_differentiated,
    _cut_off,
    _bypassed,
    _plainer,
    _smaller,
    _other_dtypes,
    _simple_values,
)
