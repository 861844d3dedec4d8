"""Models that the server's own process has loaded, and that clients run by name, with arrays as inputs and
outputs.

Such a model belongs to the server: its weights, graphs and places exist once for all clients, and a new set
of dims is imported and deployed here. A client's run of it names no buffer. So it need not be in order with
the client's other requests.

Clients know a name by a reference, which stays the same when another model gets the name. So a client goes on
with the reference that it has.

Serving processes of the server's own program run models by a function that the server has given (`lend_run`).
So the requests of all these processes are in the same batches.
"""

from __future__ import annotations

import asyncio
import functools
import secrets
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
"""A function that begins a run with these inputs, and a timeout in seconds or None. It raises
`CudnnActorError`."""


class LentModels:
    """The models that clients may run, by name. Used on the server's loop only.

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
        if name not in self._refs:
            ref = model.ref
            while ref in self._names:  # another name has it, and keeps it
                ref = ModelRef(number=ref.number, service=secrets.randbelow(1 << 62))
            self._refs[name], self._names[ref] = ref, name

    def take_back(self, name: str) -> None:
        """Stop lending the model of a name, if one is lent. Runs that have begun go on."""
        self._models.pop(name, None)

    def lend_run(self, model: Model, run: Run) -> LoadedModel:
        """Let `run` begin clients' runs of a model of this process, as soon as they come: they take no turn
        in the fair share.

        Returns the record of which a client makes a `ServedModel`. Clients are not told of it.
        """
        self._runs[model.ref] = run
        return LoadedModel(model.ref, model.inputs, model.defaults, model.outputs)

    def take_back_run(self, model: Model) -> None:
        """Stop lending such a model. Runs that have begun go on."""
        self._runs.pop(model.ref, None)

    @property
    def records(self) -> dict[str, LoadedModel]:
        """The record that clients get of each lent model, by its name."""
        return {
            name: LoadedModel(self._refs[name], model.inputs, model.defaults, model.outputs)
            for name, model in self._models.items()
        }

    def name_of(self, message: Any) -> str | None:
        """The name under which the model of a message's run is or was lent; None for any other message."""
        return self._names.get(message.model) if isinstance(message, RunModel) else None

    def run_of(self, message: Any) -> Run | None:
        """The function of `lend_run` that begins the run of a message; None for any other message."""
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
        # The task may be cancelled before it begins. If there are several answers, the first counts.
        asked.work.add_done_callback(lambda _: asked.deliver(None, None))

    async def _answer(self, asked: Asked, name: str) -> None:
        try:
            results = await self.run(name, asked.known.message, asked.timeout_s)
        except Exception as error:  # noqa: BLE001 - the answer says it
            asked.deliver(None, error)
        else:
            asked.deliver(results, None)

    async def run(self, name: str, message: RunModel, timeout_s: float | None) -> dict[str, np.ndarray]:
        """Run the model that is lent under a name. If it is closed because another model has got the name,
        run that one."""
        _check_arrays(message)
        with within(timeout_s) as deadline:
            while (model := self._models.get(name)) is not None:
                try:
                    return await model.run_checked(model.validated_inputs(message.arrays), deadline)
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
