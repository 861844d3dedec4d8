"""What stands behind handles: the one place where tests reach what users of a service or a model cannot see.

A handle hides its service, so that code that runs beside a service runs as an attached client, too. Tests of
crashes and leaks need what is behind it. They ask for it here, so its name stands in one place.
"""

from __future__ import annotations

from typing import Any

__all__ = ["gpu_behind", "kept_by", "service_behind"]


def service_behind(handle: Any) -> Any:
    """The service of a handle or of a spawning; of an attached client, what it has in place of a service."""
    return handle._service


def gpu_behind(model: Any) -> Any:
    """The handle with which a model was loaded, or that a blocking handle stands on."""
    return model._gpu


def kept_by(model: Any) -> Any:
    """What a model keeps: its graphs with their weights (`cudnn_actor.models.keeping.Keeping`)."""
    return model._keeping
