"""Copies values from and to the host; casts only within a kind, so that values keep their meaning."""

from __future__ import annotations

import _thread
import contextlib
import itertools
import math
import os
import threading
from collections.abc import Callable, Sequence

import numpy as np

from cudnn_actor.engines.base import EngineFailure
from cudnn_actor.engines.cpu.rounding import integer_range, rounding_to
from cudnn_actor.protocol.errors import InvalidRequest, Words
from cudnn_actor.protocol.types.dtypes import DType

__all__ = [
    "check_target",
    "check_values",
    "copy_parts",
    "copy_together",
    "element",
    "fill",
    "read",
    "store",
    "write",
]

_MOST_THREADS = 4
"""The most threads that copy one array, and at most half as many as there are cores: more would only wait for
memory."""
_PART_BYTES = 2 << 20
"""The least that each thread copies. To start a thread takes as long as to copy a quarter of this."""


def write(dst: np.ndarray, array: np.ndarray) -> None:
    """Copy host values of the same dims into a buffer. Raises as `check_values` does."""
    check_values(dst.shape, dst.dtype, array)
    store(dst, array)


def check_values(dims: tuple[int, ...], dtype: np.dtype[np.generic], array: np.ndarray) -> None:
    """Raise `InvalidRequest` on `data` unless `store` may put an array into a buffer of `dims` and `dtype`.

    Refused are other dims, values that are not real numbers, floats into integers or bool, and integers out
    of range; the range of bool is 0 and 1.
    """
    if array.shape != dims:
        problem = f"has other dims than the buffer, {dims}"
        raise _bad_data(array.shape, problem, "reshape it, or upload it to a new buffer")
    _check_kind(dtype, array)


def store(dst: np.ndarray, array: np.ndarray) -> None:
    """Store checked values into an array of the same dims.

    Floats are rounded to nearest and overflow to infinity. Integers are kept exactly, or rounded to
    nearest if `dst` has a floating-point dtype. Several threads copy a large array.
    """
    if array.dtype == dst.dtype:
        threads = _threads_for(array.nbytes)
        if threads > 1 and _are_flat(dst, array):
            copy_together(dst.reshape(-1).view(np.uint8), array.reshape(-1).view(np.uint8), threads)
        else:
            dst[...] = array
        return
    with np.errstate(all="ignore"):
        if array.dtype == np.float64:
            rounding_to(dst.dtype)(dst, array)
        else:
            dst[...] = array


def copy_parts(
    dst: np.ndarray,
    src: np.ndarray,
    parts: Sequence[tuple[int, int, int]],
    note: Callable[[int], object],
    *,
    rounds: int,
) -> bool:
    """Copy parts of an array of bytes, in order, and call `note` with the number of each that is copied.

    A part is given by its number, and by the bytes at which it begins and ends. Several threads copy a large
    array, in at most `rounds` rounds. At the end of a round, each calls `note` for its parts. Another round
    costs some 50 us, because all threads want the interpreter's lock at the same time.

    Returns whether this thread has copied all. If not, another may have failed in `note`.
    """
    threads = _threads_for(src.nbytes)
    if threads == 1:  # at once: a device waits for the first part
        for number, begin, end in parts:
            dst[begin:end] = src[begin:end]  # in fewer steps than `copyto`
            note(number)
        return True
    together = -(-len(parts) // (threads * rounds))
    todo = []
    for first in range(0, len(parts), together):
        some = parts[first : first + together]
        begin, end = some[0][1], some[-1][2]
        todo.append(([number for number, _, _ in some], dst[begin:end], src[begin:end]))
    _share_out([todo[first::threads] for first in range(threads)], note)
    return False


def _threads_for(nbytes: int) -> int:
    """How many threads copy an array of this size."""
    if nbytes < 2 * _PART_BYTES:  # first: to ask the kernel takes longer than to copy a small array
        return 1
    return max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // 2, nbytes // _PART_BYTES))


def _are_flat(*arrays: np.ndarray) -> bool:
    return all(array.flags.c_contiguous for array in arrays)


def copy_together(dst: np.ndarray, src: np.ndarray, threads: int) -> None:
    """Copy bytes, a part on each of several threads."""
    step = -(-src.nbytes // threads)
    starts = range(0, src.nbytes, step)
    _share_out([[((), dst[at : at + step], src[at : at + step])] for at in starts], lambda _: None)


_Share = Sequence[tuple[Sequence[int], np.ndarray, np.ndarray]]
"""The share of one thread: the numbers of parts that lie side by side, their destination, and their
source."""


def _share_out(shares: Sequence[_Share], note: Callable[[int], object]) -> None:
    """Copy the first share on this thread, the others on helper threads.

    The helpers have ended when this returns, and when a signal handler raises in it: else they would go on
    writing to `dst` after the caller was told that the copy has failed. A handler that raises once more while
    they are waited for leaves them to themselves.

    One thread copies 5 to 10 GB/s, and half as much into memory that is used for the first time. NumPy
    releases the interpreter's lock meanwhile. Helpers are started for each copy, so none is left when a
    service stops or the process forks. `threading.Thread.start` waits until its thread runs: that of each
    helper, one after the other. `_thread` does not wait.
    """
    first, *others = shares
    copying = [_thread.allocate_lock() for _ in others]
    for lock in copying:
        lock.acquire()
    helped = [(share, note, lock) for share, lock in zip(others, copying, strict=True)]
    started: list[int] = []
    try:
        with contextlib.suppress(RuntimeError):  # the system gives no thread
            # One step: who is in `started` has been started, also where a signal handler raises.
            started.extend(map(_thread.start_new_thread, itertools.repeat(_help), helped))
        for share in (first, *others[len(started) :]):
            _copy_share(share, note)
    finally:
        for lock in copying[: len(started)]:
            lock.acquire()


def _copy_share(share: _Share, note: Callable[[int], object]) -> None:
    for numbers, dst, src in share:
        np.copyto(dst, src)
        for number in numbers:
            note(number)


def _help(share: _Share, note: Callable[[int], object], copying: threading.Lock) -> None:
    """Copy a helper thread's share, and release a lock."""
    try:
        _copy_share(share, note)
    finally:
        copying.release()


def read(src: np.ndarray, into: np.ndarray | None = None) -> np.ndarray:
    """A buffer's values as a C-contiguous array: a new one, or `into`. Raises as `check_target` does."""
    if into is None:
        return np.array(src, order="C")
    check_target(src.shape, src.dtype, into)
    np.copyto(into, src, casting="no")
    return into


def check_target(dims: tuple[int, ...], dtype: np.dtype[np.generic], into: np.ndarray) -> None:
    """Raise `EngineFailure` unless an array can receive a buffer of `dims` and `dtype` unconverted.

    A device that writes to the array directly does not check its bounds.
    """
    flags = into.flags
    if (into.shape, into.dtype) != (dims, dtype) or not (flags.c_contiguous and flags.writeable):
        kind = f"{'' if flags.writeable else 'read-only, '}{'' if flags.c_contiguous else 'strided, '}"
        given, wanted = f"{kind}{into.dtype} {into.shape}", f"C-contiguous {dtype} {dims}"
        raise EngineFailure("BAD_TARGET", f"`into` must be {wanted}, not {given}")


def fill(dst: np.ndarray, value: float) -> None:
    """Set every element to `value`. Raises as `element` does."""
    dst[...] = element(dst.dtype, value)[0]


def element(dtype: np.dtype[np.generic], value: float) -> np.ndarray:
    """An array with one element, `value`: exact, or rounded to nearest if `dtype` is floating-point.

    Raises `InvalidRequest` on `value` if the dtype cannot represent it: for integers NaN, fractions and
    numbers out of range; for bool all but False, True, 0 and 1; for floats finite numbers that would become
    infinite.
    """
    one = np.empty(1, dtype)
    if dtype.kind in "iub":
        least, largest = integer_range(dtype)
        if not (least <= value <= largest and int(value) == value):
            raise _bad_value(value, dtype, f"use a whole number from {least} to {largest}")
        one[0] = int(value)
        return one
    with np.errstate(all="ignore"):
        rounding_to(dtype)(one, np.array([value], np.float64))
    if math.isfinite(value) and not np.isfinite(one[0]):
        raise _bad_value(value, dtype, f"{dtype.name} would make it infinite; use a smaller number")
    return one


def _check_kind(dst: np.dtype[np.generic], array: np.ndarray) -> None:
    known = DType.of(array.dtype)
    floating = array.dtype.kind == "f" or (known is not None and known.is_floating)
    if not floating and array.dtype.kind not in "iub":
        raise _bad_data(array.dtype, "does not hold real numbers", "convert it: array.astype('float32')")
    if dst.kind in "iub":
        if floating:
            fix = f"round and cast it first: np.rint(array).astype('{dst.name}')"
            raise _bad_data(array.dtype, f"floats would lose their fractions in a buffer of {dst.name}", fix)
        _check_range(dst, array)


def _check_range(dst: np.dtype[np.generic], array: np.ndarray) -> None:
    if not array.size or np.can_cast(array.dtype, dst, "safe"):
        return
    least, largest = integer_range(dst)
    for extreme in (int(array.min()), int(array.max())):
        if not least <= extreme <= largest:
            problem = f"does not fit {dst.name}, which holds {least} to {largest}"
            raise _bad_data(extreme, problem, "clip or scale it first, or use a wider buffer")


def _bad_data(value: object, problem: str, fix: str) -> InvalidRequest:
    return InvalidRequest(field="data", value=Words(value), problem=problem, fix=fix)


def _bad_value(value: float, dtype: np.dtype[np.generic], fix: str) -> InvalidRequest:
    return InvalidRequest(field="value", value=value, problem=f"cannot be held by {dtype.name}", fix=fix)
