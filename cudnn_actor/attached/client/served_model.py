"""A model of the server's process, as an attached process runs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from cudnn_actor.attached.client.attached_service import AttachedService
from cudnn_actor.attached.wire import LoadedModel
from cudnn_actor.models import Feature
from cudnn_actor.models.inputs import checked_inputs, named_once
from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.messages.messages import RunModel
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.service.requests import Requests

__all__ = ["ServedModel", "served_model"]


def served_model(gpu: Requests, name: str) -> ServedModel:
    """A model that the server's process has loaded and given to `serve_socket(models=)` by this name.

    The model is not loaded here: this process needs neither its file nor the package onnx. For options of
    your own, batches, and outputs on the device, load the file by `gpu.load`. Sends no message.

    Parameters
    ----------
    gpu
        A handle that `connect` gave.
    name
        The model's name.

    Raises
    ------
    InvalidRequest
        The handle is not attached, or the server has no loaded model of that name.
    """
    service: object = gpu._service
    if not isinstance(service, AttachedService):
        raise InvalidRequest(
            field="gpu",
            value=gpu,
            problem="is the service's own process, or no handle",
            fix="load the model: gpu.load",
        )
    if name not in service.loaded:
        names = ", ".join(service.loaded)
        raise InvalidRequest(
            field="name",
            value=name,
            problem="is no model that the server's process has loaded and lends",
            fix=f"use one of {names}" if names else "give loaded models to serve_socket(models=)",
        )
    return ServedModel(gpu, name, service.loaded[name])


class ServedModel:
    """A model of the server's process: see `served_model`. Any number of tasks may run it at a time. It need
    not be closed.

    Parameters
    ----------
    gpu
        The attached handle.
    name
        The model's name.
    loaded
        The server's record of the model.
    """

    def __init__(self, gpu: Requests, name: str, loaded: LoadedModel) -> None:
        self._gpu, self._loaded = gpu, loaded
        self.name = name
        """The name by which the server lends it."""

    def __repr__(self) -> str:
        return f"<model {self.name!r} of the server>"

    @property
    def inputs(self) -> tuple[Feature, ...]:
        """The inputs that have to be given, in order."""
        return self._loaded.inputs

    @property
    def defaults(self) -> tuple[Feature, ...]:
        """The inputs that may be left out, since the model has default values for them, in order."""
        return self._loaded.defaults

    @property
    def outputs(self) -> tuple[Feature, ...]:
        """The outputs, in order."""
        return self._loaded.outputs

    async def run(
        self, inputs: Mapping[str, Any] | None = None, /, *, timeout: float | None = None, **named: Any
    ) -> dict[str, np.ndarray]:
        """Run the model: `run(image=x)`, or `run({"image": x})`. Returns the outputs as arrays by name.

        The first run with other dims waits until the server's process has imported the model for them.

        Raises
        ------
        InvalidRequest
            An input is missing, does not have the dtype or dims that the model says, or is a buffer.
        CudnnActorError
            As `CudnnRef.run`.
        """
        values = self._gpu._service.values
        arrays: dict[str, np.ndarray] = {}
        for name, value in checked_inputs(self, values, named_once(inputs, named)).items():
            if isinstance(value, BufferRef):
                raise InvalidRequest(
                    field=name,
                    value=value,
                    problem="is a buffer, and this model takes arrays",
                    fix="give an array, or load the model's file",
                )
            arrays[name] = value
        found = await self._gpu.ask(RunModel(model=self._loaded.ref, arrays=arrays), timeout=timeout)
        return {each.name: found[each.name] for each in self.outputs}
