"""Products of groups of rows, each with a matrix of its own: the experts of a mixture.

The definition is PyTorch's, of `grouped_mm` with offsets.
https://docs.pytorch.org/docs/main/generated/torch.nn.functional.grouped_mm.html
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.operations.base import (
    ALLOCATED,
    Array,
    Operation,
    Region,
    Specs,
    T,
    require,
    require_floating,
)
from cudnn_actor.protocol.operations.example import Example
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["GroupedMatMul", "GroupedMatMulBackwardWeights"]

_ALL = slice(None)


class _Grouped(Operation[T]):
    """The base of both operations: rows of tokens in groups, one for each expert."""

    def _check_dims(self, specs: Specs, matrix: str, rank: int) -> None:
        """Check the ranks and dtypes of the inputs. `matrix`: the input of that rank beside the tokens."""
        require_floating(specs, "tokens")
        for name, wanted, dims in (
            ("tokens", 2, "(M, K)"),
            (matrix, rank, "(E, K, N)" if rank == 3 else "(M, N)"),
            ("offsets", 1, "(E,), a number for each expert"),
        ):
            if specs[name].rank != wanted:
                raise InvalidRequest(
                    field=name,
                    value=specs[name].dims,
                    problem=f"has rank {specs[name].rank}, and {wanted} is needed",
                    fix=f"give it dims {dims}",
                )
        require(specs, matrix, specs[matrix].dims, specs["tokens"].dtype)
        require(specs, "offsets", specs["offsets"].dims, DType.INT32)

    def _check_result(self, specs: Specs, name: str) -> None:
        """Check a result: of the operands' dtype or, where that is a half type, float32."""
        dtype = specs["tokens"].dtype
        wide = dtype if dtype is DType.FLOAT64 else DType.FLOAT32
        require(specs, name, self.infer(specs)[name].dims, dtype, wide)

    def samples(self, xp: Any, specs: Specs, draw: Callable[[TensorSpec], Array]) -> dict[str, Array]:
        """Groups of several sizes, some of them empty, and a few rows in none."""
        sizes = xp.maximum(draw(specs["offsets"]), 0)
        sizes[0] += 1
        ends = xp.cumsum(sizes)
        return {"offsets": xp.ceil(ends * (specs["tokens"].dims[0] / (float(ends[-1]) + 1)))}

    def _groups(self, xp: Any, offsets: Array, rows: int) -> Iterator[slice]:
        """The rows of each expert."""
        start = 0
        for end in xp.clip(xp.sort(offsets), 0, rows):
            yield slice(start, int(end))
            start = int(end)


class GroupedMatMul(_Grouped[T], tag=True):
    """y = each row of tokens times the matrix of its expert. Answered by a `Receipt`.

    The rows are sorted by expert: those of expert e begin where those of expert e - 1 end, and end before
    row `offsets[e]`. Rows from the last offset on belong to none. With weights transposed, it gives the
    gradient of the tokens.

    Parameters
    ----------
    tokens
        Dims (M, K), of a floating-point dtype.
    weights
        Dims (E, K, N), of tokens' dtype: a matrix for each expert.
    offsets
        Dims (E,), int32: where the rows of each expert end, ascending, from 0 to M. Any other numbers count
        as if they were sorted, those below 0 as 0, and those above M as M.
    y
        Result, dims (M, N), of tokens' dtype or, where that is a half type, float32; 0 in rows of no expert.
        Summed up in float32 (float64 of float64).
    """

    kind = "grouped_matmul"
    inputs = ("tokens", "weights", "offsets")
    outputs = ("y",)
    tokens: T
    weights: T
    offsets: T
    y: T = ALLOCATED

    def infer(self, specs: Specs) -> dict[str, TensorSpec]:
        self._check_dims(specs, "weights", 3)
        tokens, weights = specs["tokens"], specs["weights"]
        experts, _, columns = weights.dims
        require(specs, "weights", (experts, tokens.dims[1], columns))
        require(specs, "offsets", (experts,))
        return {"y": TensorSpec.packed((tokens.dims[0], columns), tokens.dtype)}

    def check(self, specs: Specs) -> None:
        self._check_result(specs, "y")

    def work(self, specs: Specs) -> int:
        return specs["y"].size * specs["tokens"].dims[1]

    def needs(self, specs: Specs, wanted: Mapping[str, Region]) -> dict[str, Region] | None:
        del specs
        rows, columns = wanted["y"]
        if rows != _ALL:  # the offsets count all of them
            return None
        return {"tokens": (_ALL, _ALL), "weights": (_ALL, _ALL, columns), "offsets": (_ALL,)}

    def evaluate(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        tokens, weights = values["tokens"], values["weights"]
        y = xp.zeros(specs["y"].dims)
        for expert, rows in enumerate(self._groups(xp, values["offsets"], len(tokens))):
            y[rows] = tokens[rows] @ weights[expert]
        return {"y": y}

    def gradient(self, g: Any, d: Mapping[str, Any]) -> dict[str, Any]:
        backward = GroupedMatMulBackwardWeights(tokens=self.tokens, dy=d["y"], offsets=self.offsets)
        turned = g.transpose(self.weights, (0, 2, 1))
        return {"tokens": g.grouped_matmul(d["y"], turned, self.offsets), "weights": g.apply(backward)}


class GroupedMatMulBackwardWeights(_Grouped[T], tag=True):
    """dweights = for each expert, the transpose of its rows of tokens times its rows of dy.

    Parameters
    ----------
    tokens, offsets
        As in the forward pass.
    dy
        Gradient of its result, dims (M, N), of tokens' dtype.
    dweights
        Gradient of the weights, dims (E, K, N), of tokens' dtype or, where that is a half type, float32; 0
        for an expert without rows.
    """

    kind = "grouped_matmul_bwd_weights"
    inputs = ("tokens", "dy", "offsets")
    outputs = ("dweights",)
    tokens: T
    dy: T
    offsets: T
    dweights: T = ALLOCATED

    def infer(self, specs: Specs) -> dict[str, TensorSpec]:
        self._check_dims(specs, "dy", 2)
        (rows, inner), (_, columns) = specs["tokens"].dims, specs["dy"].dims
        require(specs, "dy", (rows, columns))
        dims = (*specs["offsets"].dims, inner, columns)
        return {"dweights": TensorSpec.packed(dims, specs["tokens"].dtype)}

    def check(self, specs: Specs) -> None:
        self._check_result(specs, "dweights")

    def work(self, specs: Specs) -> int:
        return specs["tokens"].size * specs["dy"].dims[1]

    def needs(self, specs: Specs, wanted: Mapping[str, Region]) -> dict[str, Region] | None:
        del specs
        experts, rows, columns = wanted["dweights"]
        if experts != _ALL:
            return None
        return {"tokens": (_ALL, rows), "dy": (_ALL, columns), "offsets": (_ALL,)}

    def evaluate(self, xp: Any, values: Mapping[str, Array], specs: Specs) -> dict[str, Array]:
        tokens, dy = values["tokens"], values["dy"]
        dweights = xp.empty(specs["dweights"].dims)
        for expert, rows in enumerate(self._groups(xp, values["offsets"], len(tokens))):
            dweights[expert] = tokens[rows].T @ dy[rows]
        return {"dweights": dweights}

    def gradient(self, g: Any, d: Mapping[str, Any]) -> dict[str, Any]:
        turned = g.transpose(d["dweights"], (0, 2, 1))
        return {
            "tokens": g.grouped_matmul(self.dy, turned, self.offsets),
            "dy": g.grouped_matmul(self.tokens, d["dweights"], self.offsets),
        }


def examples() -> tuple[Example, ...]:
    """Rows of five experts."""
    given: dict[str, Any] = {"tokens": "tokens", "offsets": "offsets"}
    operations = (
        GroupedMatMul(**given, weights="weights", y="y"),
        GroupedMatMulBackwardWeights(**given, dy="dy", dweights="dweights"),
    )
    dims = {"tokens": (40, 24), "weights": (5, 24, 16), "offsets": (5,)}
    return (Example(dims=dims, dtypes={"offsets": DType.INT32}, operations=operations),)
