"""Operations evaluated by their definitions, part by part: those without a kernel of their own.

Each part of the results follows from parts of the operands: see `Operation.part`. The calls of the definition
are recorded once for all parts of the same dims, and made for each part in the scratch memory of its lane, on
copies of its operands. Where a definition cannot be recorded, NumPy allocates for one part at a time on each
lane. Progress is noted behind each call.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from cudnn_actor.engines.cpu.boxes import Box, boxes, count_boxes
from cudnn_actor.engines.cpu.exact.evaluation import XP, exact, round_into
from cudnn_actor.engines.cpu.fast.images import ImageArrays, Images, images_of
from cudnn_actor.engines.cpu.fast.kernels import (
    Call,
    Operands,
    Step,
    carrier_dtype,
    deal,
    lanes_worth,
)
from cudnn_actor.engines.cpu.fast.memory_orders import is_channels_last
from cudnn_actor.engines.cpu.fast.recorder import Recorder
from cudnn_actor.engines.cpu.fast.recording import NotRecordable, Recorded, Recording
from cudnn_actor.engines.cpu.fast.rounding import store
from cudnn_actor.engines.cpu.scratch import Dims, Scratch, footprint
from cudnn_actor.protocol.operations import GridSample, Node, Specs
from cudnn_actor.protocol.operations.base import Part, Region
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["ByDefinition", "by_definition", "definition_in_scratch"]

Array = npt.NDArray[Any]
_PART_ELEMENTS = 1 << 15
"""Elements of the largest operand or result of a part. Several arrays of this size fit into the cache."""
_REPEATED = 2
"""The most elements of all parts together, as a multiple of the elements of the whole. Where parts have much
in common, they are made larger: gradients of pooling would compute what large windows share again and
again."""
_MOST_SCRATCH = 16 << 20
"""The most bytes of scratch of each lane. NumPy would allocate as many for a part that cannot be cut."""
_NS = 20
"""About how many nanoseconds an element takes."""
_AS_THEY_ARE = ("float32", "float64", "int64", "uint64")
"""The dtypes that definitions compute in. Operands of other dtypes are converted to one of these first."""


def by_definition(node: Node, specs: Specs) -> ByDefinition | None:
    """The kernel for any operation that can be cut into parts; None for others."""
    dims, *others = [specs[name].dims for name, _ in node.named(node.outputs)]
    whole = ByDefinition(node, specs, dims)
    return None if any(other != dims for other in others) or whole.part(_box(dims)) is None else whole


def definition_in_scratch(node: Node, specs: Specs) -> ByDefinition | None:
    """The kernel for an operation whose definition is recorded, which allocates nothing; None for others."""
    kernel = by_definition(node, specs)
    return kernel if kernel is not None and kernel.is_recorded else None


def _box(dims: Dims) -> Box:
    """The part of these dims at the beginning of a tensor."""
    return tuple(slice(0, size) for size in dims)


def _part_of(array: Array, region: Region) -> Array:
    """The part of an array in a region, as a view: an array even if it has no dims."""
    at: Any = (*region, ...)
    found: Array = array[at]
    return found


@dataclass(frozen=True, eq=False)
class _Recorded:
    """The recorded evaluation of a part, with the recorded arrays of its operands and results."""

    recording: Recording
    inputs: Mapping[str, Recorded]
    moved: Mapping[str, Recorded]
    results: Mapping[str, Recorded]
    images: Mapping[str, Images]


@dataclass(frozen=True, eq=False)
class _Bound:
    """The calls of a recorded evaluation, with its arrays in a lane's memory."""

    calls: Sequence[Call]
    inputs: Mapping[str, Array]
    moved: Mapping[str, Array]
    results: Mapping[str, Array]
    images: Mapping[str, ImageArrays]


@dataclass(frozen=True, eq=False)
class ByDefinition:
    """Evaluates an operation whose results have these dims.

    `channels_last`: whether the results' arrays may lie channels-last, although their tensors do not.
    """

    node: Node
    specs: Specs
    dims: Dims
    channels_last: bool = False

    def with_channels_last(self) -> ByDefinition:
        """The kernel for results whose arrays may lie channels-last. What is recorded stays so."""
        kernel = dataclasses.replace(self, channels_last=True)
        kernel.recordings.update(self.recordings)
        return kernel

    def footprint(self, lanes: int) -> int:
        """Bytes of scratch that each lane needs: for what is recorded; else none, since NumPy allocates."""
        del lanes
        return self._footprint

    @functools.cached_property
    def _footprint(self) -> int:
        """The footprint of the largest part. Some parts at borders need a little more, and keep it for
        themselves."""
        part = self.part(_box(self.block_extents(range(len(self.dims)))))
        assert part is not None, "`block_extents` has asked for it"
        found = (self._recording_of(part, last) for last in self._layouts)
        return max(footprint((0 if one is None else one.recording.nbytes,), itemsize=1) for one in found)

    @property
    def is_recorded(self) -> bool:
        """Whether the definition is recorded of the first part and of one in the middle, which reads more."""
        first = _box(self.block_extents(range(len(self.dims))))
        middle = tuple(
            slice(at, min(at + of.stop, size))
            for of, size in zip(first, self.dims, strict=True)
            for at in (size // of.stop // 2 * of.stop,)
        )
        parts = [part for box in (first, middle) if (part := self.part(box)) is not None]
        return all(self._recording_of(part, last) is not None for part in parts for last in self._layouts)

    @functools.cached_property
    def _layouts(self) -> tuple[bool, ...]:
        """For each layout that the arrays of a run may have: whether channels lie side by side.

        Arrays of results have the order of their tensors, or that of the dims, unless the compiler has given
        them another one (`channels_last`). The layout of images is chosen for each program.
        """
        name, _ = self._outputs[0]
        last = (
            self.channels_last or bool(self._indexed_operands) or is_channels_last(self.specs[name].strides)
        )
        return (False, True) if last and len(self.dims) > 2 else (False,)

    def bind(self, operands: Operands, results: Operands, lanes: Sequence[Scratch]) -> list[Step]:
        """The steps of a run: see `Kernel`."""
        lanes = lanes_worth(lanes, _NS * math.prod(self.dims))
        strides = next(iter(results.values())).strides
        order = sorted(range(len(self.dims)), key=lambda axis: (self._is_shared(axis), -abs(strides[axis])))
        bound: dict[tuple[_Recorded, int], _Bound] = {}
        steps: list[Step] = []
        operands = {**operands}
        last = is_channels_last(strides)
        extents = self.block_extents(order)
        for name in self._indexed_operands:
            cut = extents[1] < self.dims[1]
            operands[name], last, copies = images_of(operands[name], lanes, cut=cut)
            steps += copies

        def call(box: Box, lane: int) -> Call | Sequence[Call]:
            part = self.part(box)
            assert part is not None, "`block_extents` has asked for the first, which is largest"
            given = {name: _part_of(operands[name], region) for name, region in part.inputs.items()}
            into = {name: _part_of(array, box) for name, array in results.items()}
            own = self._recording_of(part, last)
            if own is None:
                return partial(self._evaluate, part, given, into, box)
            if (own, lane) not in bound:
                bound[own, lane] = self._bind_recording(own, lanes[lane])
            return [*_calls(bound[own, lane], part, given, into, box)]

        return [*steps, deal(boxes(self.dims, extents), len(lanes), call)]

    def _key(self, part: Part) -> object:
        """A key that is equal for parts with the same recording."""
        cuts = ((name, self._cut(name, region)) for name, region in part.inputs.items())
        results = ((name, self._cut(name, region)) for name, region in part.results.items())
        moved = ((name, np.shape(value)) for name, value in part.moved.items())
        return part.operation, *cuts, *results, *moved

    @functools.cached_property
    def recordings(self) -> dict[tuple[object, bool], _Recorded | None]:
        """The recordings so far, by part. All programs of a plan use them."""
        return {}

    def _recording_of(self, part: Part, channels_last: bool) -> _Recorded | None:
        """The recorded evaluation of such a part; None if it cannot be recorded, or takes too much memory."""
        key = self._key(part), channels_last
        if key not in self.recordings:
            self.recordings[key] = self._record(part, channels_last)
        return self.recordings[key]

    def _record(self, part: Part, channels_last: bool) -> _Recorded | None:
        recording = Recording()
        inputs: dict[str, Recorded] = {}
        images: dict[str, Images] = {}
        values: dict[str, Any] = {}
        for name, region in part.inputs.items():
            dims, dtype = self._cut(name, region), carrier_dtype(self.specs[name].dtype)
            if name in self._indexed_operands:
                images[name] = values[name] = Images(recording, name, dims, dtype, channels_last)
                continue
            order = (0, *range(2, len(dims)), 1) if channels_last and len(dims) > 2 else None
            wide = dtype if dtype.name in _AS_THEY_ARE else np.dtype(np.int64)
            inputs[name] = values[name] = recording.new(dims, wide, order)
        moved = {name: recording.new(np.shape(value), np.int64) for name, value in part.moved.items()}
        try:
            for name, value in moved.items():
                if name in values:
                    values[name] = values[name] + value
            found = part.operation.evaluate(Recorder(recording), values, self._part_specs(part))
            results = {}
            for name, _ in self._outputs:
                result = found[name] + moved[name] if name in moved else found[name]
                results[name] = _round_result(recording, result, self.specs[name].dtype)
        except NotRecordable:
            return None
        recording.finish([*inputs.values(), *moved.values()], [*results.values()])
        if recording.nbytes > _MOST_SCRATCH:
            return None
        return _Recorded(recording, inputs, moved, results, images)

    def _bind_recording(self, own: _Recorded, lane: Scratch) -> _Bound:
        nbytes = own.recording.nbytes
        fork = lane.fork()
        memory = (
            fork.take((nbytes,), np.uint8) if nbytes <= self._footprint else lane.keep((nbytes,), np.uint8)
        )
        images = {name: ImageArrays(channels_last=one.channels_last) for name, one in own.images.items()}
        calls, array = own.recording.on(memory, images)
        inputs, moved, results = (
            {name: array(one) for name, one in of.items()} for of in (own.inputs, own.moved, own.results)
        )
        return _Bound(calls, inputs, moved, results, images)

    def _part_specs(self, part: Part) -> dict[str, TensorSpec]:
        return {
            name: TensorSpec.packed(self._cut(name, region), self.specs[name].dtype)
            for name, region in part.results.items()
        }

    def part(self, box: Box) -> Part | None:
        """How a box of the results is computed."""
        return self.node.part(self.specs, dict.fromkeys((name for name, _ in self._outputs), box))

    @functools.cached_property
    def _outputs(self) -> tuple[tuple[str, Any], ...]:
        return tuple(self.node.named(self.node.outputs))

    def block_extents(self, order: Sequence[int]) -> Dims:
        """The dims of a box. `order`: of the axes, the slowest first.

        Some operations can be cut along an axis only if they are cut into single places along others. So each
        axis has a second turn.
        """
        found = list(self.dims)
        most_of_all = _REPEATED * self._elements(found)
        for axis in (*order, *range(len(found))):
            if self._elements(found) <= _PART_ELEMENTS:
                break
            whole, least, most = found[axis], 0, found[axis]
            while most - least > 1:  # the largest that is not too much; else one place
                found[axis] = (least + most) // 2
                if self._elements(found) <= _PART_ELEMENTS:
                    least = found[axis]
                else:
                    most = found[axis]
            found[axis] = max(least, 1)
            while self._elements_of_all(found) > most_of_all and found[axis] < whole:
                found[axis] = min(2 * found[axis], whole)
            if self.part(_box(tuple(found))) is None:
                found[axis] = whole
        return tuple(found)

    def _elements_of_all(self, extents: Sequence[int]) -> float:
        return self._elements(extents) * count_boxes(self.dims, tuple(extents))

    def _elements(self, extents: Sequence[int]) -> float:
        """Elements of the largest operand or result of such a part; infinite if there is none."""
        part = self.part(_box(tuple(extents)))
        if part is None:
            return math.inf
        regions = {name: region for name, region in part.inputs.items() if name not in self._indexed_operands}
        return max(math.prod(self._cut(name, region)) for name, region in {**regions, **part.results}.items())

    def _is_shared(self, axis: int) -> bool:
        """Whether places of the results along an axis are computed from the same part of an operand."""
        one = [*self.dims]
        one[axis] = 1
        whole, part = (self.part(_box(tuple(dims))) for dims in (self.dims, one))
        if whole is None or part is None:
            return False
        return any(
            self._cut(name, part.inputs[name]) == self._cut(name, region)
            for name, region in whole.inputs.items()
            if name not in self._indexed_operands
        )

    @property
    def _indexed_operands(self) -> Sequence[str]:
        """The operands of which a part reads elements at any places. They are not copied."""
        return ("x",) if isinstance(self.node, GridSample) else ()

    def _cut(self, name: str, region: Region) -> Dims:
        """The dims of a part of an operand."""
        return tuple(len(range(size)[of]) for size, of in zip(self.specs[name].dims, region, strict=True))

    def _evaluate(self, part: Part, given: Operands, into: Operands, box: Box) -> None:
        values: dict[str, Any] = {}
        for name, array in given.items():
            values[name] = array if array.dtype.name in _AS_THEY_ARE else exact(array)
            if name in part.moved:
                values[name] = values[name] + part.moved[name]
        for name, result in part.operation.evaluate(XP, values, self._part_specs(part)).items():
            if name in into:
                found = result[_within(box, part.results[name])]
                moved = part.moved.get(name)
                store(found if moved is None else found + moved, self.specs[name].dtype, into[name])


def _within(box: Box, region: Region) -> Box:
    """A box of the results, counted from the start of the region that a part computes."""
    return tuple(
        slice(of.start - own.start, of.stop - own.start) for of, own in zip(box, region, strict=True)
    )


def _round_result(recording: Recording, result: Any, dtype: DType) -> Recorded:
    """Values rounded to a dtype, as an array of it. Values of float32 stay as they are if the dtype is
    carried in float32."""
    if not isinstance(result, Recorded):
        raise NotRecordable("a result that does not depend on operands")
    if result.dtype == np.float32 and carrier_dtype(dtype) == np.float32:
        return result
    into = recording.new(result.shape, dtype.numpy)
    round_into(result, dtype, into)
    return into


def _calls(bound: _Bound, part: Part, given: Operands, into: Operands, box: Box) -> Iterator[Call]:
    """The calls that compute a part."""
    for name, array in bound.inputs.items():
        yield partial(np.copyto, array, given[name], "unsafe")
    for name, array in bound.moved.items():
        yield partial(np.copyto, array, np.asarray(part.moved[name]))
    for name, arrays in bound.images.items():
        yield arrays.show_call(given[name])
    yield from bound.calls
    for name, array in bound.results.items():
        wanted = array[_within(box, part.results[name])] if array.ndim else array
        yield partial(np.copyto, into[name], wanted, "unsafe")
