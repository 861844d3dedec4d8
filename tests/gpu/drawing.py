"""Random convolutions: everything that a request can say, in small tensors."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from cudnn_actor.protocol import Activation, ConvSpec, DType, Epilogue, Layout, Numerics, TensorSpec

from .bounds import EXACT_SCALARS
from .cases import RESULT, Case, Kind
from .choices import Choices
from .support_matrix import ARITHMETICS, Arithmetic

__all__ = ["draw"]

MOST_VALUES, MOST_PRODUCTS, MOST_BYTES = 200_000, 20_000_000, 12 << 20
_WITH_PARAMETER = (Activation.LEAKY_RELU, Activation.SWISH, Activation.ELU, Activation.SOFTPLUS)
_EXTENTS = {1: 400, 2: 40, 3: 14}


def draw(seed: int, number: int) -> Case:
    """Case `number` of a seed: the same in every process, whatever was drawn before it."""
    return _Draw(np.random.default_rng([seed, number]), (seed, number, 1)).case()


class _Draw(Choices):
    def __init__(self, rng: np.random.Generator, seed: tuple[int, ...]) -> None:
        super().__init__(rng)
        self._seed = seed

    def case(self) -> Case:
        while (case := self._attempt()) is None:
            pass
        return case

    def _attempt(self) -> Case | None:
        """A case, unless it has turned out too large."""
        arithmetic = self.one(ARITHMETICS)
        kind = self.one(Kind) if arithmetic.operands.is_floating else Kind.FORWARD
        x, w, conv = self._shape(arithmetic)
        dims = {"x": x, "w": w, "y": conv.output_dims(x, w)}
        dtypes = dict.fromkeys("xwy", arithmetic.operands) | {RESULT[kind]: arithmetic.result}
        shared = self.one(Layout) if self.chance(0.6) else None  # else each its own
        specs: dict[str, Any] = {name: self.spec(dims[name], dtypes[name], shared) for name in "xwy"}
        if sum(spec.nbytes for spec in specs.values()) > MOST_BYTES:
            return None
        whole = arithmetic.operands.is_floating and self.chance(0.3)
        case = Case(
            kind=kind,
            conv=conv,
            whole=whole,
            seed=self._seed,
            numerics=Numerics(tf32=arithmetic.tf32, deterministic=self.chance(0.1)),
            **specs,
            **self._scalars(whole),
            **(self._epilogue(w[0], arithmetic, whole) if kind is Kind.FORWARD else {}),
        )
        fits = max(map(math.prod, dims.values())) <= MOST_VALUES and case.products <= MOST_PRODUCTS
        return case if fits else None

    def _shape(self, arithmetic: Arithmetic) -> tuple[tuple[int, ...], tuple[int, ...], ConvSpec]:
        rank = self.one((1, 2, 2, 2, 3))
        channels, filters = self.size(96), self.size(96)
        groups = self.one((1, 1, 1, 2, 3, 5))
        if groups > 1:
            channels, filters = self.size(24), self.size(24)
        if self.chance(0.15):
            groups, channels, filters = self.size(64), 1, self.one((1, 1, 2))
        if self.chance(0.8 if not arithmetic.operands.is_floating else 0.4):
            quantum = self.one((4, 8))  # what tensor cores like
            channels, filters = (quantum * -(-size // quantum) for size in (channels, filters))
        taps = self.each(rank, 1, 4 if rank == 3 else 6)
        dilation = self.each(rank, 1, 4) if self.chance(0.3) else (1,) * rank
        stride = self.each(rank, 1, 4) if self.chance(0.4) else (1,) * rank
        pre = self.each(rank, 0, 4)
        post = self.each(rank, 0, 4) if self.chance(0.3) else pre
        conv = ConvSpec(pre_padding=pre, post_padding=post, stride=stride, dilation=dilation, groups=groups)
        least = [
            max(1, d * (t - 1) + 1 - a - b) for d, t, a, b in zip(dilation, taps, pre, post, strict=True)
        ]
        extents = (size + self.size(_EXTENTS[rank]) - 1 for size in least)
        return (self.size(8), channels * groups, *extents), (filters * groups, channels, *taps), conv

    def _scalars(self, whole: bool) -> dict[str, Any]:
        if self.chance(0.6):
            return {}
        if whole:
            return {"alpha": self.one(EXACT_SCALARS), "beta": self.one((0.0, *EXACT_SCALARS))}
        alpha, beta = (float(v) for v in self.rng.uniform(-2, 2, 2))
        return {"alpha": self.one((1.0, alpha, 0.0, alpha)), "beta": self.one((0.0, beta))}

    def _epilogue(self, filters: int, arithmetic: Arithmetic, whole: bool) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        pointwise = DType.FLOAT64 if arithmetic.operands is DType.FLOAT64 else DType.FLOAT32
        if self.chance(0.3):
            fields["bias"] = TensorSpec.packed((filters,), self.one((arithmetic.result, pointwise)))
        if self.chance(0.35):
            activation = Activation.RELU if whole else self.one(Activation)
            takes = activation in _WITH_PARAMETER and self.chance(0.5)
            parameter = float(self.rng.uniform(0.1, 2)) if takes else None
            fields["epilogue"] = Epilogue(activation=activation, parameter=parameter)
        return fields
