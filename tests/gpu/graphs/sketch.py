"""A program while it is drawn: statements, and the values that their tensors have.

A statement is tried on its own before it is added: what the builder refuses, and what gives hardly any finite
values, is refused. So what draws statements need not know which operands fit which operation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cudnn_actor.protocol import DType, InvalidRequest, Layout

from ...engines.refusals import may_refuse
from ..choices import Choices
from .bounds import rounded, stored
from .programs import Call, Input, Of, Program, mapped, operands_of

__all__ = ["FLOATS", "MOST_VALUES", "MOST_WITH_GRADIENTS", "SIZES", "Refused", "Sketch"]

MOST_VALUES = 1500
"""Of a tensor."""
FLOATS = (DType.FLOAT32, DType.FLOAT32, DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16, DType.FLOAT64)
SIZES = (1, 2, 3, 4, 5, 8, 16)
"""Of dims: few, so that many pieces are equal."""
MOST_WITH_GRADIENTS = 60
"""Operations of a program that has some."""
_LARGEST, _TAME, _WILD = 1e4, 0.9, 0.03
"""So many values of a tensor are finite and no larger; but not of this share of the tensors."""
_MOST_RESULTS = 6


class Refused(Exception):
    """Raised when a statement, or what is to be drawn, makes no sense here."""


class Sketch:
    """A program that is being drawn.

    Parameters
    ----------
    choose
        Makes the choices.
    """

    def __init__(self, choose: Choices) -> None:
        self.choose = choose
        self.statements: list[Input | Call] = []
        self.values: list[np.ndarray] = []
        """Of each tensor, as it is where it is stored."""
        self.inputs: set[int] = set()
        """The tensors that are inputs, by number."""

    def attempt(self, move: Callable[[Sketch], object]) -> bool:
        """Make a move. Returns whether it made sense; if not, nothing has changed."""
        before = self.statements[:], self.values[:], set(self.inputs)
        try:
            move(self)
        except (Refused, InvalidRequest):
            self.statements, self.values, self.inputs = before
            return False
        return True

    # Statements.

    def input(self, dims: Sequence[int], dtype: DType, values: np.ndarray | None = None) -> Of:
        """Add an input, of these values or of random ones."""
        choose, dims = self.choose, tuple(dims)
        if values is None:
            whole = not dtype.is_floating or choose.chance(0.3)
            drawn = choose.rng.integers(-3, 5, dims) if whole else choose.rng.normal(size=dims)
            values = rounded(np.asarray(drawn), dtype)
        last = 3 <= len(dims) <= 5 and choose.chance(0.4)
        number = len(self.values)
        self.inputs.add(number)
        self.statements.append(Input(f"x{number}", values, Layout.NHWC if last else Layout.NCHW))
        self.values.append(values)
        return Of(number)

    def call(self, function: str, *arguments: Any, **keywords: Any) -> Of:
        """Add a call of the builder; its first tensor. Raises `Refused`, and as the builder."""
        return self._add(*self._tried(Call(function, arguments, keywords)))

    def gradients(self, outputs: tuple[Of, ...], wrt: tuple[Of, ...], upstream: tuple[Of, ...]) -> Of:
        """Add the gradients of what has been drawn; the first of them. Raises as `call`."""
        call = Call("grad", (outputs, wrt[0] if len(wrt) == 1 else wrt, upstream), count=len(wrt))
        named = tuple((f"y{n}", Of(len(self.values) + n)) for n in range(call.count))
        results = self._results(Program((*self.statements, call), named))
        if not any(map(np.any, results)):
            raise Refused
        return self._add(call, results)

    def _add(self, call: Call, results: list[np.ndarray]) -> Of:
        if not all(map(self._is_wanted, results)):
            raise Refused
        self.statements.append(call)
        self.values += results
        return Of(len(self.values) - len(results))

    def _tried(self, call: Call) -> tuple[Call, list[np.ndarray]]:
        """A call with the number of its results, and these, from the values that its operands have."""
        read = sorted({*operands_of(call)})
        places = {number: place for place, number in enumerate(read)}
        given = tuple(Input(f"x{number}", self.values[number]) for number in read)
        moved = mapped((call.arguments, dict(call.keywords)), lambda number: Of(places[number]))
        for count in range(1, _MOST_RESULTS + 1):
            outputs = tuple((f"y{n}", Of(len(read) + n)) for n in range(count))
            tried = Call(call.function, moved[0], moved[1], count)
            try:
                results = self._results(Program((*given, tried), outputs))
            except InvalidRequest as error:
                if error.field == "count":
                    continue
                raise
            return replace(call, count=count), results
        raise Refused

    @staticmethod
    def _results(program: Program) -> list[np.ndarray]:
        """What a program gives. Raises `Refused` if it is too large, or an engine may refuse it."""
        built = program.build()
        body = built.graph.body
        if may_refuse("cuda", body) is not None or len(body.operations) > MOST_WITH_GRADIENTS:
            raise Refused
        return [*stored(built.graph, built.values).values()]

    def _is_wanted(self, values: np.ndarray) -> bool:
        dtype = self._dtype(values)
        if values.size > MOST_VALUES:
            return False
        if not dtype.is_floating or not values.size:
            return True
        with np.errstate(all="ignore"):
            tame = np.abs(values.astype(np.float64)) <= _LARGEST
        return bool(np.mean(tame) >= _TAME) or self.choose.chance(_WILD)

    # What is known.

    def dims(self, of: Of) -> tuple[int, ...]:
        """A tensor's dims."""
        return self.values[of.number].shape

    def dtype(self, of: Of) -> DType:
        """A tensor's dtype where it is stored."""
        return self._dtype(self.values[of.number])

    @staticmethod
    def _dtype(values: np.ndarray) -> DType:
        found = DType.of(values.dtype)
        assert found is not None
        return found

    def some(self, fits: Callable[[np.ndarray], bool] = lambda _: True) -> Of:
        """A tensor, rather the last. Raises `Refused` if none fits."""
        fitting = [number for number, values in enumerate(self.values) if fits(values)]
        if not fitting:
            raise Refused
        return Of(fitting[-1] if self.choose.chance(0.6) else self.choose.one(fitting))

    def some_dims(self) -> tuple[int, ...]:
        """Dims of a new tensor."""
        rank = self.choose.one((1, 2, 2, 3, 3, 4, 4, 5))
        while True:
            dims = tuple(self.choose.one(SIZES) for _ in range(rank))
            if math.prod(dims) <= MOST_VALUES:
                return dims
