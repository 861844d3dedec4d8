"""Where we meet pykka's internals: every touch of them is in this module, for `pykka>=4.5,<5`."""

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
from cudnn_actor.actors.reply_future import ReplyFuture
from cudnn_actor.protocol.errors import InvalidRequest

if TYPE_CHECKING:
    from cudnn_actor.actors.mailbox import Mailbox

__all__ = ["HookedActor", "MailboxRef", "answer", "is_proxied", "is_stop"]

_PROXIED = frozenset({ProxyCall, ProxyGetAttr, ProxySetAttr})
_thread_numbers = itertools.count(1)


def is_stop(message: object) -> bool:
    """Whether a message is what pykka's `stop()` sends."""
    return type(message) is _ActorStop


def is_proxied(message: object) -> bool:
    """Whether a message comes from a pykka proxy, so that pykka has to take it."""
    return type(message) in _PROXIED


def answer(reply_to: pykka.Future[Any], value: Any, error: BaseException | None) -> None:
    """Complete a pykka future; one that is complete already stays as it is. Any thread."""
    with contextlib.suppress(queue.Full):  # pykka's word for "answered already"
        if error is None:
            reply_to.set(value)
        else:
            reply_to.set_exception((type(error), error, error.__traceback__))


class HookedActor(pykka.ThreadingActor):
    """A pykka actor whose inbox and loop are ours.

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
        """Where it runs; None before its start."""
        self.actor_inbox = mailbox  # type: ignore[assignment]
        self._actor_ref = pykka.ActorRef(self)  # pykka's own has the inbox that it asked for too early

    def launch(self) -> pykka.ActorRef[Any]:
        """Start an actor that was made by hand, as `start` does for one that it makes itself."""
        pykka.ActorRegistry.register(self.actor_ref)
        self._start_actor_loop()
        return self.actor_ref

    @abc.abstractmethod
    def run(self) -> None:
        """Live: the actor's thread runs this and ends."""

    @staticmethod
    def _create_future() -> pykka.Future[Any]:
        return ReplyFuture()

    @staticmethod
    def _create_actor_inbox() -> Any:
        return None  # pykka asks before the mailbox is known; __init__ sets it

    def _start_actor_loop(self) -> None:
        name = f"{type(self).__name__}-{next(_thread_numbers)}"
        thread = threading.Thread(target=self.run, name=name, daemon=self.use_daemon_thread)
        self.thread = thread
        try:
            thread.start()
        except RuntimeError:  # the system has no thread to give
            self.thread = None
            pykka.ActorRegistry.unregister(self.actor_ref)
            raise


def _refuse_proxy() -> NoReturn:
    raise InvalidRequest(
        field="actor_ref",
        value="proxy()",
        problem="has no object of this process to stand for: its actor may be in another, and is replaced",
        fix="send a message instead: actor_ref.ask(message), actor_ref.tell(message)",
    )


class MailboxRef(pykka.ActorRef[Any]):
    """A pykka reference to whoever reads a mailbox: it stays good when a supervisor replaces the actor.

    `ask`, `tell`, `stop` and `is_alive` work as in pykka. `proxy` raises `InvalidRequest`: there is no one
    object to look at behind it.

    Parameters
    ----------
    mailbox
        Where messages go.
    actor_class
        The class of the actors that read it.
    stopped
        Set when nobody reads it any more.
    """

    def __init__(self, mailbox: Mailbox, actor_class: type[HookedActor], stopped: threading.Event) -> None:
        self._actor_weakref = _refuse_proxy  # type: ignore[assignment]  # which only pykka's proxy calls
        self.actor_class = actor_class
        self.actor_urn = uuid.uuid4().urn
        self.actor_inbox = mailbox  # type: ignore[assignment]
        self.actor_stopped = stopped
        forks.watch(self)

    def forget_parent(self) -> None:
        """Become, in a forked child, a reference to nobody."""
        self.__class__ = _ForkedRef  # so that asking costs nothing more where nobody has forked


class _ForkedRef(MailboxRef):
    """What a `MailboxRef` is in a forked child: not alive, and refuses. `stop` has nothing to stop."""

    def is_alive(self) -> bool:
        """False."""
        return False

    def tell(self, message: Any) -> None:  # noqa: ARG002
        """Raise `ServiceStopped`."""
        self._inbox.check_process()

    def ask(self, message: Any, *, block: bool = True, timeout: float | None = None) -> Any:  # noqa: ARG002
        """Raise `ServiceStopped`; with `block=False`, a future that does."""
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
    """In a forked child: our actors do not run here. Another thread may have held pykka's lock."""
    registry = pykka.ActorRegistry
    registry._actor_refs_lock = threading.RLock()
    registry._actor_refs[:] = [
        ref for ref in registry._actor_refs if not issubclass(ref.actor_class, HookedActor)
    ]


forks.call_in_child(_forget_registered)
