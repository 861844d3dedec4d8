"""Runs a model's graphs: sends the messages of a run, and returns the outputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from cudnn_actor.actors import Deadline
from cudnn_actor.models.keeping import Keeping, Kept, Replaced
from cudnn_actor.models.preparing import Preparing
from cudnn_actor.models.steps import StepsRun
from cudnn_actor.protocol.errors import CudnnActorError, NotDeployed
from cudnn_actor.protocol.messages.messages import Allocate, RunModel
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["Running"]

_MOST_DEPLOYED = 8
"""How often a run may find that its graph has been forgotten."""


class Running:
    """Runs the graphs that a model keeps.

    Parameters
    ----------
    gpu
        The `CudnnRef` of the service.
    keeping, preparing
        The model's graphs and weights, and the object that makes the graphs ready.
    """

    def __init__(self, gpu: Any, keeping: Keeping, preparing: Preparing) -> None:
        self._gpu = gpu
        self._keeping = keeping
        self._preparing = preparing
        self._output_names = [each.name for each in keeping.source.outputs]

    async def run_arrays(
        self, arrays: dict[str, np.ndarray], specs: Mapping[str, TensorSpec], deadline: Deadline
    ) -> dict[str, Any] | None:
        """Run the graph that the service has for arrays of these specs. Raises as `run`.

        None if that is not enough, for example because no such graph is deployed. Then call `run`.

        Nearly all runs take this way, which has fewer layers than `run`: when an answer arrives, Python goes
        through each coroutine that awaits another one.
        """
        keeping = self._keeping
        try:
            kept = self._preparing.ready(specs)
        except Replaced:  # on another thread, since its caller has looked
            return None
        if kept is None:
            return None
        try:
            if kept.deployed is None or kept.values:
                return None
            message = RunModel(model=keeping.ref, arrays=arrays)
            results = await self._gpu.ask(message, timeout=deadline.left_s)
            return {name: results[name] for name in self._output_names}
        except NotDeployed:
            return None
        except CudnnActorError as error:
            if not keeping.forget_torn(kept, error):
                raise
            return None
        finally:
            keeping.release(kept)

    async def run(
        self,
        given: Mapping[str, Any],
        keep: Collection[str],
        deadline: Deadline,
        kept: Kept,
        *,
        again: bool,
        crashes: int,
    ) -> dict[str, Any]:
        """Run a graph that is in use. `keep`, `again` and `crashes` are those of `Model.run_checked`."""
        if kept.of.steps:
            return await self._run_steps(given, keep, deadline, kept)
        constants, graph, ask = kept.of.constants, kept.graph, self._gpu.ask
        made: dict[str, BufferRef] = {}
        try:
            for name in dict.fromkeys(keep):
                if name in constants:
                    made[name] = await self._gpu.upload(constants[name], timeout=deadline.left_s)
                else:
                    assert graph is not None
                    spec = graph.ports[graph.places[kept.of.outputs[name]]].spec
                    made[name] = await ask(Allocate(spec=spec), timeout=deadline.left_s)
            results: dict[str, Any]
            if graph is None:
                results = {name: array.copy() for name, array in constants.items()}
            else:
                into = {name: ref for name, ref in made.items() if name not in constants} if made else None
                inputs = {**given, **kept.values} if kept.values else given
                message = RunModel.of(self._keeping.ref, inputs, into, again=again, crashes=crashes)
                results = await self._answer(kept, message, deadline)
            if made:
                results, made = {**results, **made}, {}
            return {name: results[name] for name in self._output_names}
        finally:
            for ref in made.values():
                self._keeping.discard(ref)

    async def _run_steps(
        self, given: Mapping[str, Any], keep: Collection[str], deadline: Deadline, kept: Kept
    ) -> dict[str, Any]:
        run = StepsRun(self._gpu, self._keeping.discard, kept.of, kept.weights, deadline)
        results = await run.run({**given, **kept.values}, keep)
        return {name: results[name] for name in self._output_names}

    async def _answer(self, kept: Kept, message: RunModel, deadline: Deadline) -> dict[str, np.ndarray]:
        """The answer to a run.

        If the service had to forget the graph, because a worker that could not be ended may still write its
        places, the graph gets new ones and is deployed again.
        """
        tries = 0
        while True:
            tries += 1
            # Read once: another loop may deploy the graph again meanwhile, and this run's error is about the
            # graph that this run has sent.
            deployed = kept.deployed
            if deployed is None:  # a run waits neither for tuning nor for kernels that it can do without
                await self._preparing.deploy(kept, deadline, "cached", soon=True)
                deployed = kept.deployed
            try:
                results: dict[str, np.ndarray] = await self._gpu.ask(message, timeout=deadline.left_s)
            except NotDeployed as error:
                if error.unloaded or tries == _MOST_DEPLOYED:
                    raise
                if deployed is not None:
                    self._keeping.forget_places(kept, deployed)
            else:
                return results
