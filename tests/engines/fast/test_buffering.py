"""NumPy's buffers while the fast engine computes."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from cudnn_actor.engines.cpu.fast.buffering import BUFFERED, with_small_buffers
from cudnn_actor.engines.cpu.fast.lanes import Lanes
from cudnn_actor.engines.cpu.fast.plan import FastProgram

from ...patience import PATIENCE_S


def test_every_lane_computes_with_small_buffers_and_the_callers_are_as_before_behind_it() -> None:
    before, sizes = np.getbufsize(), set[int]()
    together = threading.Barrier(3, timeout=PATIENCE_S)

    def call() -> None:
        together.wait()
        sizes.add(np.getbufsize())

    lanes = Lanes(3)
    try:
        FastProgram((), (), (((call, call, call),),)).run((), lanes)
    finally:
        lanes.close()
    assert before > BUFFERED
    assert sizes == {BUFFERED}
    assert np.getbufsize() == before


def test_smaller_buffers_stay_and_errors_leave_none_behind() -> None:
    before = np.setbufsize(16)
    try:
        with with_small_buffers():
            assert np.getbufsize() == 16
    finally:
        np.setbufsize(before)
    with pytest.raises(ZeroDivisionError), with_small_buffers():
        raise ZeroDivisionError
    assert np.getbufsize() == before
