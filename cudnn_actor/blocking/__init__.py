"""The client for code without asyncio: threads, Flask, Celery, notebooks, scripts.

    from cudnn_actor.blocking import spawn

    with spawn(device="auto") as gpu:
        x = gpu.upload(image)
        ...

The methods are those of `CudnnRef`, without `await`.
"""

from __future__ import annotations

from cudnn_actor.blocking.connecting import connect
from cudnn_actor.blocking.handle import BlockingRef, BlockingRequests, BlockingScope
from cudnn_actor.blocking.models import BlockingBatchedModel, BlockingModel
from cudnn_actor.blocking.served_models import BlockingServedModel, served_model
from cudnn_actor.blocking.spawning import spawn

__all__ = [
    "BlockingBatchedModel",
    "BlockingModel",
    "BlockingRef",
    "BlockingRequests",
    "BlockingScope",
    "BlockingServedModel",
    "connect",
    "served_model",
    "spawn",
]
