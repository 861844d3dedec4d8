"""Elementwise computations as straight-line code: each instruction is one NumPy call on a block.

Formulas are written as calls of a `Code`, which notes them down. Values are never changed once they are
computed, until `allocate_registers` gives them registers: pieces of scratch memory that are used again and
again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "Code",
    "Constant",
    "Instruction",
    "Outer",
    "Register",
    "Value",
    "allocate_registers",
    "constant",
    "convert",
]

Function = Callable[..., object]
"""A ufunc, or another function that takes arrays and, as `out`, the array to write to."""
AnyDType = np.dtype[Any]


@dataclass(frozen=True, eq=False)
class Register:
    """A value that an instruction computes: an array of a block's dims."""

    itemsize: int


@dataclass(frozen=True)
class Outer:
    """An array that the code is given, by its key."""

    key: Hashable


@dataclass(frozen=True)
class Constant:
    """A number of a dtype."""

    number: float | int
    dtype: AnyDType


@dataclass(frozen=True)
class Value:
    """A value: its place, and the dtype as which its bits are read."""

    base: Register | Outer | Constant
    dtype: AnyDType

    def bits(self, dtype: npt.DTypeLike) -> Value:
        """A value of the same bits, read as another dtype of the same size."""
        return Value(self.base, np.dtype(dtype))


@dataclass(frozen=True)
class Instruction:
    """`function(*inputs, out=output)`."""

    function: Function
    inputs: tuple[Value, ...]
    output: Value


@dataclass
class Code:
    """Instructions, in order."""

    instructions: list[Instruction] = field(default_factory=list)
    _converted: dict[tuple[Value, AnyDType], Value] = field(default_factory=dict)

    def __call__(
        self, function: Function, *inputs: Value | float | int, dtype: npt.DTypeLike | None = None
    ) -> Value:
        """The value of a function of values of the same dtype, and of numbers. `dtype`: of the result."""
        own = next(value.dtype for value in inputs if isinstance(value, Value))
        values = tuple(constant(x, own) for x in inputs)
        result = np.dtype(own if dtype is None else dtype)
        output = Value(Register(result.itemsize), result)
        self.instructions.append(Instruction(function, values, output))
        return output

    def convert(self, value: Value, dtype: npt.DTypeLike) -> Value:
        """The value as another dtype: rounded to nearest even, and of integers its lowest bits."""
        wanted = np.dtype(dtype)
        if value.dtype == wanted:
            return value
        if isinstance(value.base, Constant):
            return constant(value.base.number, wanted)
        if (value, wanted) not in self._converted:
            self._converted[value, wanted] = self(convert, value, dtype=wanted)
        return self._converted[value, wanted]

    def choose(self, condition: Value, a: Value | float, b: Value | float, like: Value) -> Value:
        """a where the condition, a bool, is true, else b, bit by bit; of the dtype of `like`."""
        dtype = like.dtype
        bits = np.dtype(f"i{dtype.itemsize}")
        mask = self(np.negative, self.convert(condition.bits(np.int8), bits))
        return self._blend(mask, constant(a, dtype).bits(bits), constant(b, dtype).bits(bits), dtype)

    def chosen_by_sign(self, x: Value, a: Value, b: Value) -> Value:
        """a where the sign of x is +, else b, bit by bit. All of one floating dtype."""
        bits = np.dtype(f"i{x.dtype.itemsize}")
        mask = self(np.right_shift, x.bits(bits), 8 * bits.itemsize - 1)
        return self._blend(mask, b.bits(bits), a.bits(bits), x.dtype)

    def _blend(self, mask: Value, a: Value, b: Value, dtype: AnyDType) -> Value:
        different = self(np.bitwise_xor, a, b)
        return self(np.bitwise_xor, self(np.bitwise_and, different, mask), b).bits(dtype)


def constant(number: Value | float, dtype: AnyDType) -> Value:
    """A number as a value; a value as it is."""
    return number if isinstance(number, Value) else Value(Constant(number, dtype), dtype)


def convert(x: npt.NDArray[Any], *, out: npt.NDArray[Any]) -> None:
    """Copy an array to one of another dtype."""
    np.copyto(out, x, casting="unsafe")


def simplify(
    instructions: Sequence[Instruction], stored: Container[Register], overwritten: Container[Hashable] = ()
) -> list[Instruction]:
    """The same computation with fewer calls.

    A product with 1 / (1 + exp(..)) becomes one division, and a minimum of a maximum, both with numbers, one
    call, where nothing else reads what lies between.

    `stored`: values that are written to memory. `overwritten`: keys of arrays that a result is written over:
    what reads one of these stays where it is.
    """
    reads = Counter(value.base for one in instructions for value in one.inputs)
    found: dict[object, Instruction] = {}
    for one in instructions:
        found[one.output.base] = one
        for value, other in (one.inputs, one.inputs[::-1]) if len(one.inputs) == 2 else ():
            if reads[value.base] != 1 or value.base in stored:
                continue
            before = found.get(value.base)
            if before is None or before.output != value:
                continue
            if one.function is np.multiply and _is_sigmoid(found, before):
                joined = Instruction(np.divide, (other, before.inputs[1]), one.output)
            elif (
                one.function is np.minimum
                and _bounds(before, other)
                and not (isinstance(first := before.inputs[0].base, Outer) and first.key in overwritten)
            ):
                joined = Instruction(np.ndarray.clip, (*before.inputs, other), one.output)
            else:
                continue
            del found[value.base]
            found[one.output.base] = joined
            break
    return list(found.values())


def _bounds(maximum: Instruction, upper: Value) -> bool:
    """Whether an instruction is the maximum of a value and of a number that is no more than `upper`."""
    if maximum.function is not np.maximum or not isinstance(upper.base, Constant):
        return False
    lower = maximum.inputs[1].base
    return isinstance(lower, Constant) and lower.number <= upper.base.number


def _is_sigmoid(computed: Mapping[object, Instruction], division: Instruction) -> bool:
    """Whether a division computes 1 / (1 + exp(..)), which never overflows."""
    one = constant(1.0, division.output.dtype)
    if division.function is not np.divide or division.inputs[0] != one:
        return False
    total = computed.get(division.inputs[1].base)
    if total is None or total.function is not np.add or total.inputs[1] != one:
        return False
    power = computed.get(total.inputs[0].base)
    return power is not None and power.function is np.exp


def allocate_registers(
    instructions: Sequence[Instruction], homes: Mapping[Register, Hashable]
) -> tuple[dict[Register, int], int]:
    """The register slot of each value, and the number of slots.

    A slot is free again when the last instruction that reads its value has begun: elementwise functions may
    write to what they read, where the elements have the same size. `homes`: values that need no slot.
    """
    last = {
        value.base: number
        for number, instruction in enumerate(instructions)
        for value in instruction.inputs
        if isinstance(value.base, Register)
    }
    slots: dict[Register, int] = {}
    free: list[int] = []
    count = 0
    for number, instruction in enumerate(instructions):
        output = instruction.output.base
        assert isinstance(output, Register)
        ends = list(
            dict.fromkeys(
                value.base
                for value in instruction.inputs
                if isinstance(value.base, Register) and value.base in slots and last[value.base] == number
            )
        )
        if output not in homes:
            # NumPy's copies, unlike its ufuncs, do not write to what they read: they copy it first.
            usable = ends if instruction.function is not convert else []
            same = next((base for base in usable if base.itemsize == output.itemsize), None)
            if same is not None:
                ends.remove(same)  # not free yet
                slots[output] = slots[same]
            elif free:
                slots[output] = free.pop()
            else:
                slots[output], count = count, count + 1
        free += [slots[base] for base in ends]
        if output in slots and output not in last:  # never read
            free.append(slots[output])
    return slots, count
