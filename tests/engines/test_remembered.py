"""Answers of oracles that are asked the same again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from . import remembered as module
from .remembered import MOST_ANSWERS, MOST_BYTES, remembered


@dataclass(frozen=True)
class Factor:
    """An argument with parts."""

    by: float

    def __mul__(self, other: float) -> float:
        return self.by * other


def counted() -> tuple[list[Any], Any]:
    """The questions that reach an oracle, and the oracle."""
    asked: list[Any] = []

    @remembered
    def double(x: Any, *, by: Any = 2) -> Any:
        asked.append((x, by))
        return x * by

    return asked, double


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.zeros(3), np.zeros(4)),
        (np.zeros(4), np.zeros((2, 2))),
        (np.zeros(3), np.zeros(3, np.int64)),
        (np.zeros(3), -np.zeros(3)),
        (np.zeros(2), np.array([0.0, 1.0])),
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        (1.0, np.float64(1.0)),
        (np.float32(0.0), np.float32(-0.0)),
        (Factor(0.0), Factor(-0.0)),
        ((1,), [1]),
        ((1, 2), ((1,), 2)),
    ],
)
def test_questions_that_differ_are_asked_apart(one: Any, other: Any) -> None:
    asked, double = counted()
    for x in (one, other, one, other):
        double(x)
    assert len(asked) == 2
    double(one, by=3)
    assert len(asked) == 3


def test_an_equal_array_gets_the_same_answer_and_nobody_changes_it() -> None:
    asked, double = counted()
    first, second = double(np.arange(4.0)), double(np.arange(4.0)[::-1][::-1])
    assert first is second
    assert len(asked) == 1
    with pytest.raises(ValueError, match="read-only"):
        second[0] = 1


def test_an_answer_that_is_a_view_of_an_argument_stays_and_so_does_the_argument() -> None:
    @remembered
    def parts(x: np.ndarray) -> Any:
        return [x, x[::-1], {"x": x}]

    given = np.arange(3.0)
    answer = parts(given)
    given[:] = 7
    again = x, y, named = parts(np.arange(3.0))
    np.testing.assert_array_equal([x, y, named["x"]], [[0, 1, 2], [2, 1, 0], [0, 1, 2]])
    assert again is answer
    assert isinstance(again, tuple), "a list could be changed"
    assert not any(each.flags.writeable for each in (x, y, *named.values()))
    with pytest.raises(TypeError, match="item assignment"):
        named["x"] = x


def test_arrays_that_are_large_or_hold_objects_are_asked_for_each_time() -> None:
    for x in (np.zeros(MOST_BYTES + 1, np.uint8), np.array([1, 1 << 70], object)):
        asked, double = counted()
        double(x)
        double(x)
        assert len(asked) == 2


def test_what_was_asked_for_longest_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ANSWERS", 2)
    assert MOST_ANSWERS > 2
    asked, double = counted()
    for x in (1, 2, 1, 3, 1, 2):
        double(x)
    assert [x for x, _ in asked] == [1, 2, 3, 2]
