"""Clients of every kind while the worker is killed: `python -m benchmarks.served_chaos`, for a moment."""

from __future__ import annotations

from benchmarks.served_chaos import WAYS, arguments, is_right, rows


def test_kills_fail_no_client_of_any_kind_and_all_answers_are_right() -> None:
    words = ("--requests", "200", "--kills", "2", "--tasks", "2", "--malformed", "10")
    found = list(rows(arguments(words)))
    assert is_right(found), found
    requests = found[0]
    assert requests["answered"].keys() == WAYS.keys()
    assert (requests["killed"], requests["restarts"]) == (2, 2)
