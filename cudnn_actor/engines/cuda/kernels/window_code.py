"""The C++ of windows: which places of an input a window covers, and which windows cover a place.

The kernels of pooling and the self-check's reference of convolutions use it. For each spatial dim `n` they
define the numbers of `ConvSpec`: `pre{n}`, `stride{n}` and `dilation{n}`; and they define the type of indices
`I`, which must hold `window * stride + tap * dilation` also in the padding (`operations.pooling` has the
bound). A tap is an index of an element within a window. The statements of a dim end a turn of the loop that
they stand in, by `continue`, if its tap leads out of the tensor.

An adaptive window has no such numbers: its ends follow from the sizes of both tensors.
"""

from __future__ import annotations

__all__ = ["adaptive_loop", "covered_place", "covering_window"]


def covered_place(name: str, window: str, tap: str, n: int, size: str) -> str:
    """C statements that define `name`, the place of a window's tap along dim `n`. They skip the padding.

    `size`: the C expression of the number of places.
    """
    place = f"{window} * stride{n} - pre{n} + {tap} * dilation{n}"
    return f"const I {name} = {place}; if ({name} < 0 || {name} >= {size}) continue;"


def covering_window(name: str, place: str, tap: str, n: int, count: str) -> str:
    """C statements that define `name`, the window along dim `n` that has a place as this tap.

    `count`: the C expression of the number of windows.
    """
    start = f"I {name} = {place} + pre{n} - {tap} * dilation{n};"
    return f"{start} if ({name} < 0 || {name} % stride{n} || ({name} /= stride{n}) >= {count}) continue;"


def adaptive_loop(name: str, window: str, size: str, count: str) -> str:
    """The head of a C loop over the places `name` along a dim that an adaptive window covers.

    `size`, `count`: the C expressions of the numbers of places and of windows. With both exchanged, it is the
    loop over the windows that cover the place `window`.
    """
    start, more = f"{window} * {size} / {count}", f"{name} * {count} < ({window} + 1) * {size}"
    return f"for (I {name} = {start}; {more}; ++{name})"
