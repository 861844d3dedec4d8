"""Chains of pointwise operations: one block after the other, each by all operations.

What lies between the operations stays in a few registers per lane, which fit into the cache.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Hashable, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from cudnn_actor.engines.cpu.fast.blocks import block_elements, merged_axes, pieces
from cudnn_actor.engines.cpu.fast.chain_code import ChainCode, Tensor
from cudnn_actor.engines.cpu.fast.instructions import (
    Constant,
    Function,
    Instruction,
    Outer,
    Register,
    Value,
    allocate_registers,
)
from cudnn_actor.engines.cpu.fast.kernels import Call, Step, carrier_dtype, deal, lanes_worth
from cudnn_actor.engines.cpu.scratch import Scratch, footprint
from cudnn_actor.protocol.operations import Node, Pointwise, PointwiseMode, Specs
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["Chain", "chain", "make", "rounding_kernel"]

Array = npt.NDArray[Any]
_COSTS: Mapping[object, float] = {
    **dict.fromkeys((np.exp, np.log, np.sin, np.cos), 2.0),
    **dict.fromkeys((np.tanh, np.arctan, np.power, np.tan, np.remainder, np.fmod), 5.0),
    **dict.fromkeys((np.expm1, np.log1p, np.sinh, np.cosh, np.arcsinh, np.arccosh, np.arctanh), 15.0),
}
"""Nanoseconds for an element, where they are more than 0.2."""
_MOST_CALLS = 1 << 18
"""Calls of a chain, about: each takes some 10 microseconds to bind and half a kilobyte."""
_LONGER, _FEWEST_BLOCKS = 8, 8
"""Blocks of one instruction, which leaves nothing for another in the cache: how many times as long they are,
at most, and into how many all elements are cut at least, for several lanes."""
_MOST_ROWS = 4
"""Repeated operands of which each lane has an array of a block's dims: these are to stay in the cache."""
_ENOUGH_BLOCKS = 4
"""Blocks of a lane: with fewer, it takes as long to fill such an array as it saves."""


def make(node: Node, specs: Specs) -> Chain | None:
    """The kernel for one pointwise operation, by the names of its operands; None as for `chain`."""
    assert isinstance(node, Pointwise)
    return chain([node.with_operands(lambda name: name)], specs, {"result"})


def rounding_kernel(spec: Tensor) -> Chain:
    """The kernel that rounds values to those of a half type: y from x, which may lie in the same memory."""
    single = TensorSpec.packed(spec.dims, DType.FLOAT32)
    identity = Pointwise(mode=PointwiseMode.IDENTITY, operands=("x",), result="y")
    found = chain([identity], {"x": single, "y": TensorSpec.packed(spec.dims, spec.dtype)}, {"y"})
    assert found is not None
    return found


def chain(
    nodes: Sequence[Any],
    tensors: Mapping[Any, Tensor],
    stored: Set[Any],
    constants: Mapping[Any, float | int] = MappingProxyType({}),
    overwritten: Set[Any] = frozenset(),
) -> Chain | None:
    """The kernel for several pointwise operations whose results have the same dims.

    Parameters
    ----------
    nodes
        `Pointwise` operations, in order, whose operands are keys of `tensors`: uids, or names.
    tensors
        All that they read and write: graph tensors or specs.
    stored
        The keys of the results that are written to memory. A result may share memory with an operand of the
        same dims and strides, if no later operation reads that operand.
    constants
        The values of operands that are constants. `bind` is not given these.
    overwritten
        The keys of operands in whose memory a result lies, besides those that graph tensors overwrite.

    Returns
    -------
    Chain, or None
        None if one of them has to be evaluated by its definition: functions of integers but the usual ones,
        float64 or int64 rounded to half types, error functions of float64, and tensors without elements.
    """
    dims = tensors[nodes[0].result].dims
    if 0 in dims:
        return None
    code = ChainCode(tensors, stored, constants, overwritten)
    if not all(map(code.add, nodes)):
        return None
    instructions = code.instructions()
    slots, count = allocate_registers(instructions, code.homes)
    return Chain(dims, tuple(instructions), slots, count, code.homes, _rows(dims, instructions, tensors))


def _rows(
    dims: tuple[int, ...], instructions: Sequence[Instruction], tensors: Mapping[Any, Tensor]
) -> dict[Any, int]:
    """Operands that are repeated along some dims: at most a few, and the sizes of their elements."""
    if math.prod(dims) < _ENOUGH_BLOCKS * block_elements(dims):
        return {}
    bases = dict.fromkeys(value.base for one in instructions for value in one.inputs)
    read = {base.key: tensors[base.key] for base in bases if isinstance(base, Outer)}
    rows = [key for key, tensor in read.items() if tensor.dims != dims and math.prod(tensor.dims) > 1]
    return {key: carrier_dtype(read[key].dtype).itemsize for key in rows[:_MOST_ROWS]}


@dataclass(frozen=True)
class Chain:
    """Instructions for each block of tensors of these dims.

    Parameters
    ----------
    dims
        Of all results.
    instructions
        What is computed.
    slots, count
        The register of each value that is not stored, and how many registers there are.
    homes
        The keys of the stored results by their values.
    rows
        Operands that are repeated, with the sizes of their elements. Where many blocks repeat the same row of
        one, each lane fills an array of a block's dims with it.
    """

    dims: tuple[int, ...]
    instructions: tuple[Instruction, ...]
    slots: Mapping[Register, int]
    count: int
    homes: Mapping[Register, Hashable]
    rows: Mapping[Hashable, int]

    @property
    def _block_elements(self) -> int:
        """The most elements of a block: more than usual where there would be too many calls."""
        size = math.prod(self.dims)
        return min(size, max(block_elements(self.dims), -(-size * len(self.instructions) // _MOST_CALLS)))

    @property
    def _long_block_elements(self) -> int:
        """The most elements of a block of one instruction, whose operands and result lie outside of lanes."""
        usual = self._block_elements
        return max(usual, min(_LONGER * usual, math.prod(self.dims) // _FEWEST_BLOCKS))

    @property
    def _register_bytes(self) -> int:
        largest = max((base.itemsize for base in self.slots), default=0)
        return footprint((self._block_elements,), itemsize=largest)

    def footprint(self, lanes: int) -> int:
        """Bytes of scratch that each lane needs."""
        del lanes
        rows = (footprint((self._block_elements,), itemsize=itemsize) for itemsize in self.rows.values())
        return self.count * self._register_bytes + sum(rows)

    def bind(
        self, operands: Mapping[Any, Array], results: Mapping[Any, Array], lanes: Sequence[Scratch]
    ) -> list[Step]:
        """The steps of a run: see `Kernel`. Arrays are given by the keys of their tensors.

        An operand of dims () is a scalar. Its value is read in each run.
        """
        element_ns = sum(_COSTS.get(one.function, 0.2) for one in self.instructions)
        lanes = lanes_worth(lanes, math.prod(self.dims) * element_ns)
        arrays = {**operands, **results}
        if not self.dims:
            arrays = {key: array.reshape(1) for key, array in arrays.items()}
        scalars = {key: array for key, array in arrays.items() if not array.ndim}
        whole = [key for key in arrays if key not in scalars]
        first = next(iter(results))
        dims, merged_views = merged_axes(
            self.dims or (1,), [arrays[key] for key in whole], leading=whole.index(first)
        )
        views = dict(zip(whole, merged_views, strict=True))
        cuts = [*pieces(dims, self._block_elements)]
        rows = self._repeated_rows(views, cuts) if len(cuts) >= _ENOUGH_BLOCKS * len(lanes) else {}
        if len(self.instructions) == 1 and not rows:
            cuts = [*pieces(dims, self._long_block_elements)]
        arguments, code = self._code()
        memory = [_Registers(lane, self.count, self._register_bytes) for lane in lanes]

        def block(cut: Any, number: int) -> list[Call]:
            lane, calls = memory[number], []
            block = scalars | {key: view[cut] for key, view in views.items()}
            for key, repeated in rows.items():
                full, filling = lane.fill_rows(key, repeated)
                calls += filling
                block[key] = full[: len(block[key])]
            arrays_of = [each.array(block, block[first].shape, lane) for each in arguments]
            for function, inputs, output in code:
                calls.append(_call(function, [arrays_of[index] for index in inputs], arrays_of[output]))
            return calls

        return [deal(cuts, len(lanes), block)]

    def _repeated_rows(self, views: Mapping[Any, Array], cuts: Sequence[Any]) -> dict[Any, Array]:
        """The operands of which all blocks repeat the same row; of each, the part of the largest block."""
        largest = {key: views[key][cuts[0]] for key in self.rows}
        return {key: part for key, part in largest.items() if part.ndim > 1 and _is_row(views[key])}

    def _code(self) -> tuple[list[_Argument], list[tuple[Function, list[int], int]]]:
        """The operands and results of all instructions; and the instructions, with the numbers of their
        operands and results."""
        arguments: dict[_Argument, int] = {}
        code = [
            (
                one.function,
                [self._argument(of, one, arguments) for of in one.inputs],
                self._argument(one.output, one, arguments),
            )
            for one in self.instructions
        ]
        return [*arguments], code

    def _argument(self, value: Value, instruction: Instruction, arguments: dict[_Argument, int]) -> int:
        """The number of a value that an instruction reads or writes; a new one if it has none."""
        base, dtype = value.base, value.dtype
        argument: _Argument
        if isinstance(base, Constant):
            # NumPy's maximum and minimum are several times slower with a scalar.
            argument = _Number(base, dtype, instruction.function in _EXTREMES)
        elif isinstance(base, Outer):
            argument = _Part(base.key, dtype)
        elif base in self.homes:
            argument = _Part(self.homes[base], dtype)
        else:
            argument = _Slot(self.slots[base], dtype)
        return arguments.setdefault(argument, len(arguments))


def _is_row(view: Array) -> bool:
    """Whether an array is one row again and again, whose elements are neighbours in memory."""
    return view.strides[-1] == view.itemsize and not any(view.strides[:-1])


class _Registers:
    """A lane's registers, and what they have been seen as."""

    def __init__(self, lane: Scratch, count: int, nbytes: int) -> None:
        self._lane = lane
        self._rows: dict[Any, Array] = {}
        self._memory = [lane.take((nbytes,), np.uint8) for _ in range(count)]
        self._known: dict[tuple[_Slot, tuple[int, ...]], Array] = {}

    def array(self, slot: _Slot, dims: tuple[int, ...]) -> Array:
        """A register as an array of these dims."""
        if (slot, dims) not in self._known:
            nbytes = math.prod(dims) * slot.dtype.itemsize
            self._known[slot, dims] = self._memory[slot.number][:nbytes].view(slot.dtype).reshape(dims)
        return self._known[slot, dims]

    def fill_rows(self, key: Any, rows: Array) -> tuple[Array, list[Call]]:
        """An array full of repeated rows, and the calls that fill it, unless they have been given before."""
        if key in self._rows:
            return self._rows[key], []
        array = self._rows[key] = self._lane.take(rows.shape, rows.dtype)
        return array, [partial(np.copyto, array, rows)]


@dataclass(frozen=True)
class _Number:
    """A number; `full`: in each element of a block."""

    base: Constant
    dtype: np.dtype[Any]
    full: bool

    def array(self, block: Mapping[Any, Array], dims: tuple[int, ...], registers: _Registers) -> Array:
        del block, registers
        if not self.full:
            return _constants(self.base, self.dtype, None)
        return _constants(self.base, self.dtype, math.prod(dims)).reshape(dims)


@dataclass(frozen=True)
class _Part:
    """A block's part of an array that the chain is given, as a dtype of the same size."""

    key: Hashable
    dtype: np.dtype[Any]

    def array(self, block: Mapping[Any, Array], dims: tuple[int, ...], registers: _Registers) -> Array:
        del dims, registers
        return block[self.key].view(self.dtype)


@dataclass(frozen=True)
class _Slot:
    """A register as a dtype."""

    number: int
    dtype: np.dtype[Any]

    def array(self, block: Mapping[Any, Array], dims: tuple[int, ...], registers: _Registers) -> Array:
        del block
        return registers.array(self, dims)


_Argument = _Number | _Part | _Slot
"""An operand or the result of an instruction."""
_EXTREMES = (np.maximum, np.minimum)


def _call(function: Function, inputs: Sequence[Array], output: Array) -> Call:
    # By its place where NumPy takes it: a keyword costs 0.2 µs.
    if isinstance(function, np.ufunc) and function not in _EXTREMES:
        return partial(function, *inputs, output)
    return partial(function, *inputs, out=output)


@functools.lru_cache(maxsize=256)
def _constants(base: Constant, dtype: np.dtype[Any], length: int | None) -> Array:
    """A number as an array of no dims, or of a length."""
    found = np.full(() if length is None else length, base.number, base.dtype).view(dtype)
    found.flags.writeable = False
    return found
