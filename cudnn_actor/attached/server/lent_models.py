"""Models that the server's own process has loaded, and that clients run by name: arrays in, arrays out.

Such a model belongs to the server: its weights, graphs and places are there once for all clients, and a new
set of dims is imported and deployed here. A client's run of one names no buffer, so it has no place in the
order of the client's other requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from cudnn_actor.actors import within
from cudnn_actor.attached.server.asked import Asked
from cudnn_actor.attached.wire import LoadedModel
from cudnn_actor.models import Model
from cudnn_actor.protocol.errors import InvalidRequest, Words
from cudnn_actor.protocol.messages.messages import RunModel
from cudnn_actor.protocol.messages.model_messages import ModelRef

__all__ = ["LentModels"]


class LentModels:
    """The models by their names, and by the references that clients know them by. On the server's loop only.

    Parameters
    ----------
    models
        Loaded by this process.
    """

    def __init__(self, models: Mapping[str, Model]) -> None:
        self.shown = {name: _shown(model) for name, model in models.items()}
        """What clients are told of each."""
        self._by_ref: dict[ModelRef, Model] = {model.ref: model for model in models.values()}
        """By the references of now: a model that is replaced later keeps it for clients."""

    def of(self, message: Any) -> Model | None:
        """The model that a message runs, if it is one of these."""
        return self._by_ref.get(message.model) if isinstance(message, RunModel) else None

    def start(
        self, asked: Asked, model: Model, in_task: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    ) -> None:
        """Run a model for a client. The answer is delivered to `asked`."""
        asked.work = in_task(_run(asked, model))
        # Also if it is cancelled before it begins; of several answers the first counts.
        asked.work.add_done_callback(lambda _: asked.deliver(None, None))


async def _run(asked: Asked, model: Model) -> None:
    message: RunModel = asked.known.message
    try:
        _check_arrays(message)
        with within(asked.timeout_s) as deadline:
            results = await model.run_checked(model.validated(message.arrays), deadline)
    except Exception as error:  # noqa: BLE001 - the answer says it
        asked.deliver(None, error)
    else:
        asked.deliver(results, None)


def _check_arrays(message: RunModel) -> None:
    if message.buffers or message.into:
        raise InvalidRequest(
            field="buffers",
            value=Words("buffers of a client"),
            problem="cannot be used by a model of the server's process",
            fix="give arrays, or load the model's file",
        )


def _shown(model: Model) -> LoadedModel:
    return LoadedModel(model.ref, model.inputs, model.defaults, model.outputs)
