"""All code that uses pykka's internals, for `pykka>=4.5,<5`."""

from __future__ import annotations

import abc
import contextlib
import itertools
import queue
import threading
import uuid
from typing import TYPE_CHECKING, Any, NoReturn

import pykka
from pykka.messages import ProxyCall, ProxyGetAttr, ProxySetAttr, _ActorStop

from cudnn_actor.actors import forks
from cudnn_actor.actors.pykka_future import ReplyFuture
from cudnn_actor.actors.threads import ThreadRefused, start_thread
from cudnn_actor.protocol.errors import InvalidRequest

if TYPE_CHECKING:
    from cudnn_actor.actors.mailbox import Mailbox

__all__ = ["HookedActor", "MailboxRef", "answer", "is_of_pykka", "is_stop"]

_OF_PYKKA = frozenset({ProxyCall, ProxyGetAttr, ProxySetAttr, _ActorStop})
_thread_numbers = itertools.count(1)


def is_stop(message: object) -> bool:
    """Whether a message is the one that pykka's `stop()` sends."""
    return type(message) is _ActorStop


def is_of_pykka(message: object) -> bool:
    """Whether a message is pykka's own: its `stop()`, or of a proxy, so that pykka must handle it."""
    return type(message) in _OF_PYKKA


def answer(reply_to: pykka.Future[Any], value: Any, error: BaseException | None) -> None:
    """Complete a pykka future; a completed one is left unchanged. Any thread."""
    with contextlib.suppress(queue.Full):  # pykka raises this for a completed future
        if error is None:
            reply_to.set(value)
        else:
            reply_to.set_exception((type(error), error, error.__traceback__))


class HookedActor(pykka.ThreadingActor):
    """A pykka actor with our inbox and our loop.

    Parameters
    ----------
    mailbox
        The inbox, which may be older than this actor.
    """

    use_daemon_thread = True

    def __init__(self, mailbox: Mailbox) -> None:
        super().__init__()
        self.mailbox = mailbox
        self.thread: threading.Thread | None = None
        """The thread that it runs on; None before its start."""
        self.actor_inbox = mailbox  # type: ignore[assignment]
        self._actor_ref = pykka.ActorRef(self)  # pykka made its own before `actor_inbox` was set

    def launch(self) -> pykka.ActorRef[Any]:
        """Start an actor that was constructed directly, as pykka's `start` does for one that it
        constructs."""
        pykka.ActorRegistry.register(self.actor_ref)
        self._start_actor_loop()
        return self.actor_ref

    @abc.abstractmethod
    def run(self) -> None:
        """Run the actor: the whole body of its thread."""

    @staticmethod
    def _create_future() -> pykka.Future[Any]:
        return ReplyFuture()

    @staticmethod
    def _create_actor_inbox() -> Any:
        return None  # pykka calls this before the mailbox is known; __init__ sets it

    def _start_actor_loop(self) -> None:
        name = f"{type(self).__name__}-{next(_thread_numbers)}"
        thread = threading.Thread(target=self.run, name=name, daemon=self.use_daemon_thread)
        self.thread = thread
        try:
            start_thread(thread)
        except ThreadRefused:
            self.thread = None
            pykka.ActorRegistry.unregister(self.actor_ref)
            raise


def _refuse_proxy() -> NoReturn:
    raise InvalidRequest(
        field="actor_ref",
        value="proxy()",
        problem="is not supported: the actor may run in another process, and it is replaced when it fails",
        fix="send a message: actor_ref.ask(message) or actor_ref.tell(message)",
    )


class MailboxRef(pykka.ActorRef[Any]):
    """A pykka reference to the actor that reads a mailbox. It stays valid when a supervisor replaces the
    actor.

    `ask`, `tell`, `stop` and `is_alive` work as in pykka. `proxy` raises `InvalidRequest`, because there is
    no single object behind the reference.

    Parameters
    ----------
    mailbox
        Where messages go.
    actor_class
        The class of the actors that read the mailbox.
    stopped
        Set when no actor reads the mailbox any more.
    """

    def __init__(self, mailbox: Mailbox, actor_class: type[HookedActor], stopped: threading.Event) -> None:
        self._actor_weakref = _refuse_proxy  # type: ignore[assignment]  # only pykka's proxy calls it
        self.actor_class = actor_class
        self.actor_urn = uuid.uuid4().urn
        self.actor_inbox = mailbox  # type: ignore[assignment]
        self.actor_stopped = stopped
        forks.watch(self)

    def forget_parent(self) -> None:
        """Become a reference to no actor, in a forked child."""
        self.__class__ = _ForkedRef  # so that `ask` needs no check for a fork


class _ForkedRef(MailboxRef):
    """A `MailboxRef` in a forked child: it is not alive and refuses messages. `stop` does nothing."""

    def is_alive(self) -> bool:
        """False."""
        return False

    def tell(self, message: Any) -> None:  # noqa: ARG002
        """Raise `ServiceStopped`."""
        self._inbox.check_process()

    def ask(self, message: Any, *, block: bool = True, timeout: float | None = None) -> Any:  # noqa: ARG002
        """Raise `ServiceStopped`; with `block=False`, return a future that raises it."""
        future = self.actor_class._create_future()
        try:
            self._inbox.check_process()
        except pykka.ActorDeadError as error:
            answer(future, None, error)
        return future.get(timeout=timeout) if block else future

    @property
    def _inbox(self) -> Mailbox:
        inbox: Any = self.actor_inbox
        return inbox  # type: ignore[no-any-return]


def _forget_registered() -> None:
    """Remove our actors, which do not run in a forked child, from pykka's registry there.

    Its lock is replaced, because another thread of the parent may have held it.
    """
    registry = pykka.ActorRegistry
    registry._actor_refs_lock = threading.RLock()
    registry._actor_refs[:] = [
        ref for ref in registry._actor_refs if not issubclass(ref.actor_class, HookedActor)
    ]


forks.call_in_child(_forget_registered)
