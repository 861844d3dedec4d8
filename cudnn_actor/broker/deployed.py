"""What is known of a model's graph, and of a run of it."""

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
        Its number, which no other graph of the service gets.
    of
        The graph as it was given.
    cached
        The `RunGraph` that each run amounts to.
    hold
        The hold on all its buffers.
    inputs, outputs
        Names of inputs and outputs → where their buffers stand among those of the plan.
    state
        Where the buffer of the random numbers' state stands; None if the graph draws none.
    writes
        The slot numbers of the buffers that each run writes.
    ended
        Whether it was unloaded.
    has_lost_places
        Whether an ended worker may still write its places for inputs and outputs, so that no run may use
        them.
    checked_losses
        `MemoryTable.losses` when its weights were last found whole.
    finished
        Whether a run of it has finished.
    crashes
        At how many crashes runs of it were running since one has finished.
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
    """Name, dims and dtype of each input: what `of.specs` says, in the form in which runs are compared with
    it."""
    uses: frozenset[int] = frozenset()
    """The slot numbers of all its buffers."""
    results: tuple[tuple[int, None], ...] = ()
    """Where the buffer of each output stands, with None: a new array for each is what most runs answer."""
    copies: tuple[tuple[str, int, tuple[int, ...], np.dtype[Any]], ...] = ()
    """For each input that a run copies: its name, where its buffer stands, and its dims and dtype."""

    def __post_init__(self) -> None:
        """Note what inputs it is for, and what it uses."""
        self.uses = frozenset([ref.slot for ref in self.of.buffers])
        self.kinds = tuple(
            (name, spec.dims, spec.dtype.numpy, spec.dtype) for name, spec in self.of.specs.items()
        )
        self.results = tuple((place, None) for place in self.outputs.values())
        specs = [(name, place, self.of.specs[name]) for name, place in self.inputs.items()]
        self.copies = tuple((name, place, spec.dims, spec.dtype.numpy) for name, place, spec in specs)

    @property
    def copied(self) -> frozenset[int]:
        """Where the buffers stand among those of the plan to which runs copy what they are given."""
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
        """Whether it is the graph for these values. Other graphs may be for inputs of the same specs.

        They are compared by their bits: a NaN is equal to itself.
        """
        return all(
            name in arrays and arrays[name].tobytes() == value.tobytes()
            for name, value in self.of.values.items()
        )

    def spec_at(self, place: int) -> TensorSpec:
        """The spec of the buffer that stands at a place among those of the plan."""
        graph = self.of.graph
        return graph.ports[graph.places[self.cached.lowered.buffers[place]]].spec

    def bind(self, memory: MemoryTable) -> None:
        """Set what its graph runs on: the slots that it holds. They stay, whatever becomes of their
        references."""
        if self.cached.bound is None or self.cached.bound.epoch != memory.epoch:
            by_port = dict(zip(self.of.graph.places, self.hold.slots, strict=True))
            slots = [by_port[port] for port in self.cached.lowered.buffers]
            self.cached.bound = Bound(memory.epoch, slots, [])

    def arrays_of(self, message: RunModel, drawn: int | None) -> list[tuple[int, np.ndarray]]:
        """What a run copies from the host: where each buffer stands among the plan's, and its values.

        Raises `InvalidRequest` for an array that does not fit any more: it, or the message, was changed after
        it was sent.
        """
        arrays: list[tuple[int, np.ndarray]] = []
        given, buffers = message.arrays, message.buffers
        for name, place, dims, dtype in self.copies:
            if name not in buffers:
                array = given.get(name)
                if not isinstance(array, np.ndarray) or array.shape != dims or array.dtype != dtype:
                    raise _changed(name, array, self.of.specs[name])
                arrays.append((place, array))
        if self.state is not None:
            assert self.of.draws is not None
            arrays.append((self.state, np.array([self.of.draws.seed, drawn])))
        return arrays

    def finish(self, computed: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Note that a run has finished. Returns its answer: what was computed, and copies of constants."""
        self.finished, self.crashes = True, 0
        for name, array in self.of.constants.items():
            computed[name] = array.copy()
        return computed


class ModelRun(msgspec.Struct, eq=False):
    """What is known of a `RunModel` before it runs: kept in `Envelope.found`, so also when it runs again.

    Parameters
    ----------
    cached
        The `RunGraph` that it amounts to.
    reads, writes
        Slot numbers of the buffers that it names itself: inputs, and outputs with buffers of the caller's.
    deployed
        The graph; None in a worker, which knows it by its number.
    buffers, into
        The inputs that lie in buffers, and the outputs that go to some, by name.
    drawn
        How many random numbers the model's earlier runs have drawn; None until it first begins.
    found
        The epoch of the memory, and what `Deployments.slots` has found in it. Any thread replaces it.
    """

    cached: CachedMessage
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    deployed: Deployed | None = None
    buffers: tuple[tuple[str, BufferRef], ...] = ()
    into: tuple[tuple[str, BufferRef], ...] = ()
    drawn: int | None = None
    found: tuple[int, tuple[Slot, ...]] = (-1, ())

    @property
    def copy_in(self) -> tuple[tuple[int, BufferRef], ...]:
        """What it copies from buffers: where each goes among the plan's."""
        assert self.deployed is not None
        places = self.deployed.inputs
        return tuple([(places[name], ref) for name, ref in self.buffers if name in places])

    @property
    def copy_out(self) -> tuple[tuple[int, BufferRef], ...]:
        """What it copies to buffers, likewise."""
        assert self.deployed is not None
        places = self.deployed.outputs
        return tuple([(places[name], ref) for name, ref in self.into])

    @property
    def returned(self) -> dict[str, int]:
        """The outputs that its caller gets as arrays: where the buffer of each stands."""
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
        """What it reads and writes, its graph's own places for inputs and outputs included."""
        reads, writes = compute_footprint(self.cached.message, self.cached.lowered)
        return Footprint({*reads, *self.reads}, {*writes, *self.writes})

    @property
    def footprint(self) -> Footprint:
        """What it reads and writes of buffers with lasting contents: a second run depends on these alone."""
        assert self.deployed is not None
        return Footprint(self.deployed.weights.union(self.reads), self.writes)


def _changed(name: str, array: object, spec: TensorSpec) -> InvalidRequest:
    return InvalidRequest(
        field=name,
        value=array,
        problem=f"was changed after it was sent: it had {spec.dtype} {spec.dims}",
        fix="change it after the reply, or give a copy",
    )
