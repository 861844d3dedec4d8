"""Models for threads, as `BlockingRef.load` and `BlockingRef.batched` return them."""

from __future__ import annotations

import concurrent.futures
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self

import numpy as np

from cudnn_actor.blocking.methods import blocking, nothing
from cudnn_actor.blocking.portal import Portal
from cudnn_actor.models import BatchedModel, BatchStatistics, Feature, Model
from cudnn_actor.protocol.messages.model_messages import ModelRef
from cudnn_actor.protocol.types.tensor import TensorSpec
from cudnn_actor.protocol.types.tune import Tune
from cudnn_actor.service.requests import Requests

__all__ = ["BlockingBatchedModel", "BlockingModel", "async_model"]


class BlockingModel:
    """A model that a service runs, for threads. `BlockingRef.load` makes it. It has the methods of `Model`.

    Any number of threads may run it at a time.

    Parameters
    ----------
    gpu
        The `BlockingRef` of its service, which would be closed if it was collected.
    portal
        The portal that runs coroutines.
    model
        The model for asyncio.
    """

    def __init__(self, gpu: Any, portal: Portal, model: Model) -> None:
        self._gpu, self._portal = gpu, portal
        self.model = model

    def __repr__(self) -> str:
        return repr(self.model)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _for_a_call(self) -> tuple[Model, Callable[[], None]]:
        return self.model, nothing

    warm = blocking(Model.warm)
    write = blocking(Model.write)
    explain = blocking(Model.explain)

    def run(
        self,
        inputs: Mapping[str, Any] | None = None,
        /,
        *,
        keep: Sequence[str] = (),
        timeout: float | None = None,
        **named: Any,
    ) -> dict[str, Any]:
        """See `CudnnRef.run`: `run(image=x)`, or `run({"image": x})`. Blocks."""
        sending: tuple[Requests, Callable[[], None]] = self._gpu._for_a_call()
        requests, undo = sending
        run = functools.partial(requests.run, self.model, inputs, keep=keep, timeout=timeout, **named)
        try:
            results = self._portal.call(run)
        except BaseException:  # as in `blocking`
            undo()
            raise
        return results

    def close(self) -> None:
        """Free the weights, and drop the graphs and their plans, once no run needs them.

        Idempotent; never blocks; running it afterwards is an error.
        """
        self.model.end()

    @property
    def ref(self) -> ModelRef:
        """The model's reference, for messages; see `Model.ref`."""
        return self.model.ref

    @property
    def inputs(self) -> tuple[Feature, ...]:
        """The inputs that have to be given, in order."""
        return self.model.inputs

    @property
    def defaults(self) -> tuple[Feature, ...]:
        """The inputs that may be left out, since the model has default values for them, in order."""
        return self.model.defaults

    @property
    def outputs(self) -> tuple[Feature, ...]:
        """The outputs, in order."""
        return self.model.outputs

    @property
    def nbytes(self) -> int:
        """Bytes that its weights take in the service now; 0 before the first run, warm-up or explanation."""
        return self.model.nbytes

    @property
    def fixed(self) -> bool:
        """Whether each dim of each input is a number."""
        return self.model.fixed

    @property
    def weights(self) -> dict[str, TensorSpec]:
        """The weights that `write` takes: names and specs, as in the file. Raises as `write`."""
        return self.model.weights

    @property
    def options(self) -> dict[str, Any]:
        """The options with which the model's file was read; see `Model.options`."""
        return self.model.options

    @property
    def tune(self) -> Tune:
        """Whether its plans are tuned when it is warmed: see `CudnnRef.load`."""
        return self.model.tune

    @property
    def swappable(self) -> bool:
        """Whether its weights may be overwritten."""
        return self.model.swappable


class BlockingBatchedModel:
    """A model that runs requests of many threads together. Made by `BlockingRef.batched`; used in `with`.

    Parameters
    ----------
    gpu
        The `BlockingRef` of its service, which would be closed if it was collected.
    portal
        The event loop that it belongs to.
    endpoint
        The batched model for asyncio.
    """

    def __init__(self, gpu: Any, portal: Portal, endpoint: BatchedModel) -> None:
        self._gpu = gpu
        self._portal = portal
        self._endpoint = endpoint

    def __repr__(self) -> str:
        return repr(self._endpoint)

    def __enter__(self) -> Self:
        """Make it ready. Blocks, and raises, as `BatchedModel.__aenter__`."""
        try:
            self._portal.call(self._endpoint.__aenter__)
        except BaseException:
            self._portal.begin(self._endpoint.aclose)  # it may have been entered before the interruption
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Refuse further requests, and wait until the accepted ones have been answered. Idempotent. Blocks.

        If a signal handler interrupts it, the requests that have no answer yet are cancelled.
        """
        self._portal.call(self._endpoint.aclose)

    def __call__(
        self, inputs: Mapping[str, Any] | None = None, /, *, timeout: float | None = None, **named: Any
    ) -> dict[str, np.ndarray]:
        """Run the model on one or a few samples, in a batch with samples of other threads. Blocks.

        See `BatchedModel`.
        """
        run = functools.partial(self._endpoint, inputs, timeout=timeout, **named)
        return self._portal.call(run)

    def submit(
        self, inputs: Mapping[str, Any] | None = None, /, *, timeout: float | None = None, **named: Any
    ) -> concurrent.futures.Future[dict[str, np.ndarray]]:
        """Send a request as a call does, but return the future of its answer at once; cancelling it withdraws
        the request.

        Never blocks. Raises `ServiceStopped` once the handle is closed. The future raises all other errors,
        also `MailboxFull` if `max_waiting` requests wait.
        """
        send = functools.partial(self._endpoint.submit, inputs, timeout=timeout, **named)
        return self._portal.submit(send, nothing)

    @property
    def max_batch(self) -> int:
        """The most samples that a batch has, and a request may have."""
        return self._endpoint.max_batch

    def statistics(self) -> BatchStatistics:
        """The counts of batches and samples so far, and of the requests that wait now. Never blocks."""
        return self._endpoint.statistics()


def async_model(model: Any) -> Any:
    """The model for asyncio of a `BlockingModel`; any other object as it is."""
    return model.model if isinstance(model, BlockingModel) else model
