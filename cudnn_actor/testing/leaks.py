"""The leak check: what a test has left on its service."""

from __future__ import annotations

import gc

import pykka

from cudnn_actor.protocol.errors import CudnnActorError
from cudnn_actor.protocol.messages.messages import Drain
from cudnn_actor.service.service import CudnnService
from cudnn_actor.testing.made import Made

__all__ = ["REMEDY", "leaks"]

REMEDY = (
    "free buffers (or make them in a scope), close models, await requests; or mark the test "
    "@pytest.mark.gpu_leaks_allowed"
)


def leaks(service: CudnnService, made: Made, drain_s: float) -> list[str]:
    """The leaks of a service, a line each: requests, models and buffers. Empty if the service has ended.

    Blocks for up to `drain_s` seconds, until earlier requests have finished, and while garbage is collected
    if there are leaks at all.
    """
    if not service.alive:
        return []
    if not _drain(service, drain_s):
        running = [f"{name}{_at('sent', line)}" for name, line in made.unanswered_requests()]
        after = f"after {drain_s:g} s"
        return [f"unfinished {after}: {each}" for each in running] or [f"unfinished requests {after}"]
    left = _alive(service, made) or []
    if left and gc.collect() and _drain(service, drain_s):  # what frees it may be garbage
        again = _alive(service, made)
        if again is not None:  # else a scripted fault of the second drain has ended the service
            left = again
    return left


def _alive(service: CudnnService, made: Made) -> list[str] | None:
    """The models and buffers of an idle service; None if it has ended."""
    models, buffers = service.state.models.all(), service.state.memory.live()
    if not service.alive:  # last: an earlier end may have emptied these lists
        return None
    if models:
        buffers = tuple(each for each in buffers if not made.is_of_a_model(each))
    return [
        *(f"{made.describe(model)}{_at('loaded', made.line_of(model))}" for model in models),
        *(f"{buffer!r}{_at('made', made.line_of(buffer))}" for buffer in buffers),
    ]


def _at(done: str, line: str | None) -> str:
    return "" if line is None else f", {done} at {line}"


def _drain(service: CudnnService, drain_s: float) -> bool:
    """Whether all earlier requests end within `drain_s` seconds. Blocks."""
    try:
        service.actor_ref.ask(Drain(), block=False).get(timeout=drain_s)
    except pykka.Timeout:
        return False
    except CudnnActorError:  # a scripted fault of the drain itself. Earlier requests have taken their buffers
        return True
    return True
