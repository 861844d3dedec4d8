"""The functions of a `GraphBuilder` that draw random numbers.

A state is int64 of dims (2,): the seed, and the number of the first element.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.graphs.expressions import Tensor
from cudnn_actor.protocol.graphs.graph_recorder import Recorder
from cudnn_actor.protocol.operations import (
    Cumulative,
    PointwiseMode,
    RandomBernoulli,
    RandomIntegers,
    Randomness,
    RandomNormal,
    RandomUniform,
    ReductionMode,
)
from cudnn_actor.protocol.operations.random import require_dropout
from cudnn_actor.protocol.types.checks import as_plain, is_whole
from cudnn_actor.protocol.types.dtypes import DType, DTypeLike
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["RandomFunctions"]


class RandomFunctions(Recorder):
    """Each function adds operations to the graph. Raises `InvalidRequest` if operands do not fit together."""

    def _draw(
        self, kind: type[Randomness[Any]], dims: Sequence[int], dtype: DTypeLike, state: Tensor, **of: Any
    ) -> Tensor:
        spec = TensorSpec.packed(dims, dtype)
        self._check_state(state)
        drawn = kind(dims=spec.dims, dtype=spec.dtype, state=state, **of)
        return self._result(drawn, deviation="std")

    def _check_state(self, state: Tensor) -> None:
        self._own("state", state)
        if state.dtype is not DType.INT64 or state.dims != (2,):
            raise InvalidRequest(
                field="state",
                value=state,
                problem="is not a state",
                fix="give a tensor of int64 and dims (2,): the seed, and the number of the first element",
            )

    def uniform(
        self,
        dims: Sequence[int],
        state: Tensor,
        low: float = 0.0,
        high: float = 1.0,
        *,
        dtype: DTypeLike = DType.FLOAT32,
    ) -> Tensor:
        """Numbers from `low` on and below `high`, all equally likely: see `RandomUniform`."""
        return self._draw(RandomUniform, dims, dtype, state=state, low=low, high=high)

    def normal(
        self,
        dims: Sequence[int],
        state: Tensor,
        mean: float = 0.0,
        std: float = 1.0,
        *,
        dtype: DTypeLike = DType.FLOAT32,
    ) -> Tensor:
        """Normally distributed numbers with that mean and standard deviation: see `RandomNormal`."""
        return self._draw(RandomNormal, dims, dtype, state=state, mean=mean, deviation=std)

    def bernoulli(
        self, dims: Sequence[int], state: Tensor, probability: float = 0.5, *, dtype: DTypeLike = DType.BOOL
    ) -> Tensor:
        """1 with that probability, else 0: see `RandomBernoulli`."""
        return self._draw(RandomBernoulli, dims, dtype, state=state, probability=probability)

    def randint(
        self, dims: Sequence[int], state: Tensor, low: int, high: int, *, dtype: DTypeLike = DType.INT64
    ) -> Tensor:
        """Whole numbers from `low` on and below `high`, all equally likely: see `RandomIntegers`."""
        return self._draw(RandomIntegers, dims, dtype, state=state, low=low, high=high)

    def dropout(self, x: Tensor, probability: Any, state: Tensor) -> Tensor:
        """x with each element 0 with that probability, else divided by 1 - probability.

        It takes one number of the state for each element of x. Two dropouts of the same state drop the same
        places: give the second one `advance(state, ...)`.
        """
        self._own("x", x)
        require_dropout("probability", probability, of="element")
        probability = float(probability)
        kept = self.bernoulli(x.dims, state, 1 - probability)
        return self.pointwise(PointwiseMode.SELECT, kept, x * (1 / (1 - probability)), 0.0)

    def advance(self, state: Tensor, count: int) -> Tensor:
        """The state after `count` numbers: what is drawn from it is independent of those.

        With `g.build(..., updates={"state": g.advance(state, count)})` each run draws other numbers.
        """
        self._check_state(state)
        count = as_plain(count)
        if not is_whole(count) or not 0 <= count < 1 << 63:
            raise InvalidRequest(
                field="count",
                value=count,
                problem="must be a whole number from 0 to 2**63 - 1",
                fix="give how many were drawn",
            )
        ones = state == state  # noqa: PLR0124
        places = self._result(Cumulative(x=ones, mode=ReductionMode.SUM, axis=0, exclusive=True))
        return state + places * count
