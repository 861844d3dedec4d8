"""Requests for every operation, with their results: from the examples of the operations.

All these tests apply to a new operation: its file has examples.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from cudnn_actor import BufferRef, CudnnRef
from cudnn_actor.messages import Allocate
from cudnn_actor.trials.chaos.answers import Answers
from cudnn_actor.trials.chaos.computations import PROBLEMS, Computation, Problem

__all__ = ["FAMILIES", "FORMS", "Form", "Stage"]

UNTOUCHED = 77
_ANSWERS = Answers(seed=1)


class Form(NamedTuple):
    """An operation with or without its optional operands, and the number of its problem."""

    problem: int
    operation: Computation


FAMILIES: dict[str, int] = {}
"""The first problem of each set of operations, by their names."""
FORMS: dict[str, Form] = {}
"""Each operation, and each of those without its optional operands."""

for _number, _problem in enumerate(PROBLEMS):
    FAMILIES.setdefault(" ".join(type(operation).__name__ for operation in _problem.operations), _number)
    for _form in _problem.forms:
        _without = "" if _form in _problem.operations else " without options"
        FORMS.setdefault(f"{type(_form).__name__}{_without}", Form(_number, _form))


class Stage:
    """The buffers of a problem on a service, and what they have to hold.

    All outputs hold 77 until an operation writes them.
    """

    def __init__(self, number: int, gpu: CudnnRef | None = None) -> None:
        self._gpu = gpu
        self._number = number
        self.problem: Problem = PROBLEMS[number]
        self.held = {role: self._initial(role) for role in self.problem.specs}
        self._refs: dict[str, BufferRef] = {}

    @classmethod
    async def on(cls, gpu: CudnnRef, number: int) -> Stage:
        self = cls(number, gpu)
        for role, spec in self.problem.specs.items():
            self._refs[role] = await gpu.ask(Allocate(spec=spec, data=self.held[role]))
        return self

    @classmethod
    def unplaced(cls, number: int) -> Stage:
        """References to no service's buffers."""
        self = cls(number)
        for slot, (role, spec) in enumerate(self.problem.specs.items(), 1):
            self._refs[role] = BufferRef(slot=slot, generation=1, spec=spec, device="cpu")
        return self

    def _initial(self, role: str) -> np.ndarray:
        if role in self.problem.inputs:
            return _ANSWERS.value(self._number, role, 0)
        spec = self.problem.specs[role]
        return np.full(spec.dims, UNTOUCHED, spec.dtype.numpy)

    def message(self, operation: Computation) -> Any:
        """The operation on the buffers."""
        roles = dict(operation.named())
        message: Any = operation.with_operands(lambda name: self._refs[roles[name]])
        return message

    def computed(self, operation: Computation) -> None:
        """Note that the operation has been run: what it reads is what the buffers hold now."""
        inputs = {name: self.held[role] for name, role in operation.named(operation.inputs)}
        results = _ANSWERS.results(self._number, operation, inputs)
        self.held |= {role: results[name] for name, role in operation.named(operation.outputs)}

    async def assert_right(self, *without: str) -> None:
        """Every buffer holds what it has to, except those `without`."""
        assert self._gpu is not None
        for role in self._refs.keys() - without:
            got, wanted = await self._gpu.download(self._refs[role]), self.held[role]
            if got.dtype.kind == "f":
                assert np.all(np.abs(got - wanted) <= self.problem.tolerance * np.abs(wanted).max()), role
            else:
                np.testing.assert_array_equal(got, wanted, err_msg=role)

    def ref(self, role: str) -> BufferRef:
        return self._refs[role]
