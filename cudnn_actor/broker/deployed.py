"""Records of a model's deployed graph, and of a run of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from cudnn_actor.broker.footprints import Footprint, compute_footprint
from cudnn_actor.broker.message_cache import Bound, CachedMessage
from cudnn_actor.memory import MemoryTable, SharedHold, Slot
from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.messages.messages import RunModel
from cudnn_actor.protocol.messages.model_messages import ModelGraph
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["Deployed", "ModelRun"]


class Deployed(msgspec.Struct, eq=False):
    """A graph of a model, with its buffers.

    Parameters
    ----------
    number
        The graph's number, which no other graph of the service gets.
    of
        The graph as the model has sent it.
    cached
        The `RunGraph` to which each run is equivalent.
    hold
        The hold on all buffers of the graph.
    inputs, outputs
        Names of inputs and outputs → the indices of their buffers among the plan's.
    state
        The index of the buffer with the state of the random numbers; None if the graph draws none.
    writes
        The slot numbers of the buffers that each run writes.
    ended
        Whether the graph was unloaded.
    has_lost_places
        Whether a worker that could not be ended may still write the graph's places, so that no run may use
        them.
    checked_losses
        `MemoryTable.losses` at the last time that the weights were found whole.
    finished
        Whether a run of the graph has finished.
    crashes
        At how many crashes runs of the graph were running since the last run that has finished.
    """

    number: int
    of: ModelGraph
    cached: CachedMessage
    hold: SharedHold
    inputs: dict[str, int]
    outputs: dict[str, int]
    state: int | None
    writes: frozenset[int]
    ended: bool = False
    has_lost_places: bool = False
    checked_losses: int = -1
    finished: bool = False
    crashes: int = 0
    kinds: tuple[tuple[str, tuple[int, ...], np.dtype[Any], DType], ...] = ()
    """The name, dims and dtype of each input, from `of.specs`, in the form that is compared with those of
    runs."""
    uses: frozenset[int] = frozenset()
    """The slot numbers of all buffers of the graph."""
    results: tuple[tuple[int, None], ...] = ()
    """The index of each output's buffer, with None: most runs answer with a new array for each output."""
    copies: tuple[tuple[str, int, tuple[int, ...], np.dtype[Any]], ...] = ()
    """For each input that a run copies: its name, the index of its buffer, and its dims and dtype."""

    def __post_init__(self) -> None:
        """Derive the other fields: the graph's inputs, and the buffers that it uses."""
        self.uses = frozenset([ref.slot for ref in self.of.buffers])
        self.kinds = tuple(
            (name, spec.dims, spec.dtype.numpy, spec.dtype) for name, spec in self.of.specs.items()
        )
        self.results = tuple((place, None) for place in self.outputs.values())
        specs = [(name, place, self.of.specs[name]) for name, place in self.inputs.items()]
        self.copies = tuple((name, place, spec.dims, spec.dtype.numpy) for name, place, spec in specs)

    @property
    def copied_places(self) -> frozenset[int]:
        """The indices, among the plan's, of the buffers to which runs copy their inputs."""
        return frozenset(self.inputs.values()) | (frozenset() if self.state is None else {self.state})

    @property
    def weights(self) -> frozenset[int]:
        """The slot numbers of the buffers that runs only read."""
        return frozenset(slot.index for slot in self.hold.slots) - self.writes

    def is_for(self, message: RunModel) -> bool:
        """Whether a run with these inputs runs this graph, unless another one is for the same inputs."""
        arrays, buffers = message.arrays, message.buffers
        if len(arrays) + len(buffers) != len(self.kinds):
            return False
        for name, dims, dtype, member in self.kinds:
            if (array := arrays.get(name)) is not None:
                if array.shape != dims or array.dtype != dtype:
                    return False
            elif (ref := buffers.get(name)) is None or ref.spec.dims != dims or ref.spec.dtype is not member:
                return False
        return not self.of.values or self.accepts(arrays)

    def is_for_arrays(self, message: RunModel) -> bool:
        """Whether an unchecked message is well-formed, has arrays alone, and is for this graph.

        False may also mean that it takes longer to find out.
        """
        arrays: Any = message.arrays
        buffers: Any = message.buffers
        into: Any = message.into
        again: Any = message.again
        crashes: Any = message.crashes
        if (
            not (type(arrays) is type(buffers) is type(into) is dict)
            or buffers
            or into
            or type(again) is not bool
            or type(crashes) is not int
            or crashes < 0
        ):
            return False
        if len(arrays) != len(self.kinds):
            return False
        for name, dims, dtype, _ in self.kinds:
            array = arrays.get(name)
            if type(array) is not np.ndarray or array.shape != dims or array.dtype != dtype:
                return False
        return not self.of.values or self.accepts(arrays)

    def accepts(self, arrays: Mapping[str, np.ndarray]) -> bool:
        """Whether the graph is for these values of inputs that decide over shapes. Other graphs may have
        inputs of the same specs.

        Values are compared by their bits: a NaN is equal to itself.
        """
        return all(
            name in arrays and arrays[name].tobytes() == value.tobytes()
            for name, value in self.of.values.items()
        )

    def spec_at(self, place: int) -> TensorSpec:
        """The spec of the buffer with this index among the plan's."""
        graph = self.of.graph
        return graph.ports[graph.places[self.cached.lowered.buffers[place]]].spec

    def bind(self, memory: MemoryTable) -> None:
        """Bind the graph to the slots that it holds. They stay, even if their references end."""
        if self.cached.bound is None or self.cached.bound.epoch != memory.epoch:
            by_port = dict(zip(self.of.graph.places, self.hold.slots, strict=True))
            slots = [by_port[port] for port in self.cached.lowered.buffers]
            self.cached.bound = Bound(memory.epoch, slots, [])

    def arrays_of(self, message: RunModel, drawn: int | None) -> list[tuple[int, np.ndarray]]:
        """The arrays that a run copies from the host: for each, the index of its buffer among the plan's, and
        the values.

        Raises `InvalidRequest` for an array that does not fit any more, because it or the message was changed
        after the message was sent.
        """
        arrays: list[tuple[int, np.ndarray]] = []
        given, buffers = message.arrays, message.buffers
        for name, place, dims, dtype in self.copies:
            if name not in buffers:
                array = given.get(name)
                if not isinstance(array, np.ndarray) or array.shape != dims or array.dtype != dtype:
                    raise _change_error(name, array, self.of.specs[name])
                arrays.append((place, array))
        if self.state is not None:
            assert self.of.draws is not None
            arrays.append((self.state, np.array([self.of.draws.seed, drawn])))
        return arrays

    def finish(self, computed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Note that a run has finished. Returns its answer: the computed outputs, and copies of constants."""
        self.finished, self.crashes = True, 0
        for name, array in self.of.constants.items():
            computed[name] = array.copy()
        return computed


class ModelRun(msgspec.Struct, eq=False):
    """The facts about a `RunModel` before it runs. They are kept in `Envelope.found`, also for a second run.

    Parameters
    ----------
    cached
        The `RunGraph` to which the run is equivalent.
    reads, writes
        The slot numbers of the buffers that the message names: inputs, and outputs with buffers of the
        caller's.
    deployed
        The graph that it runs; None in a worker, which knows the graph by its number.
    buffers, into
        The inputs that are in buffers of the caller's, and the outputs that are copied to such buffers, by
        name.
    drawn
        How many random numbers the model's earlier runs have drawn; None until it first begins.
    found
        The epoch of the memory, and the result of `Deployments.slots` in it. Any thread may replace it.
    body
        How a run is encoded for a worker that has all its values in buffers; empty if it has not run so yet.
    """

    cached: CachedMessage
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    deployed: Deployed | None = None
    buffers: tuple[tuple[str, BufferRef], ...] = ()
    into: tuple[tuple[str, BufferRef], ...] = ()
    drawn: int | None = None
    found: tuple[int, tuple[Slot, ...]] = (-1, ())
    body: bytes = b""

    @property
    def copy_in(self) -> tuple[tuple[int, BufferRef], ...]:
        """The copies from the caller's buffers: the index among the plan's, and the reference."""
        assert self.deployed is not None
        places = self.deployed.inputs
        return tuple([(places[name], ref) for name, ref in self.buffers if name in places])

    @property
    def copy_out(self) -> tuple[tuple[int, BufferRef], ...]:
        """The copies to the caller's buffers: the index among the plan's, and the reference."""
        assert self.deployed is not None
        places = self.deployed.outputs
        return tuple([(places[name], ref) for name, ref in self.into])

    @property
    def returned_outputs(self) -> dict[str, int]:
        """The outputs that the caller gets as arrays, and the indices of their buffers."""
        assert self.deployed is not None
        outputs = self.deployed.outputs
        if not self.into:
            return outputs
        kept = {name for name, _ in self.into}
        return {name: place for name, place in outputs.items() if name not in kept}

    @property
    def has_lost_places(self) -> bool:
        """Whether its graph's places may not be used any more."""
        return self.deployed is not None and self.deployed.has_lost_places

    @property
    def hazards(self) -> Footprint:
        """The footprint of the run, including the graph's places for inputs and outputs."""
        reads, writes = compute_footprint(self.cached.message, self.cached.lowered)
        return Footprint({*reads, *self.reads}, {*writes, *self.writes})

    @property
    def footprint(self) -> Footprint:
        """The footprint of the run on buffers with lasting contents. Whether it can run again depends only on
        these."""
        assert self.deployed is not None
        return Footprint(self.deployed.weights.union(self.reads), self.writes)


def _change_error(name: str, array: object, spec: TensorSpec) -> InvalidRequest:
    return InvalidRequest(
        field=name,
        value=array,
        problem=f"was changed after it was sent: it had {spec.dtype} {spec.dims}",
        fix="change it after the reply, or give a copy",
    )
