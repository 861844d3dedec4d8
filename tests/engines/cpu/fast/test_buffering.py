"""NumPy's settings while the fast engine computes: its buffers, and no warnings."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cudnn_actor.engines.cpu.fast import buffering
from cudnn_actor.engines.cpu.fast.buffering import (
    BUFFERED,
    IN_CONTEXTS,
    caller_with_settings,
    with_settings,
)
from cudnn_actor.engines.cpu.fast.lanes import Lanes
from cudnn_actor.engines.cpu.fast.plan import FastProgram

from ....patience import PATIENCE_S

IGNORED = {"divide": "ignore", "over": "ignore", "under": "ignore", "invalid": "ignore"}


def settings() -> tuple[int, Any]:
    return np.getbufsize(), np.geterr()


def test_every_lane_computes_with_small_buffers_and_without_warnings_and_the_caller_is_as_before() -> None:
    before, found = settings(), list[tuple[int, Any]]()
    together = threading.Barrier(3, timeout=PATIENCE_S)

    def call() -> None:
        together.wait()
        found.append(settings())

    lanes = Lanes(3)
    try:
        alone = (lambda: found.append(settings()),)
        FastProgram((), (), (((call, call, call),), (alone,))).run((), lanes)
    finally:
        lanes.close()
    assert before[0] > BUFFERED
    assert found == [(BUFFERED, IGNORED)] * 4
    assert settings() == before


FORMS = ["in a context", "of the thread"] if IN_CONTEXTS else ["of the thread"]


@pytest.fixture(params=FORMS)
def calling(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """What calls a function with the settings, as with NumPy 2 and as with NumPy 1."""
    monkeypatch.setattr(buffering, "IN_CONTEXTS", request.param == "in a context")
    return caller_with_settings()


def test_settings_hold_while_a_function_is_called_and_no_longer(calling: Callable[..., None]) -> None:
    before, found = settings(), list[object]()

    def call(*args: object) -> None:
        found.append((settings(), args))
        raise ZeroDivisionError

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            calling(call, 1, 2)
        assert settings() == before
    assert found == [((BUFFERED, IGNORED), (1, 2))] * 2


@pytest.mark.parametrize("form", FORMS)
def test_smaller_buffers_stay_and_errors_leave_none_behind(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buffering, "IN_CONTEXTS", form == "in a context")
    before, found = np.setbufsize(16), list[int]()
    try:
        with with_settings():
            assert np.getbufsize() == 16
        caller_with_settings()(lambda: found.append(np.getbufsize()))
        assert found == [16]
    finally:
        np.setbufsize(before)
    with pytest.raises(ZeroDivisionError), with_settings():
        raise ZeroDivisionError
    assert np.getbufsize() == before
