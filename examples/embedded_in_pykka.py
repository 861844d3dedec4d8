"""A plain pykka system. One of its actors owns the service, and is told when the service gives up.

    python examples/embedded_in_pykka.py

It does not use asyncio. The actor deploys a model, which is a graph with its weights: each run is one
message, allocates nothing in the service, and runs again if a crash interrupts it. `start(parent=...)` names
the actor that gets `Escalated` when the service has used up its restarts. The parent decides what happens
then: this one starts a new service.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pykka

from cudnn_actor import (
    CudnnService,
    Fault,
    FaultPlan,
    GraphBuilder,
    ServiceStopped,
    TensorSpec,
    logging,
    start,
)
from cudnn_actor.messages import Allocate, DeployModel, ModelGraph, ModelRef, RunModel, WarmModel
from cudnn_actor.protocol import Message
from cudnn_actor.supervision import Escalated

# These faults make the service give up: the first run of the model kills the worker, and every start of the
# worker except the first fails. With max_restarts=1 the service gives up at once.
BROKEN = FaultPlan().at(1, Fault.STICKY, of=RunModel).at_start(2, times=10)
DIMS = (1, 1, 8, 8)
ONES = np.full((1, 1, 3, 3), 1 / 9, dtype=np.float32)


class Vision(pykka.ThreadingActor):
    """An actor of your own: messages are arrays, replies are arrays blurred by the service."""

    def __init__(self) -> None:
        super().__init__()
        self.service: CudnnService | None = None
        self.model: ModelRef | None = None
        self.escalated = pykka.ThreadingFuture[str]()

    def on_start(self) -> None:
        """Own a service from the beginning to the end of this actor."""
        self.serve(faults=BROKEN, max_restarts=1)
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
                self.serve()
                print("service 2 started")
                self.escalated.set(message.cause.cause)  # last: then the main thread prints
        return None

    def serve(self, **options: Any) -> None:
        """Start a service, and deploy the model in it: a graph, and a buffer for each of its ports."""
        self.service = start(parent=self.actor_ref, device="cpu", **options)
        g = GraphBuilder()
        graph = g.build(y=g.conv(g.input("x", DIMS), g.input("w", ONES.shape), pad=1))
        x, w, y = (TensorSpec.packed(dims, "float32") for dims in (DIMS, ONES.shape, DIMS))
        weight = self.ask(Allocate(spec=w, data=ONES))
        placed = ModelGraph(
            name="8 by 8",
            graph=graph,
            buffers=(self.ask(Allocate(spec=x)), weight, self.ask(Allocate(spec=y))),
            specs={"image": x},
            inputs={"image": "x"},
            outputs={"blurred": "y"},
        )
        self.model = self.ask(DeployModel())
        self.ask(WarmModel(model=self.model, graphs=(placed,)))

    def blur(self, image: np.ndarray) -> np.ndarray:
        """Run the model: one message to the service."""
        assert self.model is not None
        blurred: np.ndarray = self.ask(RunModel(model=self.model, arrays={"image": image}))["blurred"]
        return blurred

    def ask(self, message: Message) -> Any:
        """Ask the service through its pykka reference: blocks this actor, and raises typed errors."""
        assert self.service is not None
        return self.service.actor_ref.ask(message, block=True)


def main() -> None:
    """Ask, see the service fail, and ask the new service."""
    vision = Vision.start()
    image = np.ones(DIMS, dtype=np.float32)
    try:
        send(vision, image)
    finally:
        vision.stop()


def send(vision: pykka.ActorRef[Vision], image: np.ndarray) -> None:
    """Send an image. If that fails, send it again once the actor has reacted."""
    try:
        vision.ask(image, block=True, timeout=10)
    except ServiceStopped as error:
        cause = vision.proxy().escalated.get().get(timeout=10)
        print(f"first image: no answer, safe to send again: {error.retry_safe}")
        print(f"the reason: {cause}")
    blurred = vision.ask(image, block=True, timeout=10)
    print(f"second image: centre {blurred[0, 0, 4, 4]:.3f}, corner {blurred[0, 0, 0, 0]:.3f}")


if __name__ == "__main__":
    logging.configure()  # the services' log lines, on stderr
    main()
