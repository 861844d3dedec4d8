"""A value that is kept is computed once, and again if its file is damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from .kept import kept


def test_a_value_is_computed_once(tmp_path: Path) -> None:
    made = iter([[1, 2], [3]])
    assert [kept("numbers", lambda: next(made), tmp_path) for _ in range(2)] == [[1, 2], [1, 2]]
    assert kept("others", lambda: next(made), tmp_path) == [3]


def test_where_no_file_can_be_written_a_value_is_computed(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert kept("numbers", lambda: [1, 2], file / "no folder") == [1, 2]


def test_a_file_is_read_where_none_can_be_written(tmp_path: Path) -> None:
    kept("numbers", lambda: [1, 2], tmp_path)
    (lock,) = tmp_path.glob("*.lock")
    lock.unlink()
    lock.mkdir()  # cannot be opened, as in a folder that is read-only
    assert kept("numbers", lambda: [3], tmp_path) == [1, 2]


def test_a_file_of_something_that_is_not_there_any_more_is_computed_again(tmp_path: Path) -> None:
    kept("numbers", lambda: [1, 2], tmp_path)
    (file,) = tmp_path.glob("*.pickle")
    file.write_bytes(b"ctests.kept\nNoSuchName\n.")
    assert [kept("numbers", lambda: [3], tmp_path) for _ in range(2)] == [[3], [3]]


@pytest.mark.parametrize("left", [0, 5, -1])
def test_what_was_not_written_to_its_end_is_computed_again(tmp_path: Path, left: int) -> None:
    kept("numbers", lambda: [1, 2], tmp_path)
    (file,) = tmp_path.glob("*.pickle")
    file.write_bytes(file.read_bytes()[:left])
    assert [kept("numbers", lambda: [3], tmp_path) for _ in range(2)] == [[3], [3]]
