"""Norms and their gradients as passes over lines: see `kernels.norm_kernels`.

Unlike the operations of `in_lines`, they are no traces of the definitions. A definition goes over a line
twice, but these kernels find its mean and its squared distances in one pass, and may cut it into parts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from cudnn_actor.engines.cuda.kernels.norm_kernels import Pass

__all__ = ["CUDNN_NAMES", "ELEMENTS", "Described", "backward", "forward"]

CUDNN_NAMES: Mapping[str, str] = {
    "x": "input",
    "dy": "grad",
    "scale": "scale",
    "bias": "bias",
    "mean": "mean",
    "inverse_deviation": "inv_variance",
    "inverse_rms": "inv_variance",
    "running_mean": "in_running_mean",
    "running_variance": "in_running_var",
}
"""The names of norms' inputs in cuDNN's frontend."""
ELEMENTS = ("x", "y", "dy", "dx")
"""The operands that have an element for each of x's."""


class Described(NamedTuple):
    """A norm without the operations around it, in terms of its kernels.

    Parameters
    ----------
    dims, passes, numbers
        As in `Norm`.
    split
        Returns the strides over `dims` for strides over x's dims.
    beside
        The strides over `dims` of the operands that do not have x's dims, by name.
    """

    dims: tuple[int, ...]
    split: Callable[[Sequence[int]], tuple[int, ...]]
    beside: Mapping[str, tuple[int, ...]]
    passes: tuple[Pass, ...]
    numbers: tuple[float, float, float] = (0.0, 0.0, 0.0)


_NORMAL = "(({x} - {mean}) * {inverse_deviation})", "({x} * {inverse_rms})"
"""The C expression of a normalised element: of norms with a mean, and of those without."""


def forward(names: Collection[str], axes: tuple[int, ...], *, centred: bool, **results: str) -> Pass:
    """The pass of a norm of lines along some axes, with these operands; `n0` is its epsilon.

    `centred`: whether elements are divided by the deviation, after the mean is subtracted, and not by the
    root mean square. `results`: the expressions of further results that have one element for each line.
    """
    scale, bias = " * {scale}" * ("scale" in names), " + {bias}" * ("bias" in names)
    if not centred:
        inverse = "1 / sqrt({state}.first / (T)length + n0)"
        changed = f"{{x}} * {{high}}{scale}"
        return Pass(axes, None, ("{x} * {x}", "(T)0"), ("(T)0", inverse), {"inverse_rms": "{high}"}, changed)
    inverse = "1 / sqrt({state}.squares / (T)length + n0)"
    statistics = {"mean": "{low}", "inverse_deviation": "{high}"}
    changed = f"({{x}} - {{low}}) * {{high}}{scale}{bias}"
    return Pass(axes, "{x}", (), ("{state}.mean", inverse), statistics | results, changed)


def backward(names: Collection[str], axes: tuple[int, ...], weights: tuple[int, ...]) -> tuple[Pass, ...]:
    """The passes of a norm's gradients; see `forward`. `weights`: the axes that dscale and dbias sum over."""
    centred = "mean" in names
    normal, inverse = _NORMAL[not centred], "{inverse_deviation}" if centred else "{inverse_rms}"
    sums, of_weights = ("{dy}", f"{{dy}} * {normal}"), {"dscale": "{state}.second", "dbias": "{state}.first"}
    scale = " * {scale}" * ("scale" in names)
    changed = f"({{dy}}{scale} - {{low}} - {normal} * {{high}}) * {inverse}"
    if weights == axes:  # the scale is one number for each line
        low, high = (f"{{state}}.{name}{scale} / (T)length" for name in ("first", "second"))
        return (Pass(axes, None, sums, (low, high), of_weights, changed),)
    low = "{state}.first / (T)length" if centred else "(T)0"
    slopes = tuple(f"{{dy}}{scale}{text}" for text in ("", f" * {normal}"))
    found = Pass(axes, None, slopes, (low, "{state}.second / (T)length"), {}, changed)
    if not {"dscale", "dbias"} & {*names}:
        return (found,)
    return Pass(weights, None, sums, results=of_weights), found
