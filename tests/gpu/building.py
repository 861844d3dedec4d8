"""A builder for tests that build plans as a service does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cudnn_actor.engines.base import Builder, Engine
from cudnn_actor.engines.remote import BuilderHost

__all__ = ["builder_of"]


@contextmanager
def builder_of(engine: Engine) -> Iterator[Builder | None]:
    """A builder of an engine's, open; None where the engine builds on the spot."""
    with BuilderHost() as builders:
        builder = engine.builder(builders)
        if builder is None:
            yield None
            return
        try:
            builder.open()
            yield builder
        finally:
            builder.close()
