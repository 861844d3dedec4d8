"""A run of a model with loops: it sends a message for each graph and loop, one after the other.

The values between steps are in buffers of this run, so any number of runs may be under way. Each message is
pure: it writes buffers that nothing else reads before it has been answered. So a crash costs only time: the
service runs the interrupted message again, and the values that earlier messages have written are still there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from cudnn_actor.actors import Deadline
from cudnn_actor.models.source import Specialised, Step
from cudnn_actor.protocol.errors import InvalidRequest, OutOfMemory, Words
from cudnn_actor.protocol.graphs.explanation import Explanation
from cudnn_actor.protocol.messages.messages import Allocate, RunGraph, RunLoop
from cudnn_actor.protocol.messages.run_loop import Loop
from cudnn_actor.protocol.types.buffers import BufferRef
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["StepsRun", "explained_steps"]

_FIRST_TURNS = 256
"""The most turns of the first part of a loop that may have more turns, and whose data decides how many rows
it has: see `StepsRun._run_in_parts`."""
_FIRST_BYTES = 64 << 20
"""The most bytes of rows in such a part, unless a single turn has more."""


class StepsRun:
    """One run of a model with loops.

    Parameters
    ----------
    gpu
        The `CudnnRef` of the service.
    discard
        Frees a buffer without waiting.
    of
        The specialised model, which has `steps`.
    weights
        Ports → the buffers of the weights.
    deadline
        When the run has to be finished.
    """

    def __init__(
        self,
        gpu: Any,
        discard: Callable[[BufferRef], None],
        of: Specialised,
        weights: Mapping[str, BufferRef],
        deadline: Deadline,
    ) -> None:
        self._gpu, self._discard, self._of = gpu, discard, of
        self._weights, self._deadline = weights, deadline
        self._cells: dict[str, BufferRef] = {}
        """The cells that have a buffer now."""
        self._made: dict[str, BufferRef] = {}
        """The buffers that this run has allocated, and frees."""
        self._rows: dict[str, np.ndarray] = {}
        """Cells → the rows of the turns that ran, of loops that ran in parts. These have no buffers."""
        outputs = {*of.outputs.values(), *of.rows.values()}
        self._last = {cell: number for number, step in enumerate(of.steps) for cell in step.reads.values()}
        """Cells → the last step that reads them. Cells that the results need are missing here."""
        self._last.update(dict.fromkeys(outputs, len(of.steps)))

    async def run(self, given: Mapping[str, np.ndarray | BufferRef], keep: Collection[str]) -> dict[str, Any]:
        """The outputs by name: arrays, and references of those in `keep`.

        Raises as the messages do, and `InvalidRequest` if a loop does not end. After an error or a
        cancellation, all buffers that the run has allocated are freed.
        """
        try:
            for name, cell in self._of.inputs.items():
                value = given[name]
                if isinstance(value, BufferRef):
                    self._cells[cell] = value
                else:
                    self._keep(cell, await self._gpu.upload(value, timeout=self._deadline.left_s))
            for number, step in enumerate(self._of.steps):
                counts = self._counts_of(step)
                if counts and isinstance(step.run, Loop) and step.turns > _first_turns(step.run):
                    await self._run_in_parts(step, step.run, counts)
                else:
                    await self._run(step)
                await self._require_end(step)
                self._free(number, step)
            return await self._results(keep)
        finally:
            for ref in self._made.values():
                self._discard(ref)

    def _keep(self, cell: str, ref: BufferRef) -> None:
        self._cells[cell] = self._made[cell] = ref

    async def _run(self, step: Step) -> None:
        for cell, spec in step.outputs.items():
            self._keep(cell, await self._allocate(spec, step, cell))
        inputs = {name: self._weights.get(name) or self._cells[step.reads[name]] for name in step.inputs}
        buffers = {**inputs, **{cell: self._cells[cell] for cell in step.outputs}}
        if not isinstance(step.run, Loop):
            await self._gpu.ask(RunGraph.bind(step.run, buffers), timeout=self._deadline.left_s)
            return
        await self._run_loop(step, step.run, buffers, step.turns)

    async def _run_loop(self, step: Step, loop: Loop, buffers: Mapping[str, BufferRef], turns: int) -> None:
        scratch = await self._allocate(loop.scratch, step, "scratch")
        try:
            message = RunLoop.bind(loop, buffers, turns=turns, scratch=scratch)
            await self._gpu.ask(message, timeout=self._deadline.left_s)
        finally:
            self._discard(scratch)

    async def _require_end(self, step: Step) -> None:
        if step.ends and bool(await self._download(step.ends)):
            raise InvalidRequest(
                field="inputs",
                value=Words(step.label),
                problem=f"has not ended after {step.turns:,} turns",
                fix="give inputs with which its condition becomes False before that",
            )

    def _counts_of(self, step: Step) -> dict[str, str]:
        """The cells of a loop's rows whose number its data decides → the cell that says how many."""
        rows, outputs = self._of.rows, self._of.outputs
        return {outputs[name]: count for name, count in rows.items() if outputs[name] in step.outputs}

    async def _run_in_parts(self, step: Step, loop: Loop, counts: Mapping[str, str]) -> None:
        """Run a loop as several messages, each with twice as many turns as the one before, and go on from
        the states of that one. So there are at most two rows for each turn that runs, and not as many as the
        loop may have turns. The rows of a part are downloaded behind it.
        """
        inputs = {name: self._weights.get(name) or self._cells[step.reads[name]] for name in step.inputs}
        rows: dict[str, list[np.ndarray]] = {cell: [] for cell in counts}
        done, turns = 0, _first_turns(loop)
        while True:
            turns = min(turns, step.turns - done)
            specs = loop.specs(turns)
            earlier = [self._made.pop(cell) for cell in loop.carried.values() if cell in self._made]
            try:
                for cell in step.outputs:
                    self._keep(cell, await self._allocate(specs[cell], step, cell))
                outputs = {cell: self._cells[cell] for cell in step.outputs}
                await self._run_loop(step, loop, {**inputs, **outputs}, turns)
            finally:
                for ref in earlier:
                    self._discard(ref)
            ran = int(await self._download(next(iter(counts.values())))) - done
            for cell, parts in rows.items():
                parts.append((await self._download(cell))[:ran])
            for cell in loop.stacked:
                self._discard(self._made.pop(cell))
            done += ran
            if ran < turns or done == step.turns:
                break
            turns *= 2
            inputs |= {name: self._cells[cell] for name, cell in loop.carried.items()}
        self._rows |= {cell: np.concatenate(parts) for cell, parts in rows.items()}

    async def _allocate(self, spec: TensorSpec, step: Step, what: str) -> BufferRef:
        try:
            ref: BufferRef = await self._gpu.ask(Allocate(spec=spec), timeout=self._deadline.left_s)
        except OutOfMemory as error:
            raise error.at(error.operations, f"{step.label or 'a graph between loops'}, {what!r}") from error
        return ref

    def _free(self, number: int, step: Step) -> None:
        """Free the cells that no later step reads."""
        for cell in [*step.outputs, *step.reads.values()]:
            if self._last.get(cell, number) <= number and cell in self._made:
                self._discard(self._made.pop(cell))

    async def _download(self, cell: str) -> np.ndarray:
        array: np.ndarray = await self._gpu.download(self._cells[cell], timeout=self._deadline.left_s)
        return array

    async def _results(self, keep: Collection[str]) -> dict[str, Any]:
        of = self._of
        results: dict[str, Any] = {}
        kept: dict[str, BufferRef] = {}
        try:
            for name, array in of.constants.items():
                results[name] = array.copy()
            for name, cell in of.outputs.items():
                if name in keep and name not in of.rows:
                    continue  # these are handed over below, where nothing can fail any more
                if (rows := self._rows.get(cell)) is not None:
                    results[name] = rows.copy() if any(rows is each for each in results.values()) else rows
                    continue
                array = await self._download(cell)
                if name in of.rows:
                    count = int(await self._download(of.rows[name]))
                    if count < len(array):
                        array = array[:count].copy()  # a view would keep the rows of all turns
                results[name] = array
            wanted = dict.fromkeys(keep)
            for name in wanted:
                if name in results:
                    kept[name] = await self._gpu.upload(results[name], timeout=self._deadline.left_s)
            kept.update({name: self._made.pop(of.outputs[name]) for name in wanted if name not in results})
            results.update(kept)
            kept = {}
            return results
        finally:
            for ref in kept.values():
                self._discard(ref)


def _first_turns(loop: Loop) -> int:
    """The turns of the first part of a loop that runs in parts."""
    specs = loop.specs(1)
    a_turn = sum(specs[cell].nbytes for cell in loop.stacked)
    return max(1, min(_FIRST_TURNS, _FIRST_BYTES // max(1, a_turn)))


def explained_steps(steps: Sequence[Step], found: Sequence[Explanation]) -> Explanation:
    """The explanations of all steps as one. It has the pieces of one turn of a loop, and the time of all
    turns."""
    pieces = []
    operations, us = 0, 0.0
    for step, each in zip(steps, found, strict=True):
        turns = f"{step.turns:,} turns: " if isinstance(step.run, Loop) else ""
        pieces += [
            msgspec.structs.replace(
                piece,
                operations=tuple(operations + number for number in piece.operations),
                labels=tuple(f"{turns}{label}" for label in piece.labels),
            )
            for piece in each.pieces
        ]
        operations += len(step.graph.body.operations)
        us += (each.run_us or 0.0) * max(step.turns, 1)
    return Explanation(
        plan=found[0].plan,
        digest=" ".join(each.digest for each in found),
        pieces=tuple(pieces),
        views=tuple(view for each in found for view in each.views),
        scratch=tuple(scratch for each in found for scratch in each.scratch),
        scratch_bytes=max(each.scratch_bytes for each in found),
        workspace=max(each.workspace for each in found),
        run_us=us if all(each.run_us is not None for each in found) else None,
        device=found[0].device,
    )
