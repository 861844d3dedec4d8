"""Operations evaluated by their definitions, part by part: those without a kernel of their own.

Each part of the results follows from parts of the operands: see `Operation.part`. So NumPy allocates for one
part at a time on each lane, and progress is noted behind each.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy.typing as npt

from cudnn_actor.engines.cpu.boxes import Box, boxes, count_boxes
from cudnn_actor.engines.cpu.exact.evaluation import XP, exact
from cudnn_actor.engines.cpu.fast.kernels import Call, Operands, Step, deal, lanes_worth
from cudnn_actor.engines.cpu.fast.rounding import store
from cudnn_actor.engines.cpu.scratch import Dims, Scratch
from cudnn_actor.protocol.operations import GridSample, Node, Specs
from cudnn_actor.protocol.operations.base import Part, Region
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["ByDefinition", "by_definition"]

Array = npt.NDArray[Any]
_PART_ELEMENTS = 1 << 15
"""Elements of the largest operand or result of a part: some arrays of so many stay in the cache."""
_REPEATED = 2
"""How many times as many elements all parts may have together as the whole. Parts with much in common are
larger: gradients of pooling would compute what large windows share again and again."""
_NS = 20
"""Nanoseconds of an element, about."""
_AS_THEY_ARE = ("float32", "float64", "int64", "uint64")
"""Dtypes of which definitions take values. Those of others are copied."""


def by_definition(node: Node, specs: Specs) -> ByDefinition | None:
    """The kernel for any operation that can be cut into parts; None for others."""
    dims, *others = [specs[name].dims for name, _ in node.named(node.outputs)]
    whole = ByDefinition(node, specs, dims)
    return None if any(other != dims for other in others) or whole.part(_box(dims)) is None else whole


def _box(dims: Dims) -> Box:
    """The part of these dims at the beginning of a tensor."""
    return tuple(slice(0, size) for size in dims)


def _part_of(array: Array, region: Region) -> Array:
    """A view: also one without dims is an array."""
    at: Any = (*region, ...)
    found: Array = array[at]
    return found


@dataclass(frozen=True, eq=False)
class ByDefinition:
    """Evaluates an operation whose results have these dims."""

    node: Node
    specs: Specs
    dims: Dims

    def footprint(self, lanes: int) -> int:
        """Bytes of scratch that each lane needs: none, since NumPy allocates what it computes in."""
        del lanes
        return 0

    def bind(self, operands: Operands, results: Operands, lanes: Sequence[Scratch]) -> list[Step]:
        """The steps of a run: see `Kernel`."""
        lanes = lanes_worth(lanes, _NS * math.prod(self.dims))
        strides = next(iter(results.values())).strides
        order = sorted(range(len(self.dims)), key=lambda axis: (self._is_shared(axis), -abs(strides[axis])))

        def call(box: Box, _lane: int) -> Call:
            part = self.part(box)
            assert part is not None, "`_extents` has asked for the first, which is largest"
            given = {name: _part_of(operands[name], region) for name, region in part.inputs.items()}
            into = {name: _part_of(array, box) for name, array in results.items()}
            return partial(self._evaluate, part, given, into, box)

        return [deal(boxes(self.dims, self._extents(order)), len(lanes), call)]

    def part(self, box: Box) -> Part | None:
        """How a box of the results is computed."""
        return self.node.part(self.specs, dict.fromkeys((name for name, _ in self._outputs), box))

    @functools.cached_property
    def _outputs(self) -> tuple[tuple[str, Any], ...]:
        return tuple(self.node.named(self.node.outputs))

    def _extents(self, order: Sequence[int]) -> Dims:
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
        regions = {name: region for name, region in part.inputs.items() if name not in self._indexed}
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
            if name not in self._indexed
        )

    @property
    def _indexed(self) -> Sequence[str]:
        """Operands of which a part reads some elements, here and there: they are not copied."""
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
        specs = {
            name: TensorSpec.packed(self._cut(name, region), self.specs[name].dtype)
            for name, region in part.results.items()
        }
        for name, result in part.operation.evaluate(XP, values, specs).items():
            if name in into:
                wanted = (
                    slice(of.start - own.start, of.stop - own.start)
                    for of, own in zip(box, part.results[name], strict=True)
                )
                found = result[tuple(wanted)]
                moved = part.moved.get(name)
                store(found if moved is None else found + moved, self.specs[name].dtype, into[name])
