"""Gathers of slices along an axis: copies of the runs that indices name."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from cudnn_actor.engines.cpu.fast.kernels import Call, Step, dealt
from cudnn_actor.engines.cpu.scratch import Scratch, footprint
from cudnn_actor.protocol.operations import Gather, Node, Specs

__all__ = ["Gathered", "gather"]

Array = npt.NDArray[Any]
_ELEMENTS = 16384
_FEW_ELEMENTS = 131072
"""Of a result: a second lane would take as long to begin as these to be copied."""
_MOST_SAMPLES = 4096
"""With indices of their own: there is a call for each."""


def gather(node: Node, specs: Specs) -> Gathered | None:
    """The kernel for `Gather`; None for very many samples with indices of their own."""
    assert isinstance(node, Gather)
    x, indices = specs["x"].dims, specs["indices"].dims
    axis, batch = node.axis % len(x), node.batch_dims
    samples, outer, inner = (math.prod(dims) for dims in (x[:batch], x[batch:axis], x[axis + 1 :]))
    if samples > _MOST_SAMPLES:
        return None
    return Gathered(node, samples, outer, x[axis], math.prod(indices[batch:]), inner)


@dataclass(frozen=True)
class Gathered:
    """y[sample, outer, place, inner] = x[sample, outer, indices[sample, place], inner].

    Parameters
    ----------
    node
        The operation.
    samples, outer, size, places, inner
        The dims of x, (samples, outer, size, inner), of the indices and of y.
    """

    node: Gather[Any]
    samples: int
    outer: int
    size: int
    places: int
    inner: int

    def footprint(self, lanes: int) -> int:
        """Bytes of scratch that each lane needs: for indices in range, in the first one."""
        del lanes
        return 2 * footprint((self.samples * self.places,))

    def bind(
        self, operands: Mapping[str, Array], results: Mapping[str, Array], lanes: Sequence[Scratch]
    ) -> list[Step]:
        """The steps of a run: see `Kernel`."""
        x, given, y = operands["x"], operands["indices"], results["y"]
        if not (x.flags.c_contiguous and y.flags.c_contiguous):
            return [(partial(_gathered, self.node, x, given, y),)]
        indices, below = (lanes[0].take(given.shape, np.int64) for _ in range(2))
        wrapped: list[Call] = [
            partial(np.copyto, indices, given),
            partial(np.right_shift, indices, np.array(63), below),
            partial(np.bitwise_and, below, np.array(self.size), below),
            partial(np.add, indices, below, indices),
        ]
        if y.size <= _FEW_ELEMENTS:
            lanes = lanes[:1]
        calls: list[list[Call]] = [[] for _ in lanes]
        of_x = x.reshape(self.samples, self.outer, self.size, self.inner)
        of_y = y.reshape(self.samples, self.outer, self.places, self.inner)
        blocks = self._blocks(of_x, indices.reshape(self.samples, self.places), of_y)
        for number, call in enumerate(blocks):
            calls[number % len(lanes)].append(call)
        if len(lanes) == 1:
            return [dealt([wrapped + calls[0]])]
        return [dealt([wrapped]), dealt(calls)]

    def _blocks(self, x: Array, indices: Array, y: Array) -> Iterator[Call]:
        # NumPy wants contiguous arrays: a part of the places only of one outer index at a time.
        each = self.places * self.inner
        outer = max(1, _ELEMENTS // each)
        places = self.places if outer > 1 else max(1, _ELEMENTS // self.inner)
        for sample in range(self.samples):
            for first in range(0, self.outer, outer):
                for place in range(0, self.places, places):
                    part = slice(place, place + places)
                    into = y[sample, first : first + outer, part]
                    run = x[sample, first : first + outer]
                    yield partial(run.take, indices[sample, part], 1, into, "clip")


def _gathered(node: Gather[Any], x: Array, indices: Array, y: Array) -> None:
    """Into arrays with gaps, or with another order: in memory that NumPy allocates."""
    places = node.places(x.shape, indices.shape)
    np.copyto(y, x[places.at(np, indices, x.shape)])
