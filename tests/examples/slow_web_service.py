"""The example with convolutions that take their time, so that some are in flight when a test says so."""

from cudnn_actor import ConvFwd, Fault, FaultPlan
from examples.fastapi_service import make_app

SLOW_S = 0.1
app = make_app(
    device="cpu",
    faults=FaultPlan().at(1, Fault.SLOW, of=ConvFwd, times=10_000, seconds=SLOW_S),
)
