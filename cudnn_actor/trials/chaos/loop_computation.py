"""A loop as one of the load's computations, with the methods that the load calls on an operation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from cudnn_actor.engines.cpu.exact.evaluation import exact
from cudnn_actor.protocol import BufferRef, Loop, RunLoop, TensorSpec
from cudnn_actor.protocol.messages.run_loop import SCRATCH
from cudnn_actor.trials.chaos.graph_computation import GraphComputation

__all__ = ["LoopComputation"]

Specs = Mapping[str, TensorSpec]


@dataclass(frozen=True, eq=False)
class LoopComputation:
    """A loop of `turns` turns, at least one, whose ports and scratch buffer are the tensors of a problem.

    The scratch buffer counts as an output, so that the bytes of a torn one are judged, too. Its values are
    multiples of 256 bytes, so it has no gaps.
    """

    loop: Loop
    turns: int
    kind: ClassVar[str] = "loop"
    optional: ClassVar[frozenset[str]] = frozenset()

    @functools.cached_property
    def specs(self) -> dict[str, TensorSpec]:
        """The specs of all buffers, by name."""
        return {**self.loop.specs(self.turns), SCRATCH: self.loop.scratch}

    @property
    def inputs(self) -> tuple[str, ...]:
        """The names of what the loop reads."""
        return tuple(port.name for port in self.loop.body.inputs)

    @property
    def outputs(self) -> tuple[str, ...]:
        """The names of what the loop writes."""
        return (*(port.name for port in self.loop.body.outputs), SCRATCH)

    reads, writes = inputs, outputs  # the names of its tensors are those of its operands

    def named(self, fields: tuple[str, ...] | None = None) -> Iterator[tuple[str, str]]:
        """Pairs of an operand's name and its tensor's, as for an operation; both are the buffer's name."""
        names = (*self.inputs, *self.outputs) if fields is None else fields
        yield from ((name, name) for name in names)

    def infer(self, specs: Specs) -> dict[str, TensorSpec]:
        """The specs of the outputs, by name."""
        del specs
        return {name: self.specs[name] for name in self.outputs}

    def samples(self, xp: Any, specs: Specs, draw: Callable[[TensorSpec], Any]) -> dict[str, Any]:
        """An empty dict, because the inputs may have any values."""
        del xp, specs, draw
        return {}

    def evaluate(self, xp: Any, values: Mapping[str, np.ndarray], specs: Specs) -> dict[str, np.ndarray]:
        """The values of what the loop writes, by the definition of its body."""
        del specs
        loop, body = self.loop, GraphComputation(self.loop.body)
        before = after = {name: values[name] for name in loop.carried}
        rows: dict[str, list[np.ndarray]] = {name: [] for name in loop.stacked}
        for turn in range(self.turns):
            before = after
            scanned = {name: values[name][turn] for name in loop.scanned}
            results = body.evaluate(xp, {**values, **before, **scanned}, {})
            after = {name: exact(results[output]) for name, output in loop.carried.items()}
            for name, stacked in rows.items():
                stacked.append(results[name])
        last = {name: values[name][-1] for name in loop.scanned}
        last |= {name: stacked[-1] for name, stacked in rows.items()}
        return {
            **{output: after[name] for name, output in loop.carried.items()},
            **{name: np.array(stacked) for name, stacked in rows.items()},
            SCRATCH: self._scratch({**before, **last}),
        }

    def _scratch(self, values: Mapping[str, np.ndarray]) -> np.ndarray:
        """The bytes of the scratch buffer: what was carried before the last turn, and the last rows."""
        parts = [
            values[name].astype(place.spec.dtype.numpy).reshape(-1).view(np.uint8)
            for name, place in self.loop.working.items()
        ]
        return np.concatenate(parts)

    def with_operands(self, of: Callable[[str], BufferRef]) -> RunLoop:
        """The message for buffers, by name."""
        buffers = {name: of(name) for name in self.loop.body.places}
        return RunLoop.bind(self.loop, buffers, turns=self.turns, scratch=of(SCRATCH))
