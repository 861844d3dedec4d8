"""One operation to be tested, with all that makes it repeatable: operands, attributes and a seed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np

from cudnn_actor.engines.base import Builder, Engine
from cudnn_actor.engines.cpu.exact.evaluation import NumPy, exact
from cudnn_actor.engines.cpu.rounding import clip, integer_range, rounding_to
from cudnn_actor.protocol import BufferRef, DType, TensorSpec
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.messages.lowering import lower
from cudnn_actor.protocol.operations import Operation
from cudnn_actor.protocol.operations.base import Array

from ...engines.workbench import Workbench, old_value, workbench
from .rows import Exact, Row, Values

__all__ = [
    "OperationCase",
    "OperationTruth",
    "Results",
    "arrays",
    "beyond_rounding",
    "error_over_bound",
    "place",
]
__all__ += ["run", "truth", "untouchable"]

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, kw_only=True)
class OperationCase:
    """An operation on operands of these specs.

    Parameters
    ----------
    row
        Its row of the table.
    operation
        Its operands are their own names.
    specs
        Of all operands, by name: the inputs first.
    values, special
        What the inputs are made of, and whether some of the first input are the row's special values.
    seed
        Of the inputs' values.
    """

    row: Row
    operation: Operation[str]
    specs: Mapping[str, TensorSpec]
    values: Values
    special: bool
    seed: tuple[int, ...]

    @property
    def inputs(self) -> dict[str, TensorSpec]:
        """The specs of what is read."""
        return {name: self.specs[name] for name, _ in self.operation.named(self.operation.inputs)}

    @property
    def outputs(self) -> dict[str, TensorSpec]:
        """The specs of what is written."""
        return {name: self.specs[name] for name, _ in self.operation.named(self.operation.outputs)}

    @property
    def first(self) -> TensorSpec:
        """The spec of the operand whose dtype, rank and layout were asked for."""
        return self.specs[self.row.first or next(iter(self.specs))]

    @property
    def label(self) -> str:
        """What its error is reported as."""
        return f"{self.operation.kind} {self.first.dtype.value}"

    @property
    def unit(self) -> float:
        """The unit roundoff of the type that it computes in."""
        computed = self.operation.compute(tuple(spec.dtype for spec in self.inputs.values()))
        # The truth is computed in float64 too, and is as wrong as what is compared with it.
        return 2 * 2.0**-53 if computed is DType.FLOAT64 else 2.0**-24

    def graph(self) -> OperationGraph:
        """What an engine is asked for."""
        refs = {name: _unbound(spec) for name, spec in self.specs.items()}
        return lower(self.message(refs)).graph

    def message(self, refs: Mapping[str, BufferRef]) -> Operation[BufferRef]:
        """The request, with the operands in these buffers."""
        message = self.operation.with_operands(refs.__getitem__)
        return msgspec.structs.replace(message, numerics=self.operation.numerics)

    def __str__(self) -> str:
        operands = ", ".join(f"{name}={spec} {spec.strides}" for name, spec in self.specs.items())
        values = f"{self.values.value} values{', some special' if self.special else ''}"
        return f"{self.operation}: {operands}; {values}"


class Results(NamedTuple):
    """What an engine made of a case."""

    values: Arrays
    plan: str


class OperationTruth(NamedTuple):
    """The outputs, not rounded to their dtypes, and how far from that they may be before they are rounded."""

    wanted: Exact
    bounds: Exact


def arrays(case: OperationCase, given: Mapping[str, np.ndarray] | None = None) -> Arrays:
    """Values of every input, by name. `given`: of some, what is drawn; others may follow from that."""
    rng = np.random.default_rng(case.seed)

    def draw(spec: TensorSpec, name: str = "") -> Array:
        drawn = _rounded(_draw(rng, spec, case, name), spec.dtype)
        own = name or next((other for other, of in case.inputs.items() if of is spec), "")
        return _exact((given or {}).get(own, drawn))

    values = {name: draw(spec, name) for name, spec in case.inputs.items()}
    with np.errstate(all="ignore"):
        if case.row.sampled:
            values |= case.operation.samples(NumPy(), case.specs, draw)
        if case.row.arrange is not None:
            case.row.arrange(case.operation, rng, values, case.specs)
    return {name: _rounded(values[name], spec.dtype) for name, spec in case.inputs.items()}


_last: list[tuple[OperationCase, Arrays]] = []
"""The case that `_values_of` was last asked for, and its values."""


def _values_of(case: OperationCase) -> Arrays:
    """Its `arrays`, which cannot be written. They are drawn once for a truth and the run behind it."""
    if not _last or _last[0][0] is not case:
        values = arrays(case)
        for array in values.values():
            array.setflags(write=False)
        _last[:] = [(case, values)]
    return _last[0][1]


def run(
    engine: Engine,
    case: OperationCase,
    given: Mapping[str, np.ndarray] | None = None,
    builder: Builder | None = None,
) -> Results:
    """Run a case on an open engine, into outputs full of NaN, and a workspace too if it has a hook for that.

    The parameters are those of `tests.gpu.cases.run`. Raises what engine and builder raise, and `ValueError`
    if anything was written but the outputs' elements.
    """
    given = _values_of(case) if given is None else given
    with workbench(engine) as bench:
        refs = {name: place(bench, spec, given.get(name)) for name, spec in case.specs.items()}
        asked = case.message(refs)
        plan = (builder or engine).build(lower(asked).graph, workspace_limit=None)
        engine.prepare(plan)
        getattr(engine, "poison_workspace", lambda: None)()
        before = {name: untouchable(bench, ref, written=name in case.outputs) for name, ref in refs.items()}
        bench.execute(plan, asked)
        for name, ref in refs.items():
            if not np.array_equal(untouchable(bench, ref, written=name in case.outputs), before[name]):
                raise ValueError(f"{plan.tag} wrote to {name} where it must not")
        return Results({name: bench.read(refs[name]) for name in case.outputs}, plan.tag)


def truth(case: OperationCase, values: Mapping[str, np.ndarray] | None = None) -> OperationTruth:
    """The definition in float64, and the bounds of the row. An output without one is exact.

    `values`: the case's `arrays`, where they are known.
    """
    given = {name: _exact(array) for name, array in (_values_of(case) if values is None else values).items()}
    outputs, operation = case.outputs, case.operation
    with np.errstate(all="ignore"):
        wanted = operation.evaluate(NumPy(), given, outputs)
        bounds = case.row.bounds(operation, given, outputs)
    least = 0.0 if case.unit < 2.0**-24 else 2.0**-149  # products may be subnormal
    return OperationTruth(
        {name: np.broadcast_to(wanted[name], spec.dims) for name, spec in outputs.items()},
        {name: case.unit * bounds[name] + least for name in outputs if name in bounds},
    )


def error_over_bound(case: OperationCase, got: Mapping[str, np.ndarray], truth: OperationTruth) -> float:
    """The largest error of all outputs in terms of what is allowed: up to 1 is right.

    0 where each output is the correctly rounded truth. This shares no rounding with the CPU engine.
    """
    return max(
        _error(_without_overflow(case, got[name], truth.wanted[name]), spec, truth.wanted[name], bound)
        for name, spec in case.outputs.items()
        for bound in [truth.bounds.get(name, 0.0)]
    )


def _without_overflow(case: OperationCase, got: np.ndarray, wanted: Array) -> np.ndarray:
    """A result with infinity for NaN where the truth is too large for the dtype, if parts of it are rounded.

    The parts may have become infinity and -infinity, as those of the heads that share keys.
    """
    if case.operation.slack <= 1 or not np.issubdtype(got.dtype, np.floating):
        return got
    unheld = np.isfinite(wanted) & (np.abs(wanted) > np.finfo(got.dtype).max)
    return np.where(np.isnan(got) & unheld, np.copysign(np.inf, wanted), got).astype(got.dtype)


def _error(got: np.ndarray, spec: TensorSpec, wanted: Array, bound: Array | float) -> float:
    if got.shape != spec.dims or got.dtype != spec.dtype.numpy:
        return np.inf
    if not spec.dtype.is_floating:
        return 0.0 if np.array_equal(got, clip(wanted, spec.dtype.numpy)) else np.inf
    off = beyond_rounding(got, wanted, spec.dtype)
    with np.errstate(all="ignore"):
        share = np.where(off == 0, 0.0, off / bound)
    return float(np.where(np.isnan(share), np.inf, share).max())


def beyond_rounding(got: np.ndarray, wanted: Array, dtype: DType) -> Array:
    """How far the truth is from the nearest value that rounds to `got`; NaN where one of them is NaN.

    Infinity counts as the number that would follow the largest one.
    """
    exponent = {DType.FLOAT16: 16, DType.FLOAT64: 1023}.get(dtype, 128)
    top = 2.0**exponent
    with np.errstate(all="ignore"):
        value, target = (np.clip(a.astype(np.float64), -top, top) for a in (got, wanted))
        towards = np.where(target > value, np.inf, -np.inf).astype(got.dtype)
        neighbour = np.clip(np.nextafter(got, towards).astype(np.float64), -top, top)
        off = np.maximum(np.abs(value - target) - np.abs(value - neighbour) / 2, 0.0)
    return np.where(np.isnan(value) & np.isnan(target), 0.0, off)


def place(bench: Workbench, spec: TensorSpec, values: np.ndarray | None) -> BufferRef:
    """A buffer of these values, or of NaN: between its elements it has bytes that are neither 0 nor NaN."""
    ref = bench.empty(spec)
    bench.engine.fill(bench.binding(ref, TensorSpec.packed((spec.nbytes,), DType.UINT8)), 0xA5)
    if values is None:
        bench.engine.fill(bench.binding(ref), old_value(spec.dtype))
    else:
        bench.engine.write(bench.binding(ref), values)
    return ref


def untouchable(bench: Workbench, ref: BufferRef, *, written: bool) -> np.ndarray:
    """A buffer's bytes: of an output those between its elements, the others as 0."""
    data = bench.bytes_of(ref).copy()
    if written:
        itemsize = ref.spec.dtype.itemsize
        strides = tuple(stride * itemsize for stride in ref.spec.strides)
        np.ndarray(ref.spec.dims, f"u{itemsize}", data, strides=strides)[...] = 0
    return data


def _draw(rng: np.random.Generator, spec: TensorSpec, case: OperationCase, name: str) -> Array:
    """Values of an input, or of a tensor that has no name."""
    dims, floating = spec.dims, spec.dtype.is_floating
    values: Array
    match case.values:
        case Values.EQUAL if name not in case.row.varied:
            values = np.full(dims, rng.integers(-12, 13) / (4 if floating else 1))
        case Values.WHOLE:
            values = rng.integers(-3, 5, dims)
        case Values.NORMAL | Values.FAR if not floating:
            least, most = integer_range(spec.dtype.numpy)
            largest = case.row.largest
            return rng.integers(max(least, -largest), min(most, largest), dims, endpoint=True)
        case _:
            values = rng.standard_normal(dims) + (30 if case.values is Values.FAR else 0)
    if case.special and floating and name == next(iter(case.specs)):
        places = rng.integers(spec.size, size=1 + spec.size // 200)
        values = values.astype(np.float64)
        values.flat[places] = rng.choice(case.row.specials, places.size)
    return values


def _rounded(values: Array, dtype: DType) -> np.ndarray:
    """Values in a dtype, rounded once; integers saturate."""
    result: np.ndarray = np.empty(np.shape(values), dtype.numpy)
    if not dtype.is_floating and values.dtype.kind in "iu":
        result[...] = clip(values, result.dtype)
        return result
    with np.errstate(all="ignore"):
        rounding_to(result.dtype)(result, np.array(values, np.float64))
    return result


def _exact(array: np.ndarray) -> Array:
    return exact(array)


def _unbound(spec: TensorSpec) -> BufferRef:
    return BufferRef(slot=0, generation=0, spec=spec, device="none")
