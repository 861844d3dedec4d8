"""One convolution to be tested, with all that makes it repeatable: shapes, layouts, scalars and a seed."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cudnn_actor.engines.base import Builder, Engine
from cudnn_actor.protocol import (
    BufferRef,
    ConvBwdData,
    ConvBwdFilter,
    ConvFwd,
    ConvSpec,
    DType,
    Epilogue,
    Numerics,
    TensorSpec,
)
from cudnn_actor.protocol.graphs.operation_graph import OperationGraph
from cudnn_actor.protocol.messages.lowering import lower
from cudnn_actor.protocol.messages.messages import Compute

from ..engines.workbench import Workbench, workbench

__all__ = ["RESULT", "Case", "Kind", "Ran", "arrays", "message", "run"]


class Kind(enum.StrEnum):
    """The three convolutions."""

    FORWARD = "forward"
    BACKWARD_DATA = "backward data"
    BACKWARD_FILTER = "backward filter"


RESULT = {Kind.FORWARD: "y", Kind.BACKWARD_DATA: "x", Kind.BACKWARD_FILTER: "w"}
"""Which of x, w and y each of them computes from the other two."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A convolution of x and w to y, of which one is computed from the other two.

    Parameters
    ----------
    whole
        Operands are small whole numbers, and so the result is exact in every dtype before it is rounded.
    seed
        Of the operands' values.
    """

    kind: Kind
    x: TensorSpec
    w: TensorSpec
    y: TensorSpec
    conv: ConvSpec
    alpha: float = 1.0
    beta: float = 0.0
    bias: TensorSpec | None = None
    epilogue: Epilogue = field(default_factory=Epilogue)
    numerics: Numerics = field(default_factory=Numerics)
    whole: bool = False
    seed: Sequence[int] = (0,)

    @property
    def result(self) -> TensorSpec:
        """The tensor that is computed."""
        spec: TensorSpec = getattr(self, RESULT[self.kind])
        return spec

    @property
    def operands(self) -> dict[str, TensorSpec]:
        """The two that it is computed from."""
        return {name: getattr(self, name) for name in "xwy" if name != RESULT[self.kind]}

    @property
    def dtype(self) -> DType:
        """The operands'."""
        return next(iter(self.operands.values())).dtype

    @property
    def label(self) -> str:
        """What its error is reported as."""
        return self.dtype.value

    @property
    def length(self) -> int:
        """Products that one value of the result is a sum of, at most."""
        taps = math.prod(self.w.dims[2:])
        if self.kind is Kind.FORWARD:
            return self.w.dims[1] * taps
        if self.kind is Kind.BACKWARD_DATA:
            return self.w.dims[0] // self.conv.groups * taps
        return self.y.dims[0] * math.prod(self.y.dims[2:])

    @property
    def products(self) -> int:
        """All products of the convolution."""
        return math.prod(self.y.dims) * math.prod(self.w.dims[1:])

    @property
    def plain(self) -> bool:
        """Whether the convolution's sum is the result, with nothing done to it."""
        trivial = self.alpha == 1.0 and self.beta == 0.0 and self.bias is None
        return trivial and self.epilogue == Epilogue()

    def graph(self) -> OperationGraph:
        """What an engine is asked for."""
        specs = {"x": self.x, "w": self.w, "y": self.y, "bias": self.bias}
        return lower(message(self, {name: _unbound(spec) for name, spec in specs.items()})).graph

    def __str__(self) -> str:
        extras = [f"{name}={spec}" for name, spec in (("x", self.x), ("w", self.w), ("y", self.y))]
        extras += [f"strides={[spec.strides for spec in (self.x, self.w, self.y)]}", str(self.conv)]
        if not self.plain:
            extras += [f"alpha={self.alpha} beta={self.beta} bias={self.bias} {self.epilogue}"]
        return f"{self.kind.value}: " + ", ".join([*extras, str(self.numerics)])


@dataclass(frozen=True)
class Ran:
    """What an engine made of a case."""

    values: np.ndarray
    plan: str


def message(case: Case, refs: dict[str, BufferRef | None]) -> Compute:
    """The request for a case whose tensors are in these buffers."""
    shared: Any = {"conv": case.conv, "alpha": case.alpha, "beta": case.beta, "numerics": case.numerics}
    x, w, y = (refs[name] for name in "xwy")
    assert x is not None
    assert w is not None
    assert y is not None
    if case.kind is Kind.FORWARD:
        return ConvFwd(x=x, w=w, y=y, bias=refs["bias"], epilogue=case.epilogue, **shared)
    if case.kind is Kind.BACKWARD_DATA:
        return ConvBwdData(dy=y, w=w, dx=x, **shared)
    return ConvBwdFilter(x=x, dy=y, dw=w, **shared)


def arrays(case: Case) -> dict[str, np.ndarray]:
    """Values of every tensor that is read, by the name in `Case`: the result's only where beta is not 0."""
    rng = np.random.default_rng(case.seed)
    drawn = {name: _draw(rng, spec, case) for name, spec in case.operands.items()}
    if case.beta:
        drawn[RESULT[case.kind]] = _draw(rng, case.result, case)
    if case.bias is not None:
        drawn["bias"] = _draw(rng, case.bias, case)
    return drawn


def run(
    engine: Engine,
    case: Case,
    given: Mapping[str, np.ndarray] | None = None,
    builder: Builder | None = None,
) -> Ran:
    """Run a case on an open engine, into a result full of NaN, and a workspace too if it has a hook for that.

    `given` are the values to run it with; None for the case's own. `builder` makes the plan; None for the
    engine itself. Raises what they raise.
    """
    given = arrays(case) if given is None else given
    with workbench(engine) as bench:
        refs = {name: _place(bench, spec, given.get(name)) for name, spec in _specs(case).items()}
        asked = message(case, refs)
        plan = (builder or engine).build(lower(asked).graph, workspace_limit=None)
        engine.prepare(plan)
        getattr(engine, "poison_workspace", lambda: None)()
        bench.execute(plan, asked)
        result = refs[RESULT[case.kind]]
        assert result is not None
        return Ran(bench.read(result), plan.tag)


def _specs(case: Case) -> dict[str, TensorSpec | None]:
    return {"x": case.x, "w": case.w, "y": case.y, "bias": case.bias}


def _place(bench: Workbench, spec: TensorSpec | None, values: np.ndarray | None) -> BufferRef | None:
    if spec is None:
        return None
    return bench.empty(spec) if values is None else bench.place(values, spec)


def _draw(rng: np.random.Generator, spec: TensorSpec, case: Case) -> np.ndarray:
    if spec.dtype.is_floating:
        drawn = rng.integers(-2, 3, spec.dims) if case.whole else rng.standard_normal(spec.dims)
        return drawn.astype(spec.dtype.numpy)
    limits = np.iinfo(spec.dtype.value)
    if case.result.dtype is case.dtype:  # 8 bits that shall hold most of the sums
        return rng.integers(max(limits.min, -3), 4, spec.dims).astype(spec.dtype.numpy)
    largest = min(limits.max, 1000)
    return rng.integers(max(limits.min, -largest), largest, spec.dims, endpoint=True).astype(spec.dtype.numpy)


def _unbound(spec: TensorSpec | None) -> BufferRef | None:
    return None if spec is None else BufferRef(slot=0, generation=0, spec=spec, device="none")
