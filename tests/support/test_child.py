"""A crash of the library fails the call that it happens in, and no other."""

from __future__ import annotations

import os
import signal

import pytest

from .child import CallFailed, Child, ChildDied


def crash() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def fail() -> None:
    raise ValueError("no such thing")


def test_a_crash_is_one_calls_and_the_next_has_a_new_process(child: Child) -> None:
    alone = Child()
    try:
        before = alone.call(os.getpid)
        with pytest.raises(ChildDied, match="crash ended its process: exit code -11"):
            alone.call(crash)
        assert alone.call(os.getpid) not in (before, os.getpid())
    finally:
        alone.close()


def test_an_exception_is_one_calls_and_the_process_goes_on(child: Child) -> None:
    before = child.call(os.getpid)
    with pytest.raises(CallFailed, match="ValueError: no such thing"):
        child.call(fail)
    assert child.call(os.getpid) == before
