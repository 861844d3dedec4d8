"""A value that is kept is computed once, and again if its file is damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from .kept import kept


def test_a_value_is_computed_once(tmp_path: Path) -> None:
    made = iter([[1, 2], [3]])
    assert [kept("numbers", lambda: next(made), tmp_path) for _ in range(2)] == [[1, 2], [1, 2]]
    assert kept("others", lambda: next(made), tmp_path) == [3]


@pytest.mark.parametrize("left", [0, 5, -1])
def test_what_was_not_written_to_its_end_is_computed_again(tmp_path: Path, left: int) -> None:
    kept("numbers", lambda: [1, 2], tmp_path)
    (file,) = tmp_path.glob("*.pickle")
    file.write_bytes(file.read_bytes()[:left])
    assert [kept("numbers", lambda: [3], tmp_path) for _ in range(2)] == [[3], [3]]
