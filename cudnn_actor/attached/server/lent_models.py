"""Models that the server's own process has loaded, and that clients run by name: arrays in, arrays out.

Such a model belongs to the server: its weights, graphs and places are there once for all clients, and a new
set of dims is imported and deployed here. A client's run of one names no buffer, so it has no place in the
order of the client's other requests.

A name keeps the reference by which clients know it, whatever model it stands for: a client that has got it
goes on when another model takes the place of the first.

Serving processes of the server's own program run models by what the server gives for them (`lend_run`): so
the requests of all such processes are in the same batches.
"""

from __future__ import annotations

import asyncio
import functools
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

__all__ = ["LentModels", "Run"]

Run = Callable[[Mapping[str, np.ndarray], float | None], asyncio.Future[dict[str, np.ndarray]]]
"""Begins a run with these inputs, and a timeout in seconds or None. Raises `CudnnActorError`."""


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
        self._runs: dict[ModelRef, Run] = {}
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

    def lend_run(self, model: Model, run: Run) -> LoadedModel:
        """Have clients' runs of a model of this process begun by `run`, when they come: they take no turn.

        Returns what a client makes a `ServedModel` of. Clients are not told of it.
        """
        self._runs[model.ref] = run
        return LoadedModel(model.ref, model.inputs, model.defaults, model.outputs)

    def take_back_run(self, model: Model) -> None:
        """Begin no more runs of such a model. Those that have begun go on."""
        self._runs.pop(model.ref, None)

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

    def run_of(self, message: Any) -> Run | None:
        """What begins the run that a message asks for, of a model of `lend_run`; None for anything else."""
        return self._runs.get(message.model) if self._runs and isinstance(message, RunModel) else None

    @staticmethod
    def begin(asked: Asked, run: Run) -> None:
        """Begin such a run for a client. The answer is delivered to `asked`. Raises `CudnnActorError`."""
        message = asked.known.message
        _check_arrays(message)
        asked.work = run(message.arrays, asked.timeout_s)
        asked.work.add_done_callback(functools.partial(_deliver, asked))

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


def _deliver(asked: Asked, work: asyncio.Future[dict[str, np.ndarray]]) -> None:
    if work.cancelled():
        asked.deliver(None, None)
    elif (error := work.exception()) is not None:
        asked.deliver(None, error)
    else:
        asked.deliver(work.result(), None)


def _check_arrays(message: RunModel) -> None:
    if message.buffers or message.into:
        raise InvalidRequest(
            field="buffers",
            value=Words("buffers of a client"),
            problem="cannot be used by a model of the server's process",
            fix="give arrays, or load the model's file",
        )
