"""What definitions do, recorded as calls on memory that is given: the elements are NumPy's, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cudnn_actor.engines.cpu.fast.recorder import Recorder
from cudnn_actor.engines.cpu.fast.recording import NotRecordable, Recording
from cudnn_actor.engines.cpu.scratch import aligned_bytes

from ....in_one_test import cases_in_one_test

DIMS = (3, 4, 5)


def neighbours(xp: Any, x: Any, n: Any) -> Any:
    total = xp.zeros_like(x)
    total[:, 1:] += x[:, :-1]
    total[:, :-1] += x[:, 1:] * n[:, 1:]
    return total


def over_what_a_shifted_operand_reads(xp: Any, x: Any, n: Any) -> Any:
    del xp
    y = x * 2
    return y[:, 1:] + y[:, :-1], n - n


def chosen(xp: Any, x: Any, n: Any) -> Any:
    odd = n % 2 == 1
    return (
        xp.where(odd, x, -x),
        xp.where(odd, x, 0.0),
        xp.where(odd, 0, n),
        xp.where(x > 0, -0.0, x),
        xp.where(odd[:, :1], x, n),
    )


def padded(xp: Any, x: Any, n: Any) -> Any:
    return xp.pad(x, ((0, 0), (1, 2), (0, 3)), constant_values=-7), xp.pad(n, [(1, 0), (0, 0), (2, 1)])


def powers(xp: Any, x: Any, n: Any) -> Any:
    positive = xp.abs(x) + 1
    return [positive**power for power in (2, 2.0, 0.5, -1, 1, 2.5, -0.75)] + [n**2]


def moved(xp: Any, x: Any, n: Any) -> Any:
    return (
        xp.moveaxis(x, 1, -1).reshape(-1),
        xp.flip(x, 1)[..., None],
        xp.stack([x, n], 1),
        n.transpose(2, 0, 1),
    )


def taken(xp: Any, x: Any, n: Any) -> Any:
    rows, columns = np.array([[2], [0], [3]]), np.array([[4, 4, 1]])
    return xp.take(x, xp.asarray([3, 0, 0]), axis=1), x[:, rows, columns], xp.take(x, n % 7 * 8)


def taken_from_the_end(xp: Any, x: Any, n: Any) -> Any:
    del n
    total = xp.zeros((3, 6, 5), x.dtype)
    xp.add.at(total, (slice(None), np.array([-1, 1, 5, -1])), x)
    rows, columns = np.array([[-1], [0]]), np.array([[0, -2]])
    return xp.take(x, xp.asarray([-1, 0]), axis=1), x[:, rows, columns], xp.rint(total * 1024)


def of_other_types(xp: Any, x: Any, n: Any) -> Any:
    bits = xp.abs(x).view(np.int64 if x.dtype == np.float64 else np.int32)
    return x * n, (n << 3) & 12, bits >> 2, x.astype(np.int64), (n > 3) | (x < 0), xp.clip(n, 1, 4) / 3


def running(xp: Any, x: Any, n: Any) -> Any:
    first = xp.full_like(x[:, :1], 1)
    return xp.concatenate([first, xp.cumprod(x, 1)], 1), xp.cumsum(n, 2), xp.cumsum(n > 3, 1)


def filled(xp: Any, x: Any, n: Any) -> Any:
    total = xp.full(DIMS, 3.0) + xp.ones(DIMS)
    total += x
    return total, xp.zeros((4, 5), np.int64) + n


def added(xp: Any, x: Any, n: Any) -> Any:
    total, whole = xp.zeros((3, 6, 5), x.dtype), xp.zeros((9, 4, 5), np.int64)
    xp.add.at(total, (slice(None), np.array([4, 1, 4, 4])), x)
    xp.add.at(whole, np.array([0, 0, 7]), n)
    return xp.rint(total * 1024), whole


DEFINITIONS: tuple[Callable[[Any, Any, Any], Any], ...] = (
    neighbours,
    over_what_a_shifted_operand_reads,
    chosen,
    padded,
    powers,
    moved,
    taken,
    taken_from_the_end,
    of_other_types,
    running,
    filled,
    added,
)


def several(found: Any) -> list[Any]:
    return [*found] if isinstance(found, (tuple, list)) else [found]


@cases_in_one_test
@pytest.mark.pairwise
@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("define", DEFINITIONS, ids=[define.__name__ for define in DEFINITIONS])
def test_the_calls_give_what_numpy_gives(define: Any, dtype: Any, order: Any) -> None:
    rng = np.random.default_rng(7)
    given = rng.standard_normal(DIMS).astype(dtype), rng.integers(0, 9, DIMS)
    recording = Recording()
    x, n = recording.new(DIMS, dtype, order), recording.new(DIMS, np.int64, order)
    results = several(define(Recorder(recording), x, n))
    recording.finish([x, n], results)
    memory = aligned_bytes(recording.nbytes)
    memory[...] = 0xFF
    calls, array = recording.on(memory, {})
    for _ in range(2):  # a second run finds what the first one has left
        array(x)[...], array(n)[...] = given
        for call in calls:
            call()
    for result, wanted in zip(results, several(define(np, *given)), strict=True):
        assert array(result).dtype == wanted.dtype
        np.testing.assert_array_equal(array(result), wanted)
        np.testing.assert_array_equal(np.signbit(array(result)), np.signbit(wanted))


REFUSED: dict[str, Callable[[Any], Any]] = {
    "question": lambda x: 1 if x[0, 0, 0] > 0 else 2,
    "number": lambda x: float(x[0, 0, 0]),
    "loop": lambda x: [*x],
    "array": np.asarray,
    "unknown function": np.argsort,
    "sum": np.add.reduce,
    "several results": np.modf,
    "places": lambda x: x[x > 0],
    "places beyond the end": lambda x: Recorder(Recording()).take(x, np.array([4]), axis=1),
    "text": lambda x: x + "1",
}


@cases_in_one_test
@pytest.mark.parametrize("name", REFUSED)
def test_what_depends_on_elements_or_is_not_known_is_refused(name: str) -> None:
    with pytest.raises(NotRecordable):
        REFUSED[name](Recording().new(DIMS, np.float32))


def test_arrays_that_are_not_needed_at_the_same_time_share_memory() -> None:
    recording = Recording()
    x = y = recording.new((1000,), np.float32)
    for _ in range(20):
        y = (y + 1) * y
    recording.finish([x], [y])
    assert recording.nbytes <= 3 * 4096
