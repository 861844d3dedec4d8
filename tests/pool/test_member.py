"""What a member tells its pool."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from cudnn_actor.pool.member import Incarnation, Member
from cudnn_actor.service.event_log import EventLog
from cudnn_actor.supervision import (
    ChildPolicy,
    ExitReason,
    LifecycleEvent,
    Restarted,
    Restarting,
    Started,
    SupervisorPolicy,
)

CRASH = ExitReason.crash("a crash")


class Notes:
    """What a member has told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    async def prepare(self, member: Member) -> None:
        self.told.append("prepare")

    def up(self, member: Member) -> None:
        self.told.append("up")

    def pauses(self, member: Member) -> None:
        self.told.append("pauses")

    def lost(self, member: Member) -> None:
        self.told.append("lost")

    def given_up(self, member: Member) -> None:
        self.told.append("given up")

    def happened(self, event: LifecycleEvent) -> None:
        self.told.append(type(event).__name__)


async def test_a_member_whose_worker_restarts_pauses_until_it_is_back() -> None:
    notes, log, one = Notes(), EventLog(), Incarnation(1)
    policy = SupervisorPolicy(children=(ChildPolicy(id="m"),))
    member = Member(0, "m", options={}, path=Path("nowhere"), policy=policy, listener=notes)
    service: Any = SimpleNamespace(events=log)
    following = asyncio.ensure_future(member.follow(one, service))

    async def happens(event: LifecycleEvent) -> list[str]:
        log.append(event)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        return notes.told

    assert await happens(Started(child="m", generation=1)) == []
    restarting = Restarting(child="m", generation=1, cause=CRASH, delay_s=0.0, attempt=1)
    assert await happens(restarting) == ["pauses"]
    assert await happens(Restarted(child="m", generation=2, downtime_s=0.1)) == ["pauses", "up"]
    one.over = True  # its process has ended: what comes late says nothing of its successor
    assert await happens(Restarted(child="m", generation=3, downtime_s=0.1)) == ["pauses", "up"]
    await following
