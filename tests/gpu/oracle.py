"""What a case's result is: the float64 CPU engine on float64 copies of the operands as they were rounded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cudnn_actor.engines.cpu import CpuEngine
from cudnn_actor.engines.cpu.rounding import rounding_to
from cudnn_actor.protocol import DType, Epilogue, TensorSpec

from .cases import RESULT, Case, arrays, run

__all__ = ["Truth", "rounded", "truth"]


@dataclass(frozen=True)
class Truth:
    """A case's exact result, but for float64's own rounding.

    Parameters
    ----------
    wanted
        The result in float64, not rounded to its dtype.
    convolved
        The convolution alone, times alpha; the same array where nothing else is done.
    magnitude
        |alpha * conv| + |beta * result before| + |bias|, element by element: what pointwise rounding is
        relative to. None where the convolution is all.
    """

    wanted: np.ndarray
    convolved: np.ndarray
    magnitude: np.ndarray | None


def truth(case: Case) -> Truth:
    """Compute a case in float64."""
    given = {name: array.astype(np.float64) for name, array in arrays(case).items()}
    if case.plain:
        wanted = _compute(case, given)
        return Truth(wanted, wanted, None)
    bare = replace(case, beta=0.0, bias=None, epilogue=Epilogue())
    convolved = _compute(bare, given)
    magnitude = np.abs(convolved)
    if case.beta:
        magnitude = magnitude + np.abs(case.beta * given[RESULT[case.kind]])
    if case.bias is not None:
        magnitude = magnitude + np.abs(given["bias"]).reshape(1, -1, *(1 for _ in convolved.shape[2:]))
    return Truth(_compute(case, given), convolved, magnitude)


def rounded(values: np.ndarray, dtype: DType) -> np.ndarray:
    """Float64 values in another dtype, rounded once to nearest; integers saturate."""
    result: np.ndarray = np.empty(values.shape, dtype.numpy)
    with np.errstate(over="ignore"):
        rounding_to(result.dtype)(result, values.copy())
    return result


def _compute(case: Case, given: dict[str, np.ndarray]) -> np.ndarray:
    """Run a case on the CPU engine, everything in it float64 and packed."""
    wide = {name: _wide(getattr(case, name)) for name in ("x", "w", "y", "bias")}
    engine = CpuEngine(exact=True)
    engine.open()
    try:
        return run(engine, replace(case, **wide), given).values
    finally:
        engine.close()


def _wide(spec: TensorSpec | None) -> Any:
    return None if spec is None else TensorSpec.packed(spec.dims, DType.FLOAT64)
