"""Models: what `CudnnRef.load` gives, and the errors of what it is given."""

from __future__ import annotations

from cudnn_actor.models.errors import InvalidModel, UnsupportedModel
from cudnn_actor.models.model import Feature, Model, NeedsValues, Source, Specialised

__all__ = ["Feature", "InvalidModel", "Model", "NeedsValues", "Source", "Specialised", "UnsupportedModel"]
