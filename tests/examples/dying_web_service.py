"""The example with a worker that, once it has been killed, has no successor: its starts fail, five times."""

from cudnn_actor import FaultPlan
from examples.fastapi_service import make_app

faults = FaultPlan()
for start in range(2, 7):
    faults = faults.at_start(start)
app = make_app(device="cpu", max_restarts=5, faults=faults)
