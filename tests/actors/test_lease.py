"""The lease: one writer, however late a lost thread comes back."""

from __future__ import annotations

import threading

import pytest

from cudnn_actor.actors import Crash, Lease

from .actor_fixtures import PATIENCE_S


def test_a_lease_is_revoked_once() -> None:
    lease = Lease()
    with lease:
        pass
    assert [lease.revoke(), lease.revoke()] == [True, False]
    assert lease.revoked


def test_no_step_begins_once_the_lease_is_revoked() -> None:
    lease = Lease()
    lease.check()
    lease.revoke()
    with pytest.raises(Crash, match="given up"), lease:
        raise AssertionError("the step was taken")
    with pytest.raises(Crash, match="given up"):
        lease.check()
    with pytest.raises(Crash, match="given up"), lease:  # the refusal has not kept the lock
        raise AssertionError("the step was taken")


def test_revoking_waits_for_a_step_that_is_being_taken() -> None:
    lease, taken, revoked = Lease(), [], threading.Event()

    def revoke() -> None:
        lease.revoke()
        taken.append("revoked")
        revoked.set()

    with lease:
        revoker = threading.Thread(target=revoke)
        revoker.start()
        taken.append("step")
    assert revoked.wait(PATIENCE_S)
    revoker.join(PATIENCE_S)
    assert taken == ["step", "revoked"]


def test_a_step_that_raises_gives_the_lease_free() -> None:
    lease = Lease()
    with pytest.raises(KeyError), lease:
        raise KeyError
    with lease:
        pass
