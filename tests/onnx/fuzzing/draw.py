"""What a case is drawn from: sizes, places, numbers and arrays, also at the edges of what is allowed."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["FLOATS", "Draw", "dtype_of"]

FLOATS = ("float32", "float32", "float32", "float64", "float16")
_EDGES = (0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 2.5, np.inf, -np.inf, np.nan, 1e-30, -1e-6, 300.0, -2e3, 3e4)
_SIZES, _CHANCES = (0, 1, 2, 3, 4, 5), (3, 18, 25, 25, 20, 9)
_RANKS, _CHANCES_OF_RANKS = (0, 1, 2, 3, 4, 5), (8, 20, 25, 25, 18, 4)


def dtype_of(kind: str) -> np.dtype[Any] | None:
    """NumPy's dtype of ONNX's "tensor(float)"; None for what is no tensor."""
    inner = kind.removeprefix("tensor(").removesuffix(")")
    if not kind.startswith("tensor("):
        return None
    return np.dtype(helper.tensor_dtype_to_np_dtype(getattr(TensorProto, inner.upper())))


class Draw(random.Random):
    """Draws for one case. Its flavour, one for all arrays of the case, says what values they have.

    Flavours: "plain" numbers; "ties", few whole numbers; "edges", also infinities, NaN, both zeros, large and
    very small ones.
    """

    def __init__(self, seed: str) -> None:
        super().__init__(seed)
        self.arrays = np.random.default_rng(self.getrandbits(62))
        self.flavour = self.choices(("plain", "ties", "edges"), (5, 3, 2))[0]
        self._types: dict[str, np.dtype[Any]] = {}

    # Sizes and places.

    def seldom(self, chance: float = 0.04) -> bool:
        """Whether something rare is drawn."""
        return self.random() < chance

    def size(self, *, empty: bool = True) -> int:
        """One dim: now and then 0 or 1."""
        return self.choices(_SIZES, _CHANCES)[0] or int(not empty)

    def dims(self, rank: int | None = None, least: int = 0, *, empty: bool = True) -> tuple[int, ...]:
        """Dims, of a rank that is drawn unless it is given."""
        if rank is None:
            rank = max(least, self.choices(_RANKS, _CHANCES_OF_RANKS)[0])
        return tuple(self.size(empty=empty) for _ in range(rank))

    def sizes(self, count: int, low: int, high: int) -> list[int]:
        """Numbers from `low` to `high`."""
        return [self.randint(low, high) for _ in range(count)]

    def axis(self, rank: int) -> int:
        """An axis, also from the end; seldom one that there is not."""
        if self.seldom(0.03):
            return self.choice((-rank - 1, rank, rank + 2))
        return self.randrange(-rank, rank) if rank else self.choice((0, -1))

    def axes(self, rank: int, *, least: int = 0) -> list[int]:
        """Several axes, each once, also from the end and in any order; seldom one twice or out of range."""
        found = self.sample(range(rank), self.randint(min(least, rank), rank))
        found = [axis - self.choice((0, rank)) for axis in found]
        return [*found, self.axis(rank)] if self.seldom(0.03) else found

    def broadcast(self, dims: Sequence[int]) -> tuple[int, ...]:
        """Dims that broadcast to these."""
        if self.random() < 0.5:
            return tuple(dims)
        kept = dims[self.randint(0, len(dims)) :]
        return tuple(1 if self.random() < 0.3 else dim for dim in kept)

    # Dtypes.

    def dtype(self, schema: Any, kind: str) -> np.dtype[Any]:
        """The dtype of one of a schema's types, the same each time. Mostly one that tensors here can have."""
        if kind not in self._types:
            allowed = next(
                (each.allowed_type_strs for each in schema.type_constraints if each.type_param_str == kind),
                [kind],
            )
            self._types[kind] = self._one_of(allowed)
        return self._types[kind]

    def _one_of(self, allowed: Iterable[str]) -> np.dtype[Any]:
        every = [each for kind in allowed if (each := dtype_of(kind)) is not None]
        usual = [each for each in every if DType.of(each) is not None]
        if np.dtype(np.float32) in usual and self.random() < 0.5:
            return np.dtype(np.float32)
        if not usual or (len(every) > len(usual) and self.seldom(0.03)):
            return self.choice([each for each in every if DType.of(each) is None] or [np.dtype(np.float32)])
        return self.choice(usual)

    def prefer(self, kind: str, dtype: Any) -> None:
        """Fix the dtype of a schema's type."""
        self._types[kind] = np.dtype(dtype)

    # Arrays.

    def array(self, dtype: Any, dims: Sequence[int]) -> np.ndarray:
        """An array of the case's flavour."""
        dtype, dims = np.dtype(dtype), tuple(dims)
        if dtype == np.bool_:
            return self.arrays.integers(0, 2, dims).astype(bool)
        if dtype.kind in "OU":
            return np.array(self.arrays.choice(["", "a", "bc", "a b"], dims), dtype=object).reshape(dims)
        if dtype.kind in "iu":
            return self._integers(dtype, dims)
        if self.flavour == "ties":
            found = self.arrays.integers(-2, 3, dims).astype(np.float64)
        else:
            found = np.asarray(self.arrays.standard_normal(dims) * self.choice((1, 1, 3)))
        if self.flavour == "edges" and found.size:
            spots = self.arrays.random(dims) < 0.25
            found = np.where(spots, self.arrays.choice(_EDGES, dims), found)
        with np.errstate(all="ignore"):
            return np.asarray(found).astype(dtype)

    def _integers(self, dtype: np.dtype[Any], dims: tuple[int, ...]) -> np.ndarray:
        low, high = np.iinfo(dtype).min, np.iinfo(dtype).max
        near = self.arrays.integers(max(low, -4), 5, dims)
        if self.flavour != "edges":
            return near.astype(dtype)
        far = self.arrays.integers(low, high, dims, dtype=dtype, endpoint=True)
        return np.where(self.arrays.random(dims) < 0.4, far, near.astype(dtype)).astype(dtype)

    def whole(self, low: int, high: int, dims: Sequence[int] = (), dtype: Any = np.int64) -> np.ndarray:
        """Whole numbers from `low` to below `high`."""
        return self.arrays.integers(low, max(high, low + 1), tuple(dims)).astype(dtype)

    def positive(self, dtype: Any, dims: Sequence[int]) -> np.ndarray:
        """Numbers above 0, as variances and scales are."""
        return np.asarray(self.arrays.random(tuple(dims)) + 0.1).astype(dtype)
