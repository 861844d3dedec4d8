"""Models: graphs with weights that a service knows, so that a run is one message.

A model has a graph for each set of dims of its inputs. Each graph is deployed with buffers for all of its
ports: its weights, and places for one run's inputs and outputs. A run copies its inputs there, runs the
graph, and copies the outputs from there. So the graph always runs on the same addresses, nothing is allocated
for a run, and a run that a crash has interrupted can be repeated.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np

from cudnn_actor.protocol.graphs.named_graph import Graph
from cudnn_actor.protocol.messages.any_message import AnyMessage
from cudnn_actor.protocol.messages.receipts import Receipt
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.records import Record
from cudnn_actor.protocol.types.tensor import TensorSpec
from cudnn_actor.protocol.types.tune import Tune

__all__ = [
    "DeployModel",
    "Draws",
    "ModelGraph",
    "ModelRef",
    "RunModel",
    "UnloadModel",
    "WarmModel",
    "WriteWeights",
]

_set = msgspec.structs.force_setattr


class ModelRef(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, cache_hash=True, gc=False
):
    """Refers to a model of one service; `Model.ref` has it. It is not valid for any other service.

    Parameters
    ----------
    number
        The model's number. No two models of a service have the same one.
    service
        A random number of the service, which distinguishes another service's reference.
    """

    number: int
    service: int

    def __repr__(self) -> str:
        return f"<model {self.number}>"


class Draws(Record):
    """The random numbers that each run of a graph draws.

    Parameters
    ----------
    port
        The port of their state, two int64: the seed, and how many were drawn before.
    seed
        The seed: a whole number that an int64 holds.
    count
        How many numbers a run draws.
    """

    port: str
    seed: int
    count: int


class ModelGraph(Record, eq=False):
    """A model for one set of dims of its inputs: the graph, and the buffers that it runs on.

    Parameters
    ----------
    name
        Its name in the model. A graph that is added later under the same name replaces it.
    graph
        What is run. It must be pure: it may not change its own inputs.
    buffers
        One for each of the graph's ports, inputs first, as in `RunGraph`. Those of `inputs`, `outputs` and
        `draws` are written by each run: each must be a buffer of its own, and nothing else may use it. The
        others are weights.
    specs
        The dims and dtypes of all inputs that a run is given, by their names; their layouts do not matter.
    inputs, outputs
        Inputs that the graph reads, and outputs that it computes → the names of their ports.
    values
        Values that inputs must have for this graph to be the right one: it was made for them.
    constants
        Outputs that need no computation.
    draws
        The random numbers that a run draws; None for none.
    """

    name: str
    graph: Graph
    buffers: tuple[BufferRef, ...]
    specs: dict[str, TensorSpec]
    inputs: dict[str, str]
    outputs: dict[str, str]
    values: dict[str, np.ndarray] = msgspec.field(default_factory=dict)
    constants: dict[str, np.ndarray] = msgspec.field(default_factory=dict)
    draws: Draws | None = None


class DeployModel(AnyMessage[ModelRef], tag=True, eq=False):
    """Make a model of these graphs; answered by its `ModelRef`, at once. Builds no plans: see `WarmModel`.

    The service keeps the weights until the model is unloaded, also if their references are freed before.

    Parameters
    ----------
    graphs
        What the model has.
    name
        The name under which its runs are counted (`CudnnRef.metrics`).
    """

    graphs: tuple[ModelGraph, ...] = ()
    name: str = "model"


class WarmModel(AnyMessage[int], tag=True, eq=False):
    """Add graphs to a model, and build the plans of these; answered by the number of plans built.

    A failure to build is cached, but not reported here.

    Parameters
    ----------
    model, graphs
        The model, and what it gets. A graph that it has already is not added again.
    tune, soon
        As in `Warm`.
    """

    model: ModelRef
    graphs: tuple[ModelGraph, ...]
    tune: Tune = False
    soon: bool = False


class RunModel(AnyMessage[dict[str, np.ndarray]], tag=True, eq=False):
    """Run a model; answered by its outputs by name: new C-contiguous arrays.

    Parameters
    ----------
    model
        What to run.
    arrays, buffers
        The inputs by name: values on the host, which must not change until the reply, or buffers of the
        service, of any layout. Each must have the input's dtype.
    into
        Outputs that are copied to these buffers. They are not among the arrays of the answer.
    again
        Whether it runs again if a crash interrupts it. If not, it gets `OutcomeUnknown` then: for a sender
        that divides it, because one part of it may have been the cause.
    crashes
        At how many crashes its inputs were running before, as parts of other runs. If any, it runs alone; and
        a crash at which it is running counts with these, so that it is quarantined at the second.

    Raises `NotDeployed` if the model has no graph for inputs of these dims: nothing has run.
    """

    model: ModelRef
    arrays: dict[str, np.ndarray] = msgspec.field(default_factory=dict)
    buffers: dict[str, BufferRef] = msgspec.field(default_factory=dict)
    into: dict[str, BufferRef] = msgspec.field(default_factory=dict)
    again: bool = True
    crashes: int = 0

    def __post_init__(self) -> None:
        """Take copies of the dicts, so that their sender may use them for the next message at once."""
        # One after the other, not in a loop: each run of a model makes such a message.
        if type(self.arrays) is dict:
            _set(self, "arrays", self.arrays.copy())
        if type(self.buffers) is dict:
            _set(self, "buffers", self.buffers.copy())
        if type(self.into) is dict:
            _set(self, "into", self.into.copy())

    @classmethod
    def of(
        cls,
        model: ModelRef,
        inputs: Mapping[str, np.ndarray | BufferRef],
        into: Mapping[str, BufferRef] | None = None,
        *,
        again: bool = True,
        crashes: int = 0,
    ) -> RunModel:
        """A message with inputs of both kinds, by name."""
        return cls(
            model=model,
            arrays={name: value for name, value in inputs.items() if not isinstance(value, BufferRef)},
            buffers={name: value for name, value in inputs.items() if isinstance(value, BufferRef)},
            into=dict(into or {}),
            again=again,
            crashes=crashes,
        )


class WriteWeights(AnyMessage[Receipt], tag=True, eq=False):
    """Overwrite weights between two runs, all of them or none; answered by a receipt.

    It begins once all earlier runs that read one of these weights have been answered, and later ones begin
    after it. So each run reads either the old values of all of them or the new ones, also a run that a crash
    interrupts and that is repeated. If a crash interrupts the write itself, it is repeated as well.

    Parameters
    ----------
    model
        The model.
    buffers
        The weights: buffers that no run of the model writes.
    values
        One array for each, of its dims and dtype. They must not change until the reply.

    Raises `NotDeployed` if there is no such model, and `InvalidRequest` or `StaleBufferError` for what does
    not fit. Then nothing was written.
    """

    model: ModelRef
    buffers: tuple[BufferRef, ...]
    values: tuple[np.ndarray, ...]


class UnloadModel(AnyMessage[None], tag=True, eq=False):
    """Forget a model, or some of its graphs. Answered by None, at once. Runs that were sent before finish.

    Parameters
    ----------
    model
        What to forget. A model that is not there is no error.
    graphs
        The names of the graphs to forget; None for the whole model.
    """

    model: ModelRef
    graphs: tuple[str, ...] | None = None
