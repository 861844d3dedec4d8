"""A plain pykka system. One of its actors owns the service, and is told when the service gives up.

    python examples/embedded_in_pykka.py

It does not use asyncio. `start(parent=...)` names the actor that gets `Escalated` when the service has used
up its restarts. The parent decides what happens then: this one starts a new service.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pykka

from cudnn_actor import (
    Allocate,
    ConvFwd,
    ConvSpec,
    CudnnService,
    Download,
    Escalated,
    Fault,
    FaultPlan,
    Free,
    ServiceStopped,
    TensorSpec,
    logging,
    start,
)
from cudnn_actor.protocol import Message

# These faults make the service give up: every start of the worker except the first fails, and the 4th message
# kills the worker. With max_restarts=1 the service gives up at once.
BROKEN = FaultPlan().at(4, Fault.STICKY).at_start(2, times=10)


class Vision(pykka.ThreadingActor):
    """An actor of your own: messages are arrays, replies are arrays blurred by the service."""

    def __init__(self) -> None:
        super().__init__()
        self.service: CudnnService | None = None
        self.escalated = pykka.ThreadingFuture[str]()

    def on_start(self) -> None:
        """Own a service from the beginning to the end of this actor."""
        self.service = start(parent=self.actor_ref, device="cpu", faults=BROKEN, max_restarts=1)
        print("service 1 started")

    def on_stop(self) -> None:
        """Take the service down too."""
        if self.service is not None:
            self.service.stop(timeout=10)
        print("service stopped")

    def on_receive(self, message: Any) -> Any:
        """Blur an image, or react to the end of the service."""
        match message:
            case np.ndarray():
                return self.blur(message)
            case Escalated():
                print(f"escalated: {message.child} gave up ({message.cause.kind})")
                self.service = start(parent=self.actor_ref, device="cpu")
                self.escalated.set(message.cause.cause)
                print("service 2 started")
        return None

    def blur(self, image: np.ndarray) -> np.ndarray:
        """Convolve with ones, every step a message to the service."""
        ones = np.full((1, 1, 3, 3), 1 / 9, dtype=np.float32)
        x = self.ask(allocate(image))
        w = self.ask(allocate(ones))
        y = self.ask(Allocate(spec=x.spec))
        self.ask(ConvFwd(x=x, w=w, y=y, conv=ConvSpec.symmetric(2, pad=1)))
        blurred: np.ndarray = self.ask(Download(src=y))
        for buffer in (x, w, y):
            self.ask(Free(buffer=buffer))
        return blurred

    def ask(self, message: Message) -> Any:
        """Ask the service through its pykka reference: blocks this actor, and raises typed errors."""
        assert self.service is not None
        return self.service.actor_ref.ask(message, block=True)


def allocate(array: np.ndarray) -> Allocate:
    """The message that makes a buffer out of an array."""
    return Allocate(spec=TensorSpec.packed(array.shape, array.dtype), data=array)


def main() -> None:
    """Ask, see the service fail, and ask the new service."""
    vision = Vision.start()
    image = np.ones((1, 1, 8, 8), dtype=np.float32)
    try:
        send(vision, image)
    finally:
        vision.stop()


def send(vision: pykka.ActorRef[Vision], image: np.ndarray) -> None:
    """Send an image. If that fails, send it again once the actor has reacted."""
    try:
        vision.ask(image, block=True, timeout=10)
    except ServiceStopped as error:
        print(f"first image: no answer, safe to send again: {error.retry_safe}")
    cause = vision.proxy().escalated.get().get(timeout=10)
    print(f"the reason: {cause}")
    blurred = vision.ask(image, block=True, timeout=10)
    print(f"second image: centre {blurred[0, 0, 4, 4]:.3f}, corner {blurred[0, 0, 0, 0]:.3f}")


if __name__ == "__main__":
    logging.configure()  # the services' log lines, on stderr
    main()
