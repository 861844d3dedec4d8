"""A version of a model that is loaded: its runs, alone or in batches, and its end once no run needs it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cudnn_actor.models import BatchedModel, Model
from cudnn_actor.models.source import Feature
from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.service.client import CudnnRef
from cudnn_actor.serving.model_settings import Batching, Settings
from cudnn_actor.serving.statistics import ModelCounts, count_samples
from cudnn_actor.serving.tensors import NAMES
from cudnn_actor.serving.under_way import UnderWay

__all__ = ["Served", "load"]

PLATFORM = "cudnn_actor"


class Served:
    """A version of a model that answers requests. `load` makes it.

    All methods run on one event loop. So no other method runs between two `await`s of a method.

    Parameters
    ----------
    gpu
        The service.
    version
        The version's name in the protocol.
    model
        The model.
    endpoint
        The batched model that runs requests; None if each request runs by itself.
    batching
        How batches are formed; None without `endpoint`.
    """

    def __init__(
        self,
        gpu: CudnnRef,
        version: str,
        model: Model,
        endpoint: BatchedModel | None,
        batching: Batching | None,
    ) -> None:
        self._gpu = gpu
        self.version = version
        self.model = model
        self._endpoint = endpoint
        self._batching = batching
        self.under_way = UnderWay()
        self.count_in(ModelCounts())

    @property
    def batched(self) -> bool:
        """Whether requests are put into batches."""
        return self._endpoint is not None

    @property
    def outputs(self) -> list[str]:
        """The names of the model's outputs, in order."""
        return [each.name for each in self.model.outputs]

    def count_in(self, counts: ModelCounts) -> None:
        """Count this version's runs in `counts` from now on."""
        self._counts = counts
        if self._endpoint is not None:
            self._endpoint.on_batch = counts.ran_batch

    async def run(self, inputs: Mapping[str, np.ndarray], timeout_s: float | None) -> dict[str, np.ndarray]:
        """The outputs for these inputs. Raises as `CudnnRef.run`, and `MailboxFull` if too many wait."""
        with self.under_way.one():  # before anything is awaited: `close` waits for it
            return await self._outputs(dict(inputs), timeout_s)

    def begin(
        self, inputs: Mapping[str, np.ndarray], timeout_s: float | None
    ) -> asyncio.Future[dict[str, np.ndarray]]:
        """Begin a run at once, and return its future. A request that is put into a batch costs no task.
        Otherwise as `run`."""
        future = self._submit(dict(inputs), timeout_s)
        if future is None:
            return asyncio.ensure_future(self.run(inputs, timeout_s))
        self.under_way.begin()  # in the step in which it is submitted, since `close` waits for it
        future.add_done_callback(self._note_end)
        return future

    def _note_end(self, _: asyncio.Future[dict[str, np.ndarray]]) -> None:
        self.under_way.end()

    async def _outputs(self, inputs: dict[str, np.ndarray], timeout_s: float | None) -> dict[str, np.ndarray]:
        future = self._submit(inputs, timeout_s)
        if future is None:
            began_ns = time.perf_counter_ns()
            outputs = await self._gpu.run(self.model, inputs, timeout=timeout_s)
            self._counts.ran_alone(self.samples(inputs), time.perf_counter_ns() - began_ns)
            return outputs
        try:
            return await future
        except BaseException:
            future.cancel()
            raise

    def _submit(
        self, inputs: dict[str, np.ndarray], timeout_s: float | None
    ) -> asyncio.Future[dict[str, np.ndarray]] | None:
        """Put a request into a batch, and return its future; None if the request must run by itself. Raises
        `MailboxFull`."""
        if self._endpoint is None:
            return None
        try:
            return self._endpoint.submit(inputs, timeout=timeout_s)
        except InvalidRequest:  # other dims, or more samples; if it is wrong, its own run says so
            return None

    @property
    def waiting(self) -> int:
        """How many requests wait for a batch."""
        return 0 if self._endpoint is None else self._endpoint.statistics().waiting

    def samples(self, inputs: Mapping[str, np.ndarray]) -> int:
        """How many samples a request has."""
        return count_samples(inputs, batched=self.batched)

    def metadata(self, name: str) -> dict[str, Any]:
        """The protocol's record of the model: its inputs and outputs."""
        return {
            "name": name,
            "versions": [self.version],
            "platform": PLATFORM,
            "inputs": [_describe(each) for each in (*self.model.inputs, *self.model.defaults)],
            "outputs": [_describe(each) for each in self.model.outputs],
        }

    def config(self, name: str) -> dict[str, Any]:
        """The model's configuration, in Triton's form. If requests are put into batches, its dims leave out
        the batch's."""
        batched = self.batched
        config: dict[str, Any] = {
            "name": name,
            "platform": PLATFORM,
            "backend": PLATFORM,
            "version_policy": {"specific": {"versions": [int(self.version)]}},
            "max_batch_size": self._endpoint.max_batch if self._endpoint is not None else 0,
            "input": [
                *(_configuration_of(each, batched=batched) for each in self.model.inputs),
                *(
                    {**_configuration_of(each, batched=batched), "optional": True}
                    for each in self.model.defaults
                ),
            ],
            "output": [_configuration_of(each, batched=batched) for each in self.model.outputs],
        }
        if self._batching is not None:
            config["dynamic_batching"] = {
                "preferred_batch_size": list(self._batching.sizes or ()),
                "max_queue_delay_microseconds": int(self._batching.max_delay_us),
            }
        return config

    async def close(self) -> None:
        """Wait until all requests of this version have been answered, then free it. Nobody may begin another
        `run`."""
        await self.under_way.none()
        if self._endpoint is not None:
            await self._endpoint.aclose()
        await self.model.close()


async def load(
    gpu: CudnnRef, name: str, path: Path, version: str, settings: Settings, *, if_possible: bool
) -> Served:
    """Load a file's model and warm it. Its runs are counted under `name`.

    `if_possible`: whether a model that cannot be batched runs each request by itself. If not, raises
    `InvalidRequest` for such a model. Raises as `CudnnRef.load`.
    """
    batching = settings.batch
    model = await gpu.load(path, dtype=settings.dtype, tune=settings.tune, name=name)
    try:
        endpoint = None if batching is None else _make_batched(gpu, model, settings, batching, if_possible)
        if endpoint is not None:
            await endpoint.__aenter__()
        elif settings.dims:
            await model.warm(settings.dims)
        return Served(gpu, version, model, endpoint, batching if endpoint is not None else None)
    except BaseException:
        await model.close()
        raise


def _make_batched(
    gpu: CudnnRef, model: Model, settings: Settings, batching: Batching, if_possible: bool
) -> BatchedModel | None:
    """The batched model that runs requests; None if batches are impossible, and `if_possible` allows that."""
    try:
        return gpu.batched(
            model,
            max_batch=batching.max,
            sizes=batching.sizes,
            dims=settings.dims,
            max_delay_us=batching.max_delay_us,
        )
    except InvalidRequest:
        if if_possible:
            return None
        raise


def _describe(feature: Feature) -> dict[str, Any]:
    return {"name": feature.name, "datatype": _datatype(feature), "shape": _dims(feature)}


def _configuration_of(feature: Feature, *, batched: bool) -> dict[str, Any]:
    name = _datatype(feature)
    return {"name": feature.name, "data_type": f"TYPE_{name}", "dims": _dims(feature)[int(batched) :]}


def _datatype(feature: Feature) -> str:
    """The protocol's name of a feature's dtype; the name of text for elements that are no numbers."""
    return "BYTES" if feature.dtype is None else NAMES[feature.dtype]


def _dims(feature: Feature) -> list[int]:
    """The sizes of a feature's dims, with -1 for sizes that requests decide."""
    return [dim if isinstance(dim, int) else -1 for dim in feature.dims or ()]
