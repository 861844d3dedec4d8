"""asyncio ⇄ pykka: bounded mailboxes, replies, coalesced wake-ups, deadlines. Knows nothing of cuDNN."""

from __future__ import annotations

from cudnn_actor.actors.actor import DEFERRED, Actor, ActorExit, ActorObserver, Counters
from cudnn_actor.actors.asking import ask, submit, tell
from cudnn_actor.actors.bridge import LoopBridge
from cudnn_actor.actors.deadline import Deadline, within
from cudnn_actor.actors.envelope import Envelope
from cudnn_actor.actors.errors import ActorStopped, Crash
from cudnn_actor.actors.mailbox import Mailbox
from cudnn_actor.actors.pykka_seam import MailboxRef

__all__ = [
    "DEFERRED",
    "Actor",
    "ActorExit",
    "ActorObserver",
    "ActorStopped",
    "Counters",
    "Crash",
    "Deadline",
    "Envelope",
    "LoopBridge",
    "Mailbox",
    "MailboxRef",
    "ask",
    "submit",
    "tell",
    "within",
]
