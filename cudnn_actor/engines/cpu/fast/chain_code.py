"""The code of a chain of pointwise operations: in which dtype each is computed, and how it is stored."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence, Set
from typing import Any

import numpy as np

from cudnn_actor.engines.cpu.fast.formulas import FLOAT32_ONLY, FORMULAS
from cudnn_actor.engines.cpu.fast.instructions import (
    Code,
    Instruction,
    Outer,
    Register,
    Value,
    constant,
    convert,
    simplify,
)
from cudnn_actor.engines.cpu.fast.kernels import carried_number, carrier_dtype
from cudnn_actor.engines.cpu.fast.rounding import round_values
from cudnn_actor.engines.cpu.rounding import integer_range
from cudnn_actor.protocol.operations import FUNCTIONS, GraphTensor, Pointwise, PointwiseMode
from cudnn_actor.protocol.operations.functions import saturate_parameters
from cudnn_actor.protocol.types.dtypes import DType
from cudnn_actor.protocol.types.tensor import TensorSpec

__all__ = ["ChainCode", "Tensor"]

Tensor = TensorSpec | GraphTensor
_M = PointwiseMode
_FLOATS_ONLY = {_M.MOD, _M.FMOD, _M.POW, _M.PRELU}
"""Modes whose formulas do not hold for integers."""
_IN_ANY_TYPE = {_M.IDENTITY, _M.MIN, _M.MAX, _M.SELECT, _M.BITWISE_AND, _M.BITWISE_OR, _M.BITWISE_XOR}
_IN_ANY_TYPE |= {_M.BITWISE_NOT}
"""Modes that give the same in int64 as in the operands' integer type, if all have that and the result too."""
_SAME_OF_INTEGERS = {_M.IDENTITY, _M.CEIL, _M.FLOOR, _M.ROUND, _M.TRUNC}
"""Modes that leave integers as they are."""


class ChainCode:
    """The code of a chain, as operations are added.

    Parameters
    ----------
    tensors, stored, constants, overwritten
        As `pointwise.chain` takes them.
    """

    def __init__(
        self,
        tensors: Mapping[Any, Tensor],
        stored: Set[Any],
        constants: Mapping[Any, float | int],
        overwritten: Set[Any],
    ) -> None:
        self._tensors, self._stored, self._constants = tensors, stored, constants
        self._code = Code()
        self._values: dict[Any, Value] = {}
        self.homes: dict[Register, Hashable] = {}
        """The keys of the stored results by their values."""
        self._overwritten = overwritten | {getattr(t, "overwrites", None) for t in tensors.values()} - {None}

    def instructions(self) -> list[Instruction]:
        """The instructions of all operations that have been added, with as few calls as possible."""
        return simplify(self._code.instructions, self.homes, self._overwritten)

    def add(self, node: Pointwise[Any]) -> bool:
        """Add an operation; False if there is no formula for it."""
        begin = len(self._code.instructions)
        result, dtypes = self._tensors[node.result], [self._tensors[key].dtype for key in node.operands]
        computed = node.compute(tuple(dtypes))
        value = (
            self._of_floats(node) if computed.is_floating else self._of_integers(node, computed, result.dtype)
        )
        value = None if value is None else self._as_result(node, value, result.dtype)
        if value is None:
            return False
        if node.result in self._stored:
            new = {instruction.output.base for instruction in self._code.instructions[begin:]}
            if value.base not in new or value.base in self.homes:
                value = self._code(convert, value, dtype=carrier_dtype(result.dtype))
            assert isinstance(value.base, Register)
            self.homes[value.base] = node.result
        elif isinstance(value.base, Outer) and value.base.key in self._overwritten:
            # The operand may be written over before a later operation reads this value.
            value = self._code(convert, value, dtype=value.dtype)
        self._values[node.result] = value
        return True

    def _operand(self, key: Any) -> Value:
        dtype = self._tensors[key].dtype
        if key in self._constants:
            number = self._constants[key]
            return constant(number, carried_number(dtype, number))
        return self._values.setdefault(key, Value(Outer(key), carrier_dtype(dtype)))

    def _of_floats(self, node: Pointwise[Any]) -> Value | None:
        """The value of an operation that is computed in floats; None if there is no formula for it."""
        function, parameters = FUNCTIONS[node.mode], tuple(node.effective_parameters.values())
        wide = any(self._tensors[key].dtype is DType.FLOAT64 for key in node.operands)
        dtype = np.dtype(np.float64 if wide else np.float32)
        if node.mode not in FORMULAS or function.bits or (wide and node.mode in FLOAT32_ONLY):
            return None
        operands = [self._operand(key) for key in node.operands]
        if node.mode is _M.SELECT:
            condition, *choices = operands
            return self._select(condition, [self._code.convert(value, dtype) for value in choices])
        if not (function.truth and _alike(operands)):
            operands = [self._code.convert(value, dtype) for value in operands]
        found: Value = FORMULAS[node.mode](self._code, *operands, *parameters)
        return found

    def _of_integers(self, node: Pointwise[Any], computed: DType, result: DType) -> Value | None:
        """The value of an operation that is computed in integers; None if there is no formula for it."""
        function = FUNCTIONS[node.mode]
        if node.mode in _FLOATS_ONLY or node.mode not in FORMULAS:
            return None
        operands = [self._operand(key) for key in node.operands]
        deciding = list(function.deciding_operands(operands))
        own = _alike(deciding) and (
            function.truth or (node.mode in _IN_ANY_TYPE and deciding[0].dtype == result.numpy)
        )
        if function.bits and (result.is_floating or (result is DType.BOOL and not own)):
            return None
        if node.mode in _SAME_OF_INTEGERS:
            return operands[0]
        if not own:
            deciding = [self._code.convert(value, computed.numpy) for value in deciding]
        if node.mode is _M.SELECT:
            return self._select(operands[0], deciding)
        if node.mode is _M.RELU and node.effective_parameters["parameter"]:
            return None
        unsigned = computed is DType.UINT64
        parameters = saturate_parameters(tuple(node.effective_parameters.values()), unsigned=unsigned)
        found: Value = FORMULAS[node.mode](self._code, *deciding, *parameters)
        return found

    def _select(self, condition: Value, choices: Sequence[Value]) -> Value:
        if condition.dtype != bool:
            condition = self._code(np.not_equal, condition, 0, dtype=bool)
        a, b = choices
        return self._code.choose(condition, a, b, like=a)

    def _as_result(self, node: Pointwise[Any], value: Value, dtype: DType) -> Value | None:
        """A value rounded to the result's dtype; None if that would round it twice."""
        code, kind = self._code, value.dtype.kind
        if FUNCTIONS[node.mode].bits or value.dtype == dtype.numpy:
            return code.convert(value, dtype.numpy)
        if dtype.is_floating:
            if dtype.is_half and value.dtype.itemsize >= (8 if kind == "f" else 4):
                return None
            value = code.convert(value, carrier_dtype(dtype))
            return round_values(code, value, dtype) if dtype.is_half and kind != "b" else value
        if dtype is DType.BOOL:
            return code(np.not_equal, value, 0, dtype=bool)
        if kind == "b":
            return code.convert(value, dtype.numpy)
        return _saturate(code, value, dtype)


def _saturate(code: Code, value: Value, dtype: DType) -> Value:
    """Numbers as integers of a dtype: rounded to nearest even, the largest for what is larger, 0 for NaN."""
    least, largest = integer_range(dtype.numpy)
    if value.dtype.kind in "iu":
        own_least, own_largest = integer_range(value.dtype)
        if least > own_least:
            value = code(np.maximum, value, least)
        if largest < own_largest:
            value = code(np.minimum, value, largest)
        return code.convert(value, dtype.numpy)
    wide = code.convert(value, np.float64)
    most = min(float(largest), float(np.nextafter(float(largest + 1), 0)))
    limited_ = code(np.minimum, code(np.maximum, code(np.rint, wide), float(least)), most)
    whole = code.convert(limited_, np.uint64 if dtype is DType.UINT64 else np.int64)
    number = code.convert(code(np.equal, wide, wide, dtype=bool), whole.dtype)
    return code.convert(code(np.multiply, whole, number), dtype.numpy)


def _alike(values: Sequence[Value]) -> bool:
    return len({value.dtype for value in values}) == 1
