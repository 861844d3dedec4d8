"""The kinds of callers and of requests of a run of the chaos harness."""

from __future__ import annotations

import enum

__all__ = ["OF_A_MODEL", "LoadKind"]


class LoadKind(enum.StrEnum):
    """A kind of caller, or a kind of request."""

    TASKS = "tasks"
    """Tasks of one event loop."""
    LOOPS = "loops"
    """Tasks of further event loops, each on its own thread."""
    THREADS = "threads"
    """Plain threads, each of which runs a new event loop for every few requests."""
    PYKKA = "pykka"
    """Plain threads that ask the service's pykka reference."""
    ALARMS = "alarms"
    """The main thread, with an alarm whose handler raises while it sends."""
    MODELS = "models"
    """Tasks of the first event loop that run the model of `--model`."""
    BATCHED = "batched"
    """Tasks of that loop that send samples to `gpu.batched` of that model."""
    SWAPS = "swaps"
    """Tasks of that loop that run the model while all its weights are overwritten every second."""
    ATTACHED = "attached"
    """Tasks of a further event loop that is attached to the service by its socket, as another process is."""
    DOOMED = "doomed"
    """Tasks of an event loop that is attached to another server, which is killed now and then."""
    UPLOADS = "uploads"
    """All of the above also send arrays of over 256 KiB."""
    CANCELS = "cancels"
    """All callers with an event loop also use cancellations and tiny timeouts."""


OF_A_MODEL = (LoadKind.MODELS, LoadKind.BATCHED, LoadKind.SWAPS)
"""The kinds that need a model."""
