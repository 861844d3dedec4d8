"""Models: the `Model` that `CudnnRef.load` gives, batches of its runs (`gpu.batched`), and its errors."""

from __future__ import annotations

from cudnn_actor.models.batching import BatchedModel, BatchStatistics
from cudnn_actor.models.errors import InvalidModel, ModelNotFound, UnsupportedModel
from cudnn_actor.models.model import Model
from cudnn_actor.models.source import Feature

__all__ = [
    "BatchStatistics",
    "BatchedModel",
    "Feature",
    "InvalidModel",
    "Model",
    "ModelNotFound",
    "UnsupportedModel",
]
