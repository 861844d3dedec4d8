"""A plain pykka system whose own actor owns the service, and hears when it gives up.

    python examples/embedded_in_pykka.py

No asyncio anywhere. `start(parent=...)` names the actor that is told `Escalated` when the service has
used its restarts up. What happens then is the parent's decision: this one starts a fresh service.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pykka

from cudnn_actor import (
    Allocate,
    ConvFwd,
    ConvSpec,
    CudnnActorError,
    CudnnService,
    Download,
    Escalated,
    Fault,
    FaultPlan,
    TensorSpec,
    start,
)

# So that there is something to escalate: every start of the worker but the first one fails, and the 4th
# message kills it. With max_restarts=1 the service gives up at once.
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

    def blur(self, image: np.ndarray) -> np.ndarray:
        """Ask the service through its pykka reference; `.get()` raises what the service answers."""
        assert self.service is not None
        gpu = self.service.actor_ref
        ones = np.full((1, 1, 3, 3), 1 / 9, dtype=np.float32)
        x = gpu.ask(allocate(image)).get()
        w = gpu.ask(allocate(ones)).get()
        y = gpu.ask(Allocate(spec=x.spec)).get()
        gpu.ask(ConvFwd(x=x, w=w, y=y, conv=ConvSpec.symmetric(2, pad=1))).get()
        blurred: np.ndarray = gpu.ask(Download(src=y)).get()
        return blurred


def allocate(array: np.ndarray) -> Allocate:
    """The message that makes a buffer out of an array."""
    return Allocate(spec=TensorSpec.packed(array.shape, str(array.dtype)), data=array)


def main() -> None:
    """Ask, see the service fail, ask its successor."""
    vision = Vision.start()
    escalated = vision.proxy().escalated.get()
    image = np.ones((1, 1, 8, 8), dtype=np.float32)
    try:
        vision.ask(image)
    except CudnnActorError as error:
        print(f"first image: {type(error).__name__}, safe to send again: {error.retry_safe}")
    escalated.get(timeout=10)  # wait for the reaction above
    blurred = vision.ask(image)
    print(f"second image: centre {blurred[0, 0, 4, 4]:.3f}, corner {blurred[0, 0, 0, 0]:.3f}")
    pykka.ActorRegistry.stop_all()


if __name__ == "__main__":
    main()
