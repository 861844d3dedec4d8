"""Models that the server's own process has loaded, and that clients run by name: arrays in, arrays out.

Such a model belongs to the server: its weights, graphs and places are there once for all clients, and a new
set of dims is imported and deployed here. A client's run of one names no buffer, so it has no place in the
order of the client's other requests.

A name keeps the reference by which clients know it, whatever model it stands for: a client that has got it
goes on when another model takes the place of the first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

import numpy as np

from cudnn_actor.actors import within
from cudnn_actor.attached.server.asked import Asked
from cudnn_actor.attached.wire import LoadedModel
from cudnn_actor.models import Model
from cudnn_actor.protocol.errors import CudnnActorError, InvalidRequest, NotDeployed, Words
from cudnn_actor.protocol.messages.messages import RunModel
from cudnn_actor.protocol.messages.model_messages import ModelRef

__all__ = ["LentModels"]


class LentModels:
    """The models by their names. On the server's loop only.

    Parameters
    ----------
    models
        The models, which this process has loaded, by the names that clients use.
    """

    def __init__(self, models: Mapping[str, Model]) -> None:
        self._models: dict[str, Model] = {}
        self._refs: dict[str, ModelRef] = {}
        """The reference of each name that was ever lent."""
        self._names: dict[ModelRef, str] = {}
        for name, model in models.items():
            self.lend(name, model)

    def lend(self, name: str, model: Model) -> None:
        """Let clients run a model by a name, from now on."""
        self._models[name] = model
        ref = self._refs.setdefault(name, model.ref)
        self._names[ref] = name

    def take_back(self, name: str) -> None:
        """Lend the model of a name no more, if one is lent. Runs that have begun go on."""
        self._models.pop(name, None)

    @property
    def shown(self) -> dict[str, LoadedModel]:
        """What clients are told of each lent model, by its name."""
        return {
            name: LoadedModel(self._refs[name], model.inputs, model.defaults, model.outputs)
            for name, model in self._models.items()
        }

    def name_of(self, message: Any) -> str | None:
        """The name under which the model that a message runs is or was lent; None for anything else."""
        return self._names.get(message.model) if isinstance(message, RunModel) else None

    def start(
        self, asked: Asked, name: str, in_task: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    ) -> None:
        """Run the model of a name for a client. The answer is delivered to `asked`."""
        asked.work = in_task(self._answer(asked, name))
        # The task may be cancelled before it begins. Of several answers, the first counts.
        asked.work.add_done_callback(lambda _: asked.deliver(None, None))

    async def _answer(self, asked: Asked, name: str) -> None:
        try:
            results = await self._run(name, asked.known.message, asked.timeout_s)
        except Exception as error:  # noqa: BLE001 - the answer says it
            asked.deliver(None, error)
        else:
            asked.deliver(results, None)

    async def _run(self, name: str, message: RunModel, timeout_s: float | None) -> dict[str, np.ndarray]:
        """The outputs of the model; of the model that has taken its place, if it was closed for that."""
        _check_arrays(message)
        with within(timeout_s) as deadline:
            while (model := self._models.get(name)) is not None:
                try:
                    return await model.run_checked(model.validated(message.arrays), deadline)
                except CudnnActorError:
                    if self._models.get(name) is model:
                        raise
        raise NotDeployed(model=message.model.number, inputs="", unloaded=True)


def _check_arrays(message: RunModel) -> None:
    if message.buffers or message.into:
        raise InvalidRequest(
            field="buffers",
            value=Words("buffers of a client"),
            problem="cannot be used by a model of the server's process",
            fix="give arrays, or load the model's file",
        )
