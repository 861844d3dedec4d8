"""The values of the load's inputs, and the expected results, computed here by the operations' definitions.

The few inputs of each problem are made once, and the results are cached. So in a long run the oracle mostly
looks up what the service has to compute.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import numpy as np

from cudnn_actor.engines.cpu.exact.evaluation import NumPy, exact
from cudnn_actor.protocol import TensorSpec
from cudnn_actor.trials.chaos.computations import Computation, Problem, updated_inputs
from cudnn_actor.trials.chaos.graphs import LOAD

__all__ = ["VALUES", "Answers"]

VALUES = 3
"""Number of different inputs of each operand."""
_LARGEST = 3
_XP = NumPy()


class Answers:
    """The inputs of every problem, and the results of every combination of them.

    Equal arrays are one object, which lives as long as this one. So results are looked up by the ids of the
    inputs, even if these inputs are results themselves.

    Parameters
    ----------
    seed
        Determines the inputs.
    """

    def __init__(self, seed: int) -> None:
        self._known: dict[tuple[object, ...], np.ndarray] = {}
        self._seed = seed
        self._inputs: dict[tuple[int, str], list[np.ndarray]] = {}
        self._results: dict[tuple[object, ...], dict[str, np.ndarray]] = {}

    def value(self, problem: int, role: str, number: int) -> np.ndarray:
        """One of the values of an input, which are made at the first call. Do not write to it."""
        values = self._inputs.get((problem, role))
        if values is None:  # two threads may make them: the arrays are equal, and `_keep` gives both the same
            place = list(LOAD[problem].inputs).index(role)
            made = _inputs(LOAD[problem], role, [self._seed, problem, place])
            values = self._inputs[problem, role] = [self._keep(array) for array in made]
        return values[number]

    def results(
        self, problem: int, operation: Computation, values: Mapping[str, np.ndarray]
    ) -> dict[str, np.ndarray]:
        """The outputs for values of the inputs, by the operands' names.

        The values must come from this object. Only an operation that updates state takes others; its results
        are not cached, because a state never recurs.
        """
        if updated_inputs(operation):
            return _evaluate(LOAD[problem], operation, values)
        key = (problem, operation, *map(id, values.values()))
        results = self._results.get(key)
        if results is None:
            computed = _evaluate(LOAD[problem], operation, values)
            results = self._results[key] = {name: self._keep(array) for name, array in computed.items()}
        return results

    def _keep(self, array: np.ndarray) -> np.ndarray:
        array.setflags(write=False)
        digest = hashlib.sha256(array.tobytes()).digest()
        return self._known.setdefault((array.dtype, array.shape, digest), array)


def _inputs(problem: Problem, role: str, seed: list[int]) -> list[np.ndarray]:
    """The values of an input: small whole numbers, or what an operation that reads the tensor asks for."""
    rng = np.random.default_rng(seed)

    def draw(spec: TensorSpec) -> np.ndarray:
        return rng.integers(-_LARGEST, _LARGEST + 1, spec.dims).astype(np.float64)

    arrays = []
    for _ in range(VALUES):
        array = draw(problem.specs[role])
        for operation in problem.operations:
            samples = operation.samples(_XP, problem.specs_of(operation), draw)
            for name, operand in operation.named(operation.inputs):
                if operand == role and name in samples:
                    array = samples[name]
        arrays.append(array.astype(problem.specs[role].dtype.numpy))
    return arrays


def _evaluate(
    problem: Problem, operation: Computation, values: Mapping[str, np.ndarray]
) -> dict[str, np.ndarray]:
    inputs = {name: exact(array) for name, array in values.items()}
    specs = {name: problem.specs[role] for name, role in operation.named(operation.outputs)}
    with np.errstate(all="ignore"):
        results = operation.evaluate(_XP, inputs, specs)
        return {name: results[name].astype(spec.dtype.numpy) for name, spec in specs.items()}
