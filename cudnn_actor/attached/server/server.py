"""The part of a server that its sessions use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from cudnn_actor.attached.server.asked import Asked
from cudnn_actor.attached.server.costs import Costs
from cudnn_actor.attached.server.fair_share import FairShare
from cudnn_actor.attached.server.lent_models import LentModels
from cudnn_actor.attached.server.nearness import Nearness
from cudnn_actor.attached.server.shared_weights import SharedWeights
from cudnn_actor.attached.wire import Reading
from cudnn_actor.broker.service_state import ServiceState

if TYPE_CHECKING:
    from cudnn_actor.attached.server.session import Session

__all__ = ["Server"]


class Server(Protocol):
    """The state and the methods of a server that its sessions share."""

    state: ServiceState
    share: FairShare[Session, Asked]
    costs: Costs
    shared: SharedWeights
    lent: LentModels
    reading: Reading
    nearness: Nearness
    window: int
    """How many requests a client may have in flight."""
    copies: int
    """The bytes of copies that a client may have in the queue: see `Copies`."""
    mover: int | None
    """The process id of the client that may move buffers to other services, and from them; None for none."""

    def welcome(self, session: Session) -> None:
        """Tell a client that has introduced itself what the service is. Raises `CudnnActorError`."""

    def pump(self) -> None:
        """Send the requests whose turn it is to the service."""

    def pump_soon(self) -> None:
        """Call `pump` soon, in a callback of the loop."""

    def forget(self, session: Session) -> None:
        """Note that a session has ended."""
