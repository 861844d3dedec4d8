"""Models of the server's process, for threads of attached processes."""

from __future__ import annotations

from collections.abc import Callable

from cudnn_actor.attached import ServedModel
from cudnn_actor.attached import served_model as async_served_model
from cudnn_actor.blocking.handle import BlockingRequests
from cudnn_actor.blocking.methods import blocking, nothing
from cudnn_actor.models import Feature

__all__ = ["BlockingServedModel", "served_model"]


def served_model(gpu: BlockingRequests, name: str) -> BlockingServedModel:
    """A model that the server's process has loaded and lends by this name.

    Parameters and errors are those of `cudnn_actor.attached.served_model`; `gpu` is a handle of
    `cudnn_actor.blocking.connect`. Sends no message; never blocks.
    """
    return BlockingServedModel(gpu, async_served_model(gpu._requests, name))


class BlockingServedModel:
    """See `served_model`. Any number of threads may run it at a time. It has nothing to close.

    Parameters
    ----------
    gpu
        The attached handle, which would be closed if it was collected.
    model
        The model for asyncio.
    """

    def __init__(self, gpu: BlockingRequests, model: ServedModel) -> None:
        self._gpu, self._portal = gpu._handle(), gpu._portal
        self._model = model

    def __repr__(self) -> str:
        return repr(self._model)

    def _for_a_call(self) -> tuple[ServedModel, Callable[[], None]]:
        return self._model, nothing

    run = blocking(ServedModel.run)

    @property
    def name(self) -> str:
        """The name by which the server lends it."""
        return self._model.name

    @property
    def inputs(self) -> tuple[Feature, ...]:
        """The inputs that have to be given, in order."""
        return self._model.inputs

    @property
    def defaults(self) -> tuple[Feature, ...]:
        """The inputs that may be left out, since the model has default values for them, in order."""
        return self._model.defaults

    @property
    def outputs(self) -> tuple[Feature, ...]:
        """The outputs, in order."""
        return self._model.outputs
