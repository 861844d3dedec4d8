"""Attention: a few rows of scores at a time, for as many keys as fit into the cache."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from cudnn_actor.engines.cpu.fast.attention_heads import Heads
from cudnn_actor.engines.cpu.fast.attention_rows import Rows
from cudnn_actor.engines.cpu.fast.attention_scores import Scores
from cudnn_actor.engines.cpu.fast.kernels import Call, Kernel, Operands, Step, deal
from cudnn_actor.engines.cpu.fast.lines import Box, boxes_of_elements
from cudnn_actor.engines.cpu.fast.matrices import blas_operand, of_samples
from cudnn_actor.engines.cpu.scratch import Scratch
from cudnn_actor.protocol.operations import Attention, Node
from cudnn_actor.protocol.operations.base import Specs

__all__ = ["attention"]


def attention(node: Node, specs: Specs) -> Kernel | None:
    """A kernel of `Attention`; None without elements."""
    assert isinstance(node, Attention)
    heads = Heads.of(node, specs)
    return None if heads is None else _Attention(heads)


@dataclass(frozen=True)
class _Attention:
    heads: Heads

    def footprint(self, lanes: int) -> int:
        """Bytes of scratch that each lane needs."""
        del lanes
        heads = self.heads
        of_rows = Rows.footprint(heads.extents, (heads.q[3], heads.v[3]), heads.dtype.itemsize)
        return heads.drawing_bytes() + of_rows

    def bind(self, operands: Operands, results: Operands, lanes: Sequence[Scratch]) -> list[Step]:
        heads, steps = self.heads, list[Step]()
        k, v = (blas_operand(operands[name], steps, lanes)[:, :, None] for name in ("k", "v"))
        own = {name: heads.by_group(array) for name, array in {"q": operands["q"], **results}.items()}
        own |= heads.operands_by_row(operands, lanes[0])
        memories = [lane.fork() for lane in lanes]
        drawings = [heads.drawing(operands, memory) for memory in memories]
        visibility = heads.visibility(operands, lanes[0])
        together, rows, _ = heads.extents
        dims = own["q"].shape
        tasks = [
            *itertools.product(boxes_of_elements(dims[:3], together), boxes_of_elements(dims[3:4], rows))
        ]

        def call(task: tuple[Box, Box], lane: int) -> Call:
            box, (part,) = task
            given = {name: of_samples(array, box)[..., part, :] for name, array in own.items()}
            shared = (of_samples(k, box), of_samples(v, box))
            memory = memories[lane].fork()
            scores = Scores(
                given, shared, visibility(box[0], part), heads.scale, memory, drawing=drawings[lane]
            )
            return Rows(given, shared[1], scores, memory)

        return [*steps, deal(tasks, len(lanes), call)]
