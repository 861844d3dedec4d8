"""A graph, run many times within one request: values are carried from turn to turn."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import ClassVar, Final, NamedTuple

import msgspec

from cudnn_actor.protocol.errors import InvalidRequest, Words
from cudnn_actor.protocol.graphs.named_graph import Graph, Port
from cudnn_actor.protocol.messages.any_message import AnyMessage
from cudnn_actor.protocol.messages.receipts import Receipt
from cudnn_actor.protocol.messages.run_graph import bound_names, require_all_bound
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.checks import did_you_mean, require_mapping, require_type, require_whole
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.frozen_dict import FrozenDict
from cudnn_actor.protocol.types.records import Record
from cudnn_actor.protocol.types.tensor import MAX_ALIGNMENT, MAX_RANK, TensorSpec

__all__ = ["MOST_TURNS", "SCRATCH", "Loop", "Place", "RunLoop"]

MOST_TURNS: Final = 1 << 20
"""Each turn is progress, so a longer loop could keep all other requests waiting for days."""
SCRATCH: Final = "scratch"
"""The name of the buffer that a loop works in, which no port of a body may have."""


class Place(NamedTuple):
    """The place of a value in the scratch buffer: its distance from the start in bytes, and its spec
    there."""

    offset: int
    spec: TensorSpec


class Loop(Record, dict=True):
    """A graph that is to run many times, and what each turn hands to the next one.

    In the first turn, an input of `carried` has the initial value; in each later turn, what the output of the
    turn before was. Turn number t reads row t of an input of `scanned`. All other inputs are the same in all
    turns. An output that is not carried is stacked: turn t writes row t of its buffer.

    Parameters
    ----------
    body
        The graph of one turn, as `GraphBuilder.build` gives it. It may not have updates, nor a port called
        "scratch".
    carried
        Inputs of the body → the outputs that are their values in the next turn, of the same dims, strides
        and dtype.
    scanned
        Inputs of the body that get one row after the other of their buffers.
    condition
        A carried input of one bool, or None. Before each turn, also before the first, its value is read from
        the device: if it is False, the loop ends. To number the turns that ran, carry a counter.

    Raises
    ------
    InvalidRequest
        A name is not in the body, occurs twice, or does not fit; or the body changes its inputs.
    """

    example: ClassVar[str] = 'Loop(body=graph, carried={"h": "new_h"}, scanned=("x",))'
    body: Graph
    carried: Mapping[str, str] = msgspec.field(default_factory=FrozenDict)
    scanned: tuple[str, ...] = ()
    condition: str | None = None

    def __post_init__(self) -> None:
        require_type("body", self.body, Graph, "pass what GraphBuilder.build gave")
        require_mapping("carried", self.carried, "inputs to outputs", 'write carried={"h": "new_h"}')
        msgspec.structs.force_setattr(self, "carried", FrozenDict(self.carried or {}))
        if not self.body.body.pure:
            raise _unfit(
                "body", Words("a graph with updates"), "changes its own inputs", "carry them instead"
            )
        if SCRATCH in self.body.places:
            raise _unfit("body", Words(SCRATCH), "is the name of a port", "give the port another name")
        self._check_carried()
        self._check_scanned()
        self._check_condition()
        for name in (*self.scanned, *self.stacked):
            if self._port(name).spec.rank == MAX_RANK:
                fix = "leave out a dim of size 1, or merge two"
                raise _unfit(name, Words(f"{MAX_RANK} dims"), "leave no room for the dim of the turns", fix)

    def _check_carried(self) -> None:
        inputs = {port.name: port.spec for port in self.body.inputs}
        outputs = {port.name: port.spec for port in self.body.outputs}
        for name, after in self.carried.items():
            _require_known("carried", name, inputs, "an input")
            _require_known(f"carried[{name!r}]", after, outputs, "an output")
            before, spec = inputs[name], outputs[after]
            if msgspec.structs.replace(spec, alignment=before.alignment) != before:
                raise _unfit(
                    f"carried[{name!r}]",
                    Words(spec),
                    f"has other dims, strides or another dtype than {name}, {before}",
                    "have the body give what it takes",
                )
        if len(set(self.carried.values())) < len(self.carried):
            raise _unfit(
                "carried",
                Words(", ".join(self.carried.values())),
                "has an output twice",
                "give each input an output of its own",
            )

    def _check_scanned(self) -> None:
        if not isinstance(self.scanned, tuple | list):
            raise _unfit("scanned", self.scanned, "is no tuple of names", 'write scanned=("x",)')
        inputs = {port.name: port.spec for port in self.body.inputs}
        msgspec.structs.force_setattr(self, "scanned", tuple(self.scanned))
        named = set(self.carried)
        for name in self.scanned:
            _require_known("scanned", name, inputs, "an input")
            if name in named:
                raise _unfit("scanned", name, "is named twice", "name each input once")
            named.add(name)

    def _check_condition(self) -> None:
        if self.condition is None:
            return
        _require_known("condition", self.condition, self.carried, "a carried input")
        spec = self._port(self.condition).spec
        if spec.dtype is not DType.BOOL or spec.size != 1:
            raise _unfit(
                "condition", Words(spec), "is not one bool", "compare in the body, as in (x < 1).all()"
            )

    def _port(self, name: str) -> Port:
        return self.body.ports[self.body.places[name]]

    @functools.cached_property
    def stacked(self) -> tuple[str, ...]:
        """The outputs of which each turn writes a row: those that are not carried."""
        carried = set(self.carried.values())
        return tuple(port.name for port in self.body.outputs if port.name not in carried)

    def specs(self, turns: int) -> dict[str, TensorSpec]:
        """The specs of the buffers for a loop of `turns` turns, by the names of the body's ports. Buffers
        with rows may have any strides; all others have their ports' specs. Raises `InvalidRequest`.
        """
        require_whole("turns", turns, 0, MOST_TURNS)
        rows = {*self.scanned, *self.stacked}
        return {
            port.name: TensorSpec.packed((turns, *port.spec.dims), port.spec.dtype)
            if port.name in rows
            else port.spec
            for port in self.body.ports
        }

    @functools.cached_property
    def working(self) -> dict[str, Place]:
        """Places in the scratch buffer: one for each carried input beside the output's own buffer, and one
        for the row of each buffer of rows. So the body runs at two sets of addresses, however many turns."""
        offset, places = 0, {}
        for name in (*self.carried, *self.scanned, *self.stacked):
            spec = self._port(name).spec
            places[name] = Place(offset, spec)
            offset += math.ceil(spec.nbytes / MAX_ALIGNMENT) * MAX_ALIGNMENT
        return places

    @property
    def scratch(self) -> TensorSpec:
        """The least spec of `RunLoop.scratch`. It does not depend on the number of turns."""
        ends = [place.offset + place.spec.nbytes for place in self.working.values()]
        return TensorSpec.packed((max(ends, default=0),), DType.UINT8)


class RunLoop(AnyMessage[Receipt], tag=True):
    """Run a loop. Answered by a `Receipt`.

    It writes the carried outputs as they are after the last turn, and a row of each stacked output in each
    turn. Without a turn, the carried outputs are the initial values. Rows of turns that did not run, because
    the condition was False, stay as they were.

    Each turn is progress, so `hang_after_s` is about a single turn. After a crash the loop begins again with
    its first turn.

    Parameters
    ----------
    loop
        What is run.
    buffers
        One for each port of the body, inputs first: see `bind`. Those of rows have the number of turns before
        the dims of their ports, and may have any strides. No output may be an input's buffer.
    scratch
        A buffer of bytes, at least as large as `loop.scratch`, that nothing else uses meanwhile.
    turns
        How many turns, or at most how many, if the loop has a condition: 0 to 2**20.
    """

    loop: Loop
    buffers: tuple[BufferRef, ...]
    scratch: BufferRef
    turns: int

    @property
    def graph(self) -> Graph:
        """The body."""
        return self.loop.body

    @classmethod
    def bind(
        cls,
        loop: Loop,
        buffers: Mapping[str, BufferRef] | None = None,
        /,
        *,
        turns: int,
        scratch: BufferRef,
        **named: BufferRef,
    ) -> RunLoop:
        """A message that runs a loop on these buffers, by the names of the body's inputs and outputs.

        Raises `InvalidRequest` for a name that the body does not have, is given twice, or is missing.
        """
        require_type("loop", loop, Loop, f"make one: {Loop.example}")
        given = bound_names(loop.body, buffers, named)
        ordered = require_all_bound(loop.body, given)
        return cls(loop=loop, buffers=ordered, scratch=scratch, turns=turns)


def _require_known(field: str, name: object, known: Mapping[str, object], what: str) -> None:
    if not isinstance(name, str) or name not in known:
        listed = ", ".join(known)
        fix = f"{did_you_mean(name, known)}use one of {listed}" if known else "leave it out"
        raise _unfit(field, name, f"is not the name of {what} of the body", fix)


def _unfit(field: str, value: object, problem: str, fix: str) -> InvalidRequest:
    return InvalidRequest(field=field, value=value, problem=problem, fix=fix)
