"""What a graph must give: its operations' definitions in float64, and how far from that it may be.

How far each operation alone may be is known: its row in `tests.gpu.operations` says, and the sums of
convolutions are bounded here in the same way. What these errors become further on in the graph is found out
by making them: Monte Carlo arithmetic (D. S. Parker, "Monte Carlo arithmetic: exploiting randomness in
floating-point arithmetic", UCLA CSD-970002, 1997). The graph is evaluated `_SAMPLES` times more. In each of
these evaluations every result is moved by its whole bound: up or down at random, or all of them in the same
direction, or away from 0 or towards it, since the errors of hardware that truncates have one sign; or by any
part of it, since a sine may come round again. Then it is rounded to the dtype that the tensor has, as always.

A result may be off by `_MARGIN` times the largest difference that a sample shows, element by element. So
cancellation, slopes and poles count as they do for these values. Where a value lies so close to a step (of a
comparison, a rounding, a largest element) that its error decides, some samples take the other side, and the
element may have either value. No sample finds that two values are equal which differ by less than their
errors: where a step is at equality, some samples are made equal. What no sample changes must be exact.

Elements that are finite in some samples only are not compared. `Truth.compared` says how many are compared,
and how tightly: a graph that magnifies errors without limit proves little.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from cudnn_actor.engines.cpu.exact.evaluation import NumPy, exact, round_into
from cudnn_actor.protocol import DType, Graph, GraphTensor, Node, OperationGraph, TensorRole
from cudnn_actor.protocol.operations import (
    ArgReduction,
    Convolution,
    ConvolutionBackwardFilter,
    ConvolutionForward,
    Pointwise,
    PointwiseMode,
    ReductionMode,
)
from cudnn_actor.protocol.operations.base import Array

from ..operations import ROWS
from ..operations.cases import beyond_rounding
from ..operations.rows import Row, walk

__all__ = ["Truth", "error_over_bound", "stored", "truth"]

_SAMPLES, _MARGIN = 20, 3.0
_XP = NumPy()
_ROWS: Mapping[type, Row] = {row.operation: row for row in ROWS}
_M = PointwiseMode
_EQUALITIES = (_M.EQ, _M.NE)
_PERIODIC = (_M.SIN, _M.COS, _M.TAN)
_OF_TRUTH = {
    **dict.fromkeys((_M.LOGICAL_AND, _M.LOGICAL_OR, _M.LOGICAL_XOR), (0, 1)),
    **dict.fromkeys((_M.LOGICAL_NOT, _M.SELECT), (0,)),
}
"""The operands that are true unless they are 0."""
_TIGHT = 0.01
"""A bound relative to the value, or to the tensor's root mean square: a bug of any kind is larger."""

Samples = list[Array]
"""A tensor's values: those that are right, then those of each sample. They may be one and the same array."""


class Truth(NamedTuple):
    """What a graph's outputs and updated inputs are, by name.

    Parameters
    ----------
    wanted
        Not rounded to their dtypes.
    bounds
        How far from that they may be before they are rounded; infinite where anything is right. Of integers:
        after.
    compared
        The share of all elements that are compared so that an error of 1 % shows.
    """

    wanted: dict[str, Array]
    bounds: dict[str, Array]
    compared: float


def stored(graph: Graph, values: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the graph's operations define its outputs to be, rounded to their dtypes, in order."""
    names = graph.names_of
    given = {uid: values[names[uid]] for uid in graph.body.bound if names[uid] in values}
    found = _Evaluation(graph.body, given, seed=None).run()
    results = {names[uid]: samples[0] for uid, samples in found.items()}
    return {
        port.name: rounded(np.broadcast_to(results[port.name], port.spec.dims), port.spec.dtype)
        for port in graph.outputs
    }


def truth(graph: Graph, values: Mapping[str, np.ndarray], seed: int = 0) -> Truth:
    """What a graph gives for these values of its inputs."""
    body = graph.body
    given = {uid: values[graph.names_of[uid]] for uid in body.bound if uid not in body.written}
    wanted, bounds = {}, {}
    compared = elements = 0
    for uid, samples in _Evaluation(body, given, seed).run().items():
        name, tensor = graph.names_of[uid], body.tensor(uid)
        wanted[name], bounds[name] = _bounded(samples, tensor)
        compared += int(np.count_nonzero(_is_tight(wanted[name], bounds[name])))
        elements += wanted[name].size
    return Truth(wanted, bounds, compared / max(elements, 1))


def error_over_bound(graph: Graph, got: Mapping[str, np.ndarray], truth: Truth) -> tuple[float, str]:
    """The largest error in terms of what is allowed, up to 1 being right, and the port that has it."""
    specs = {graph.names_of[uid]: graph.body.tensor(uid).spec for uid in graph.body.results}
    errors = [
        (_error(got[name], spec.dtype, truth.wanted[name], truth.bounds[name]), name)
        for name, spec in specs.items()
        if spec.size
    ]
    return max(errors, default=(0.0, ""))


def _error(got: np.ndarray, dtype: DType, wanted: Array, bound: Array) -> float:
    if got.shape != wanted.shape or got.dtype != dtype.numpy:
        return math.inf
    free = np.isinf(bound)
    if dtype.is_floating:
        off = beyond_rounding(got, wanted, dtype)
    else:
        # in float64, numbers of 64 bits lose digits: equal ones are told apart from others before that
        right = rounded(wanted, dtype)
        off = np.where(
            got == right, 0.0, np.abs(got.astype(np.float64) - right.astype(np.float64)) + 2.0**-20
        )
    with np.errstate(all="ignore"):
        share = np.where((off == 0) | free, 0.0, off / bound)
    return float(np.where(np.isnan(share), np.inf, share).max())


def rounded(values: Array, dtype: DType) -> np.ndarray:
    """Values in a dtype."""
    place = np.empty(values.shape, dtype.numpy)
    with np.errstate(all="ignore"):
        round_into(values, dtype, place)
    return place


def _bounded(samples: Samples, tensor: GraphTensor) -> tuple[Array, Array]:
    """What is right, and how far from it a result may be."""
    wanted, others = samples[0], [sample for sample in samples[1:] if sample is not samples[0]]
    of = _difference if tensor.dtype.is_floating else _difference_of_integers
    bound = np.zeros(wanted.shape)
    with np.errstate(all="ignore"):
        for sample in others:
            bound = np.maximum(bound, of(sample, wanted, tensor.dtype))
        return wanted, _MARGIN * bound


def _difference(sample: Array, wanted: Array, dtype: DType) -> Array:
    """How far apart they are; infinite where only one is finite."""
    del dtype
    same = (sample == wanted) | (np.isnan(sample) & np.isnan(wanted))
    found = np.abs(sample - wanted)
    return np.where(same, 0.0, np.where(np.isfinite(found), found, np.inf))


def _difference_of_integers(sample: Array, wanted: Array, dtype: DType) -> Array:
    """The same when they are stored: at least 1 where they differ, though float64 may not show it."""
    one, other = rounded(sample, dtype), rounded(wanted, dtype)
    found = np.abs(one.astype(np.float64) - other.astype(np.float64))
    return np.where(one == other, 0.0, np.maximum(found, 1.0))


def _is_tight(wanted: Array, bound: Array) -> Array:
    with np.errstate(all="ignore"):
        finite = np.where(np.isfinite(wanted), np.abs(wanted.astype(np.float64)), 0.0)
        scale = float(np.sqrt(np.mean(np.square(finite)))) if finite.size else 0.0
        return bound <= _TIGHT * np.maximum(finite, scale)


class _Evaluation:
    """One evaluation of a graph. `seed`: of the samples; None for none."""

    def __init__(self, graph: OperationGraph, given: Mapping[int, np.ndarray], seed: int | None) -> None:
        self._graph = graph
        self._count = 1 if seed is None else 1 + _SAMPLES
        self._chance = np.random.default_rng(seed)
        self._values: dict[int, Samples] = {}
        for uid, values in {**given, **graph.given_values(_XP, ())}.items():
            self._values[uid] = [exact(np.asarray(values))] * self._count

    def run(self) -> dict[int, Samples]:
        """The samples of each bound tensor that the graph writes, not rounded."""
        found = {}
        with np.errstate(all="ignore"):
            for operation in self._graph.operations:
                for uid, samples in self._results(operation).items():
                    tensor = self._graph.tensor(uid)
                    if tensor.dtype is DType.BOOL:
                        samples = self._tied(samples, [0.0] * self._count)  # noqa: PLW2901 - some of them are 0
                    if tensor.role is TensorRole.BOUND:
                        found[uid] = samples
                    self._values[uid] = self._stored(samples, tensor)
        return found

    def _results(self, operation: Node) -> dict[int, Samples]:
        """An operation's results, each sample moved by the operation's own error."""
        given = {uid: self._values[uid] for uid in operation.reads}
        given |= self._converted(operation) | self._ties(operation)
        first = {uid: samples[0] for uid, samples in given.items()}
        results = self._graph.evaluate(_XP, operation, first)
        errors = self._errors(operation, first) if self._count > 1 else {}
        inexact = any(s is not samples[0] for samples in given.values() for s in samples)
        found: dict[int, Samples] = {uid: [result] for uid, result in results.items()}
        for number in range(1, self._count):
            if inexact:
                results = self._graph.evaluate(_XP, operation, {uid: s[number] for uid, s in given.items()})
            for uid, result in results.items():
                found[uid].append(self._moved(result, errors[uid], number) if uid in errors else result)
        return found

    def _converted(self, operation: Node) -> dict[int, Samples]:
        """Integers that a function of floats reads, which may be converted to a type with fewer digits."""
        digits = {DType.FLOAT32: 24, DType.FLOAT64: 53}.get(self._graph.compute(operation))
        if not isinstance(operation, Pointwise) or digits is None:
            return {}
        found = {}
        for uid in operation.reads:
            right = self._values[uid][0]
            size = np.abs(right.astype(np.float64))
            if right.dtype.kind != "f" and size.max(initial=0.0) > 2.0**digits:
                error = np.where(size > 2.0**digits, 2.0**-digits * size, 0.0)
                samples = enumerate(self._values[uid][1:], start=1)
                found[uid] = [right, *(self._moved(s.astype(np.float64), error, n) for n, s in samples)]
                if self._count > 1 and operation.mode in _PERIODIC:
                    # The result may be anything where the error is a period.
                    found[uid][1] = np.where(error > 1.0, np.inf, found[uid][1])
        return found

    def _errors(self, operation: Node, given: Mapping[int, Array]) -> dict[int, Array]:
        """How far off an operation's results may be, if its operands are these."""
        graph = self._graph
        outputs = dict(operation.named(operation.outputs))
        specs = {name: graph.tensor(uid).spec for name, uid in outputs.items()}
        values = {name: given[uid] for name, uid in operation.named(operation.inputs)}
        named: Any = operation.with_operands(lambda name: name)
        double = graph.compute(operation) is DType.FLOAT64
        unit = 2 * 2.0**-53 if double else 2.0**-24
        if isinstance(operation, Convolution):
            found = _of_sums(named, values, specs)
        else:
            found = _ROWS[type(operation)].bounds(named, values, specs)
            if getattr(operation, "mode", None) is ReductionMode.PRODUCT:
                limits = np.finfo(np.float64 if double else np.float32)
                found = {name: _in_range(named, values, specs, of, limits) for name, of in found.items()}
        least = 0.0 if double else 2.0**-149
        return {
            outputs[name]: np.broadcast_to(np.nan_to_num(unit * bound + least, nan=np.inf), specs[name].dims)
            for name, bound in found.items()
            if name in outputs
        }

    def _moved(self, result: Array, error: Array, number: int) -> Array:
        """A sample's result, off by all that it may be."""
        error = np.where(np.isfinite(result), error, 0.0)
        match number:
            case 1 | 2:
                return result + (error if number == 1 else -error)
            case 3 | 4:
                return result + (error if number == 3 else -error) * np.sign(result)
        if number % 2:
            return result + error * self._chance.choice((-1.0, 1.0), result.shape)
        return result + error * self._chance.uniform(-1.0, 1.0, result.shape)

    def _stored(self, samples: Samples, tensor: GraphTensor) -> Samples:
        """The samples as a tensor holds them."""
        right = exact(rounded(samples[0], tensor.dtype))
        found = [right]
        for sample in samples[1:]:
            other = right if sample is samples[0] else exact(rounded(sample, tensor.dtype))
            found.append(right if np.array_equal(other, right, equal_nan=other.dtype.kind == "f") else other)
        return found

    # Steps at equality.

    def _ties(self, operation: Node) -> dict[int, Samples]:
        """Operands of which some samples are made equal to what they are compared with."""
        if isinstance(operation, ArgReduction):
            best = np.max if operation.mode is ReductionMode.MAX else np.min
            samples = self._values[operation.x]
            others = [best(sample, axis=operation.axis, keepdims=True) for sample in samples]
            return {operation.x: self._tied(samples, others)}
        if not isinstance(operation, Pointwise):
            return {}
        if operation.mode in _EQUALITIES:
            a, b = operation.operands
            return {b: self._tied(self._values[b], self._values[a])} if a != b else {}
        places = _OF_TRUTH.get(operation.mode, ())
        tested = {operation.operands[place] for place in places}
        return {uid: self._tied(self._values[uid], [0.0] * self._count) for uid in tested}

    def _tied(self, samples: Samples, others: Samples | list[float]) -> Samples:
        """The samples, some made equal to the others where the errors of both exceed what lies between."""
        if all(s is samples[0] for s in samples) and all(o is others[0] for o in others):
            return samples
        shape = np.broadcast_shapes(samples[0].shape, np.shape(others[0]))
        spread = _spread(samples) + _spread(others)
        near = (spread > 0) & (np.abs(samples[0] - others[0]) <= _MARGIN * spread)
        if not near.any():
            return samples
        found = [samples[0]]
        for number, (sample, other) in enumerate(zip(samples[1:], others[1:], strict=True)):
            # Not in each sample: behind several steps, hardly any would be left that none has made equal.
            made = near & (self._chance.random(shape) < 0.5) if number % 3 else np.zeros(shape, bool)
            found.append(np.where(made, other, sample))
        return found


def _spread(samples: Any) -> Array:
    spread: Array = np.zeros(np.shape(samples[0]))
    for sample in samples[1:]:
        if sample is not samples[0]:
            spread = np.maximum(spread, np.nan_to_num(np.abs(sample - samples[0]), nan=0.0, posinf=0.0))
    return spread


def _in_range(operation: Any, values: Mapping[str, Array], specs: Any, bound: Array, limits: Any) -> Array:
    """The bound of a product; infinite if a part of it, in some order, is beyond what it is computed in."""
    x = np.abs(values["x"])
    (most,) = operation.evaluate(_XP, {"x": np.maximum(x, 1.0)}, specs).values()
    (least,) = operation.evaluate(_XP, {"x": np.where(x > 0, np.minimum(x, 1.0), 1.0)}, specs).values()
    return np.where((most < limits.max / 2) & (least > limits.tiny), bound, np.inf)


def _of_sums(operation: Any, values: Mapping[str, Array], specs: Any) -> dict[str, Array]:
    """The error of a convolution: of each sum, and of the largest, since it may go by way of a transform."""
    (output,) = specs
    if all(value.dtype.kind != "f" for value in values.values()):
        return {}
    magnitudes = {name: np.abs(value) for name, value in values.items()}
    total = operation.evaluate(_XP, magnitudes, specs)[output]
    if isinstance(operation, ConvolutionForward):
        length = math.prod(values["w"].shape[1:])
    elif isinstance(operation, ConvolutionBackwardFilter):
        length = values["dy"].shape[0] * math.prod(values["dy"].shape[2:])
    else:
        length = values["w"].shape[0] // operation.conv.groups * math.prod(values["w"].shape[2:])
    finite = np.where(np.isfinite(total), total, 0.0)
    return {output: walk(length) * (finite + finite.max(initial=0.0))}
