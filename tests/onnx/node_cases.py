"""The cases of ONNX's node suite, made without what takes most of the time to make them.

ONNX computes what each case wants when a module of cases is imported. Two parts take most of that: the
results of pooling, by a loop in Python over all windows, and the source text of each case, which only ONNX's
documentation has. `pooled` computes the same in NumPy, and the texts are left out. In `make test-all`, ONNX
does all of it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from onnx.reference.ops import op_pool_common

from ..whole import WHOLE

__all__ = ["computed_cases", "pooled"]


def computed_cases() -> list[Any]:
    """Every case of the suite, with the results that it wants."""
    with warnings.catch_warnings(), np.errstate(all="ignore"), _quick_parts():
        warnings.simplefilter("ignore")
        from onnx.backend.test.loader import load_model_tests

        return list(load_model_tests(kind="node"))


@contextlib.contextmanager
def _quick_parts() -> Iterator[None]:
    """Within this, modules of cases that are imported use the quick parts."""
    if WHOLE:
        yield
        return
    from onnx.backend.test.case import base

    pool, snippet = op_pool_common.pool, base.process_snippet
    op_pool_common.pool, base.process_snippet = pooled, _without_text
    try:
        yield
    finally:
        op_pool_common.pool, base.process_snippet = pool, snippet


def _without_text(op_name: str, name: str, export: Any) -> tuple[str, str]:
    del op_name, export
    return name, ""


def pooled(  # noqa: PLR0917 - it is called as ONNX's function
    padded: np.ndarray[Any, Any],
    x_shape: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int] | None,
    out_shape: Sequence[int],
    pooling_type: str,
    pads_required: Sequence[int] | None = None,
    pads: Sequence[int] | None = None,
    dilations: Sequence[int] | None = None,
    count_include_pad: int = 0,
    p: int = 1,
) -> np.ndarray[Any, Any]:
    """What `onnx.reference.ops.op_pool_common.pool` returns, in float64 and rounded once.

    Elements behind the input and its padding belong to no window. Those that are NaN, which padding is, count
    for nothing, unless padding counts.
    """
    rank = len(x_shape) - 2
    strides, steps = strides or [1] * rank, [1] * rank if dilations is None else dilations
    required, around = _both_sides(pads_required, rank), _both_sides(pads, rank)
    reach = [1 + (size - 1) * step for size, step in zip(kernel, steps, strict=True)]
    places = [
        np.arange(int((x_shape[i + 2] + required[i] + required[i + rank] - reach[i]) / strides[i] + 1))
        for i in range(rank)
    ]
    ends = [x_shape[i + 2] + around[i] + around[i + rank] for i in range(rank)]
    values, within = [], []
    for offset in itertools.product(*map(range, kernel)):
        pixels = [strides[i] * places[i] + offset[i] * steps[i] for i in range(rank)]
        inside = [each < end for each, end in zip(pixels, ends, strict=True)]
        within.append(functools.reduce(np.logical_and.outer, inside))
        last = [np.minimum(each, size - 1) for each, size in zip(pixels, padded.shape[2:], strict=True)]
        values.append(padded[(slice(None), slice(None), *np.ix_(*last))])
    window = np.stack(values).astype(np.float64)
    counted = np.broadcast_to(np.stack(within)[:, None, None], window.shape)
    if not count_include_pad or pooling_type == "MAX":
        counted = counted & ~np.isnan(window)
    y = np.zeros([*x_shape[:2], *out_shape])
    y[(slice(None), slice(None), *(slice(len(each)) for each in places))] = _of_windows(
        window, counted, pooling_type, p
    )
    return y.astype(padded.dtype)


def _of_windows(
    window: np.ndarray[Any, Any], counted: np.ndarray[Any, Any], pooling_type: str, p: int
) -> np.ndarray[Any, Any]:
    found: np.ndarray[Any, Any]
    if pooling_type == "AVG":
        found = np.sum(window, axis=0, where=counted) / np.sum(counted, axis=0)
    elif pooling_type == "MAX":
        found = np.max(window, axis=0, where=counted, initial=-np.inf)
    else:
        assert pooling_type == "LPPOOL"
        found = np.sum(np.abs(window) ** p, axis=0, where=counted) ** (1 / p)
    return found


def _both_sides(pads: Sequence[int] | None, rank: int) -> Sequence[int]:
    if pads is None:
        return [0] * (2 * rank)
    return list(pads) * rank * 2 if len(pads) == 1 else pads
