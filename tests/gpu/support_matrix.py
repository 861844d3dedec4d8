"""The support matrix: what the CUDA engine is to run, as one table of data.

The tests run every cell, and `docs/support.md` is written from the same cells. Of operation, arithmetic,
rank, layout and kind it has the full product; what comes on top (epilogues, and results wider than their
operands) is combined with those so that every pair of values occurs in some cell.
"""

from __future__ import annotations

import enum
import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cudnn_actor.protocol import Activation, ConvSpec, DType, Epilogue, Layout, Numerics, TensorSpec

from ..engines.refusals import may_refuse
from ..engines.workbench import spread
from .cases import RESULT, Case, Kind
from .pairs import all_pairs

__all__ = ["ARITHMETICS", "Arithmetic", "Cell", "Form", "cells"]


class Form(enum.StrEnum):
    """What is special about a convolution."""

    PLAIN = "plain"
    GROUPS = "groups"
    DEPTHWISE = "depthwise"
    DILATION = "dilation"
    ASYMMETRIC = "asymmetric padding"
    STRIDE = "stride 2"


@dataclass(frozen=True)
class Arithmetic:
    """Dtypes of operands and result, and TF32 or not."""

    operands: DType
    result: DType
    tf32: bool = False

    def __str__(self) -> str:
        name = self.operands.value + (" (TF32)" if self.tf32 else "")
        return (
            name
            if self.result is self.operands and self.result.is_floating
            else f"{name} → {self.result.value}"
        )


FLOATS = tuple(Arithmetic(d, d) for d in (DType.FLOAT64, DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16))
MIXED = (
    Arithmetic(DType.FLOAT32, DType.FLOAT32, tf32=True),
    Arithmetic(DType.FLOAT16, DType.FLOAT32),
    Arithmetic(DType.BFLOAT16, DType.FLOAT32),
)
BYTES = tuple(Arithmetic(DType.INT8, d) for d in (DType.INT32, DType.INT8, DType.FLOAT32))
UNSIGNED = (Arithmetic(DType.UINT8, DType.INT32),)
FULL = (*FLOATS, *BYTES)
"""Those of the full product."""
ARITHMETICS = (*FLOATS, *MIXED, *BYTES, *UNSIGNED)
RANKS = (1, 2, 3)
LAYOUTS = tuple(Layout)
NO_EPILOGUE, SCALED, BIASED, EVERYTHING = "none", "alpha, beta", "bias", "alpha, beta, bias, relu"
EPILOGUES = (SCALED, BIASED, EVERYTHING, *(a.value for a in Activation if a is not Activation.IDENTITY))


@dataclass(frozen=True)
class Cell:
    """One combination that the engine is asked for."""

    kind: Kind
    arithmetic: Arithmetic
    rank: int
    layout: Layout
    form: Form
    epilogue: str = NO_EPILOGUE

    @property
    def name(self) -> str:
        """As pytest shows it, and as it stands in records."""
        parts = [self.kind, self.arithmetic, f"{self.rank}D", self.layout, self.form, self.epilogue]
        text = "-".join(map(str, parts)).replace(" → ", "_to_").replace(" ", "_")
        return text.translate({ord(c): None for c in "(),"}).lower()

    @property
    def refused(self) -> str | None:
        """Why the engine refuses it as `UnsupportedGraph`; None for what it must run."""
        return _refusal(self)

    def case(self, seed: int) -> Case:
        """A problem of this cell: random dims, no two spatial ones alike."""
        entropy = [seed, *self.name.encode()]
        rng = np.random.default_rng(entropy)
        x, w, conv = _shape(rng, self.rank, self.form, self.arithmetic)
        a = self.arithmetic
        dims = {"x": x, "w": w, "y": conv.output_dims(x, w)}
        dtypes = dict.fromkeys("xwy", a.operands) | {RESULT[self.kind]: a.result}
        specs: dict[str, Any] = {name: _spec(dims[name], dtypes[name], self.layout) for name in "xwy"}
        extras = _epilogue(self.epilogue, w[0], DType.FLOAT64 if a.result is DType.FLOAT64 else DType.FLOAT32)
        numerics = Numerics(tf32=a.tf32)
        return Case(kind=self.kind, conv=conv, numerics=numerics, seed=entropy, **specs, **extras)


@functools.cache
def _refusal(cell: Cell) -> str | None:
    return may_refuse("cuda", cell.case(0).graph())


@functools.cache
def cells() -> tuple[Cell, ...]:
    """The whole table, in a fixed order."""
    every = [*_full_product(), *_pairs()]
    return tuple(dict.fromkeys(every))


def _full_product() -> Iterator[Cell]:
    for kind, arithmetic in itertools.product(Kind, FULL):
        if arithmetic.operands.is_floating or kind is Kind.FORWARD:
            yield from itertools.starmap(Cell, itertools.product([kind], [arithmetic], RANKS, LAYOUTS, Form))


def _pairs() -> Iterator[Cell]:
    shapes: tuple[Sequence[Any], ...] = (RANKS, LAYOUTS, tuple(Form))
    extras = (NO_EPILOGUE, *EPILOGUES)
    for row in all_pairs((Kind.FORWARD,), (*FLOATS, *MIXED), *shapes, extras):
        yield Cell(*row)
    # Depthwise bytes are refused without an epilogue already, so they would say nothing about one.
    grouped = [form for form in Form if form is not Form.DEPTHWISE]
    for row in all_pairs((Kind.FORWARD,), (*BYTES, *UNSIGNED), RANKS, LAYOUTS, grouped, extras):
        yield Cell(*row)
    for kind in (Kind.BACKWARD_DATA, Kind.BACKWARD_FILTER):
        for row in all_pairs((kind,), (*FLOATS, *MIXED), *shapes, (NO_EPILOGUE, SCALED)):
            yield Cell(*row)
        yield Cell(kind, BYTES[0], 2, Layout.NHWC, Form.PLAIN)


_EXTENTS = {1: (24, 80), 2: (8, 20), 3: (5, 9)}
"""Spatial dims of x, by rank: from, and up to but not including."""


def _shape(
    rng: np.random.Generator, rank: int, form: Form, arithmetic: Arithmetic
) -> tuple[tuple[int, ...], tuple[int, ...], ConvSpec]:
    """Dims of x and w, and the convolution."""
    groups = int(rng.integers(2, 5)) if form is Form.GROUPS else 1
    # Bytes are multiplied four channels at a time; floats take what comes.
    channels, filters = (
        4 * rng.integers(1, 5, 2) if not arithmetic.operands.is_floating else rng.integers(3, 14, 2)
    )
    if form is Form.DEPTHWISE:
        groups, channels, filters = int(rng.integers(8, 17)), 1, int(rng.integers(1, 3))
    extents = rng.choice(np.arange(*_EXTENTS[rank]), rank, replace=False)
    taps = rng.permutation([1, 2, 3] if rank == 3 else [2, 3, 5])[:rank]
    pad = rng.integers(0, 2, rank)
    pre, post = (
        (rng.integers(0, 2, rank), 2 + rng.integers(0, 2, rank)) if form is Form.ASYMMETRIC else (pad, pad)
    )
    conv = ConvSpec(
        pre_padding=_ints(pre),
        post_padding=_ints(post),
        stride=(2 if form is Form.STRIDE else 1,) * rank,
        dilation=(2 if form is Form.DILATION else 1,) * rank,
        groups=groups,
    )
    extents = np.maximum(extents, conv.dilation[0] * (taps - 1) + 1)
    x = (int(rng.integers(1, 4)), int(channels) * groups, *_ints(extents))
    return x, (int(filters) * groups, int(channels), *_ints(taps)), conv


def _spec(dims: tuple[int, ...], dtype: DType, layout: Layout) -> TensorSpec:
    return spread(dims, dtype) if layout is Layout.STRIDED else TensorSpec.packed(dims, dtype, layout)


def _epilogue(name: str, filters: int, bias: DType) -> dict[str, Any]:
    """The fields of a `Case` that stand for an epilogue's name."""
    scaled = {"alpha": 0.75, "beta": -0.5}
    biased = {"bias": TensorSpec.packed((filters,), bias)}
    by_name: dict[str, dict[str, Any]] = {
        NO_EPILOGUE: {},
        SCALED: scaled,
        BIASED: biased,
        EVERYTHING: scaled | biased | {"epilogue": Epilogue(activation=Activation.RELU)},
    }
    return by_name.get(name) or (
        {} if name in by_name else {"epilogue": Epilogue(activation=Activation(name))}
    )


def _ints(values: np.ndarray) -> tuple[int, ...]:
    return tuple(map(int, values))
