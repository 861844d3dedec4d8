"""What a signal's handler raises in a thread that sends costs the interrupted call, and nobody else anything.

Each entry is hit for a while; with `CUDNN_ACTOR_ALARMS=50000` so often, however long that takes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

import pytest

from cudnn_actor.memory import GRANULARITY

from .. import forked_programs
from ..patience import PATIENCE_S
from ..whole import WHOLE

LEAST = int(os.environ.get("CUDNN_ACTOR_ALARMS", "0"))
SECONDS = 3600 if LEAST else 1 if WHOLE else 0.2
ENTRIES = ("ref.ask", "ref.tell", "ask", "submit", "tell")


def run(program: str, *arguments: object) -> dict[str, Any]:
    done = forked_programs.run(["-m", f"tests.service.{program}", *map(str, arguments)], spare=True)
    assert done.returncode == 0, done.stderr[-4000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return told


@pytest.mark.timeout(SECONDS + 2 * PATIENCE_S)
@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_alarms_cost_the_calls_that_they_interrupt_and_nothing_else(isolation: str, entry: str) -> None:
    """Another thread's requests are answered all the while, and every request runs at most once."""
    told = run("alarm_program", isolation, entry, LEAST or 1_000_000, SECONDS)
    assert told["hits"] >= max(LEAST, 1)
    assert not told["bystander_error"]
    assert told["bystander"] > 0
    # What was acknowledged was applied, and what was applied had been sent: nothing is applied twice.
    assert told["acknowledged"] <= told["applied"] <= told["calls"]
    _is_whole(told)


@pytest.mark.parametrize("isolation", ["thread", "process"])
def test_wherever_a_handler_may_raise_all_others_get_their_answers(isolation: str) -> None:
    _check_injections(isolation, ",".join(ENTRIES), files=["mailbox.py"])


def test_wherever_a_handler_may_raise_in_a_turn_all_buffers_of_a_graph_are_held_or_none() -> None:
    files = ["dispatcher.py", "fast_path.py", "owning_loop.py", "sender.py", "channel.py"]
    _check_injections("process", "submit", 10, files=files)


@pytest.mark.parametrize("buffers", [2, 4, 10])
def test_wherever_a_handler_may_raise_on_the_straight_path_all_buffers_are_held_or_none(buffers: int) -> None:
    _check_injections("process", "alone", buffers, files=["straight_path.py", "sender.py", "channel.py"])


def test_wherever_a_handler_may_raise_a_models_staging_memory_is_in_use_or_kept_once() -> None:
    """It is all free once the model is unloaded."""
    _check_injections("process", "submit", "model", files=["fast_path.py", "model_runs.py"])


@pytest.mark.parametrize("copy", ["upload", "download"])
def test_wherever_a_handler_may_raise_a_copys_piece_is_in_use_or_kept_once(copy: str) -> None:
    """And an array that is copied behind its request arrives: else the worker would wait for ever."""
    late = ["late_copies.py", "arrivals.py"] if copy == "upload" else []
    _check_injections("process", "submit", copy, files=["fast_path.py", "values.py", *late])


def test_wherever_a_handler_may_raise_a_slot_that_was_ready_is_a_buffers_or_ready() -> None:
    """All bytes are free again but those of the program's three buffers."""
    told = _check_injections(
        "process", "submit", "new", files=["fast_path.py", "values.py", "late_copies.py"]
    )
    assert told["submit"]["bytes_taken"] == 3 * GRANULARITY


@pytest.mark.parametrize("waits", ["", " here"])
@pytest.mark.parametrize("way", ["upload", "new"])
def test_wherever_a_handler_may_raise_on_an_uploads_straight_path_it_arrives(way: str, waits: str) -> None:
    """Also where the loop's thread waits for the answer. Its piece is in use or kept once."""
    files = ["straight_upload.py", "straight_path.py", "late_copies.py", "arrivals.py", "sender.py"]
    told = _check_injections("process", "ask", way + waits, files=files)
    if way == "new":
        assert told["ask"]["bytes_taken"] == 3 * GRANULARITY


def _check_injections(*arguments: object, files: Sequence[str]) -> dict[str, Any]:
    outcomes = run("injection_program", *arguments)
    for entry, told in outcomes.items():
        assert set(files) <= set(told["files"]), entry
        assert told["raised"] > 10, entry
        assert told["calls"] - told["raised"] - told["swallowed"] <= told["applied"] <= told["calls"], entry
        assert told["held"] == 0, entry
        _is_whole(told)
    return outcomes


def _is_whole(told: dict[str, Any]) -> None:
    assert (told["queued"], told["failed"], told["restarts"]) == (0, 0, 0)
    assert told["live_buffers"] == told.get("buffers", 3)
    assert not told.get("staging_in_use")
