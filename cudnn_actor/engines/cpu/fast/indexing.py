"""Gathers: copies of the runs, or of the elements, that indices name."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from cudnn_actor.engines.cpu.fast.blocks import BLOCK_ELEMENTS
from cudnn_actor.engines.cpu.fast.kernels import (
    COPY_NS,
    MOST_SCRATCH,
    Call,
    Step,
    carrier_dtype,
    deal,
    in_turn,
    lanes_worth,
    step_by_lane,
)
from cudnn_actor.engines.cpu.fast.places import GatheredByPlaces
from cudnn_actor.engines.cpu.scratch import Scratch, footprint
from cudnn_actor.protocol.operations import Gather, GatherElements, GatherND, Node, Specs
from cudnn_actor.protocol.operations.indexing import Gathering

__all__ = ["Gathered", "GatheredElements", "GatheredLists", "gather", "gather_elements", "gather_nd"]

Array = npt.NDArray[Any]
_MOST_SAMPLES = 4096
"""The most samples with indices of their own, each of which takes a call. More samples are gathered element
by element."""


def gather(node: Node, specs: Specs) -> Gathered:
    """The kernel for `Gather`."""
    assert isinstance(node, Gather)
    x, indices = specs["x"].dims, specs["indices"].dims
    axis, batch = node.axis % len(x), node.batch_dims
    samples, outer, inner = (math.prod(dims) for dims in (x[:batch], x[batch:axis], x[axis + 1 :]))
    return Gathered(_by_places(node, specs), samples, outer, x[axis], math.prod(indices[batch:]), inner)


@dataclass(frozen=True)
class Gathered:
    """y[sample, outer, place, inner] = x[sample, outer, indices[sample, place], inner].

    Parameters
    ----------
    by_places
        The kernel that gathers if the arrays do not lie as this one needs them.
    samples, outer, size, places, inner
        The dims of x, (samples, outer, size, inner), of the indices and of y.
    """

    by_places: GatheredByPlaces
    samples: int
    outer: int
    size: int
    places: int
    inner: int

    def footprint(self, lanes: int) -> int:
        """Bytes of scratch that each lane needs: for indices in range, in the first one."""
        return max(self._own, self.by_places.footprint(lanes))

    @property
    def _own(self) -> int:
        """0 for very many indices."""
        return _scratch_bytes(2 * footprint((self.samples * self.places,)))

    def bind(
        self, operands: Mapping[str, Array], results: Mapping[str, Array], lanes: Sequence[Scratch]
    ) -> list[Step]:
        """The steps of a run: see `Kernel`."""
        x, given, y = operands["x"], operands["indices"], results["y"]
        turned = self.in_c_order(x, y)
        if turned is not None:
            kernel, x, y = turned
            return kernel.bind({**operands, "x": x}, {"y": y}, lanes)
        packed = x.flags.c_contiguous and y.flags.c_contiguous
        if not packed or self.samples > _MOST_SAMPLES or not self._own:
            return self.by_places.bind(operands, results, lanes)
        indices, below = (lanes[0].take(given.shape, np.int64) for _ in range(2))
        wrapped = _wrap_indices(given, self.size, indices, below)
        lanes = lanes_worth(lanes, COPY_NS * y.size)
        of_x = x.reshape(self.samples, self.outer, self.size, self.inner)
        of_y = y.reshape(self.samples, self.outer, self.places, self.inner)
        blocks = self._blocks(of_x, indices.reshape(self.samples, self.places), of_y)
        if len(lanes) == 1:
            return [step_by_lane([[*wrapped, *blocks]])]
        return [step_by_lane([wrapped]), deal(blocks, len(lanes), lambda call, _: call)]

    def in_c_order(self, x: Array, y: Array) -> tuple[Gathered, Array, Array] | None:
        """The gather of x and y in C order, if both are in another order, such as channels last. None
        otherwise."""
        if x.flags.c_contiguous or x.ndim != y.ndim or self.samples != 1:
            return None
        order = sorted(range(x.ndim), key=lambda axis: -abs(x.strides[axis]))
        of_x, of_y = x.transpose(order), y.transpose(order)
        if not (of_x.flags.c_contiguous and of_y.flags.c_contiguous):
            return None
        assert isinstance(self.by_places.node, Gather)
        axis = order.index(self.by_places.node.axis % x.ndim)
        outer, inner = math.prod(of_x.shape[:axis]), math.prod(of_x.shape[axis + 1 :])
        return dataclasses.replace(self, outer=outer, inner=inner), of_x, of_y

    def _blocks(self, x: Array, indices: Array, y: Array) -> Iterator[Call]:
        # NumPy wants contiguous arrays: a part of the places only of one outer index at a time.
        each = self.places * self.inner
        outer = max(1, BLOCK_ELEMENTS // each)
        places = self.places if outer > 1 else max(1, BLOCK_ELEMENTS // self.inner)
        for sample in range(self.samples):
            for first in range(0, self.outer, outer):
                for place in range(0, self.places, places):
                    part = slice(place, place + places)
                    into = y[sample, first : first + outer, part]
                    run = x[sample, first : first + outer]
                    yield partial(run.take, indices[sample, part], 1, into, "clip")


def _by_places(node: Gathering[Any], specs: Specs) -> GatheredByPlaces:
    x = specs["x"]
    return GatheredByPlaces(node, x.dims, specs["indices"].dims, carrier_dtype(x.dtype).itemsize)


def _scratch_bytes(nbytes: int) -> int:
    """Bytes of scratch; 0 for more than a lane has."""
    return nbytes if nbytes <= MOST_SCRATCH else 0


def _wrap_indices(given: Array, size: int, indices: Array, spare: Array) -> list[Call]:
    """Calls that copy indices to int64. To an index below 0 they add `size`: it counts from the end."""
    return [
        partial(np.copyto, indices, given),
        partial(np.right_shift, indices, np.array(63), spare),
        partial(np.bitwise_and, spare, np.array(size), spare),
        partial(np.add, indices, spare, indices),
    ]


def _offsets(given: Array, size: int, stride: int, steps: Array, spare: Array) -> list[Call]:
    """Calls that turn indices into distances in memory; those out of range are the nearest in range."""
    return [
        *_wrap_indices(given, size, steps, spare),
        partial(np.ndarray.clip, steps, 0, size - 1, out=steps),
        partial(np.multiply, steps, np.array(stride), steps),
    ]


def gather_elements(node: Node, specs: Specs) -> GatheredElements:
    """The kernel for `GatherElements`."""
    assert isinstance(node, GatherElements)
    x, indices = specs["x"].dims, specs["indices"].dims
    return GatheredElements(_by_places(node, specs), node.axis % len(x), x, indices)


@dataclass(frozen=True)
class GatheredElements:
    """Elements of x, of dims `x`, in the places of indices of dims `indices`, but for those along `axis`."""

    by_places: GatheredByPlaces
    axis: int
    x: tuple[int, ...]
    indices: tuple[int, ...]

    @property
    def _rows(self) -> int:
        return min(self.indices[0], max(1, BLOCK_ELEMENTS // math.prod(self.indices[1:])))

    def footprint(self, lanes: int) -> int:
        """Bytes of scratch that each lane needs: for places."""
        return max(self._own, self.by_places.footprint(lanes))

    @property
    def _own(self) -> int:
        """0 for very many indices."""
        return _scratch_bytes(2 * footprint((self._rows, *self.indices[1:])))

    def bind(
        self, operands: Mapping[str, Array], results: Mapping[str, Array], lanes: Sequence[Scratch]
    ) -> list[Step]:
        """The steps of a run: see `Kernel`."""
        x, given, y = operands["x"], operands["indices"], results["y"]
        if not (x.flags.c_contiguous and y.flags.c_contiguous and self._own):
            return self.by_places.bind(operands, results, lanes)
        lanes = lanes_worth(lanes, COPY_NS * y.size)
        strides = [math.prod(self.x[axis + 1 :]) for axis in range(len(self.x))]
        distances = self._distances(strides, lanes[0])

        def call(first: int, lane: int) -> Call:
            block = given[first : first + self._rows]
            memory = lanes[lane].fork()
            places, spare = (memory.take(block.shape, np.int64) for _ in range(2))
            calls = _offsets(block, self.x[self.axis], strides[self.axis], places, spare)
            for axis, whole in distances.items():
                own = whole if axis else whole[first : first + self._rows]
                calls.append(partial(np.add, places, own, places))
            taking = partial(x.reshape(-1).take, places, None, y[first : first + self._rows], "clip")
            return in_turn([*calls, taking])

        return [deal(range(0, self.indices[0], self._rows), len(lanes), call)]

    def _distances(self, strides: Sequence[int], scratch: Scratch) -> dict[int, Array]:
        """Along each axis but that of the indices: how far its elements are from the first one."""
        found = {}
        for axis, size in enumerate(self.indices):
            if axis != self.axis:
                own = scratch.keep((size,), np.int64)
                np.multiply(np.arange(size), strides[axis], own)
                found[axis] = own.reshape([-1 if other == axis else 1 for other in range(len(self.x))])
        return found


def gather_nd(node: Node, specs: Specs) -> GatheredLists:
    """The kernel for `GatherND`."""
    assert isinstance(node, GatherND)
    x, indices = specs["x"].dims, specs["indices"].dims
    return GatheredLists(_by_places(node, specs), node.batch_dims, x, indices)


@dataclass(frozen=True)
class GatheredLists:
    """Runs of x, each named by a list of indices. `x`, `indices`: their dims, the first `batch` in common."""

    by_places: GatheredByPlaces
    batch: int
    x: tuple[int, ...]
    indices: tuple[int, ...]

    @property
    def _inner(self) -> int:
        return math.prod(self.x[self.batch + self.indices[-1] :])

    @property
    def _rows(self) -> int:
        """How many lists a block has."""
        return min(math.prod(self.indices[self.batch : -1]), max(1, BLOCK_ELEMENTS // self._inner))

    def footprint(self, lanes: int) -> int:
        """Bytes of scratch that each lane needs: for places."""
        return max(3 * footprint((self._rows,)), self.by_places.footprint(lanes))

    def bind(
        self, operands: Mapping[str, Array], results: Mapping[str, Array], lanes: Sequence[Scratch]
    ) -> list[Step]:
        """The steps of a run: see `Kernel`."""
        x, given, y = operands["x"], operands["indices"], results["y"]
        packed = all(array.flags.c_contiguous for array in (x, given, y))
        if not packed or math.prod(self.x[: self.batch]) > _MOST_SAMPLES:
            return self.by_places.bind(operands, results, lanes)
        lanes = lanes_worth(lanes, COPY_NS * y.size)
        samples, count = math.prod(self.x[: self.batch]), self.indices[-1]
        sizes = self.x[self.batch : self.batch + count]
        lists = given.reshape(samples, -1, count)
        runs, into = x.reshape(samples, -1, self._inner), y.reshape(samples, -1, self._inner)
        blocks = [(s, first) for s in range(samples) for first in range(0, lists.shape[1], self._rows)]

        def call(place: tuple[int, int], lane: int) -> Call:
            sample, first = place
            block = lists[sample, first : first + self._rows]
            memory = lanes[lane].fork()
            places, one, spare = (memory.take(block.shape[:1], np.int64) for _ in range(3))
            calls: list[Call] = []
            for index, size in enumerate(sizes):
                stride = math.prod(sizes[index + 1 :])
                calls += _offsets(block[:, index], size, stride, one if index else places, spare)
                if index:
                    calls.append(partial(np.add, places, one, places))
            part = into[sample, first : first + self._rows]
            return in_turn([*calls, partial(runs[sample].take, places, 0, part, "clip")])

        return [deal(blocks, len(lanes), call)]
