"""Element types in CUDA C++: what stores an element, and how it is loaded and rounded."""

from __future__ import annotations

import math

from cudnn_actor.protocol.operations.functions import saturate_parameters
from cudnn_actor.protocol.types.dtypes import DType

__all__ = ["ACCESS_BYTES", "CONVERSIONS", "C_TYPES", "PACK", "WORDS", "WORD_TYPES", "literal", "load"]
__all__ += ["store", "value_dtype", "value_type"]

ACCESS_BYTES = 16
"""The most bytes that a thread reads or writes at once."""

C_TYPES = {
    DType.FLOAT64: "double",
    DType.FLOAT32: "float",
    DType.FLOAT16: "unsigned short",
    DType.BFLOAT16: "unsigned short",
    DType.INT8: "signed char",
    DType.INT16: "short",
    DType.INT32: "int",
    DType.INT64: "long long",
    DType.UINT8: "unsigned char",
    DType.UINT16: "unsigned short",
    DType.UINT32: "unsigned int",
    DType.UINT64: "unsigned long long",
    DType.BOOL: "unsigned char",
}
"""The C type that stores an element."""
WORDS = {1: DType.UINT8, 2: DType.UINT16, 4: DType.UINT32, 8: DType.UINT64}
"""The dtype of the words that move elements as bits, by their bytes."""
WORD_TYPES = {nbytes: C_TYPES[dtype] for nbytes, dtype in WORDS.items()}
"""The C types of `WORDS`."""
_LOADS = {
    DType.FLOAT16: "from_half({})",
    DType.BFLOAT16: "__int_as_float((int)({}) << 16)",
    DType.BOOL: "(({}) != 0)",
}
_STORES = {
    DType.FLOAT16: "to_half({})",
    DType.BFLOAT16: "to_bfloat16({})",
    DType.INT8: "(signed char)whole({}, -128.0, 127.0)",
    DType.INT16: "(short)whole({}, -32768.0, 32767.0)",
    DType.INT32: "(int)whole({}, -2147483648.0, 2147483647.0)",
    DType.INT64: "(long long)whole({}, -9223372036854775808.0, 9223372036854774784.0)",
    DType.UINT8: "(unsigned char)whole({}, 0.0, 255.0)",
    DType.UINT16: "(unsigned short)whole({}, 0.0, 65535.0)",
    DType.UINT32: "(unsigned int)whole({}, 0.0, 4294967295.0)",
    DType.UINT64: "to_uint64({})",
    DType.BOOL: "(({}) != 0)",
}
CONVERSIONS = r"""
__device__ __forceinline__ float from_half(unsigned short bits) {
    float value; asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits)); return value;
}
__device__ __forceinline__ unsigned short to_half(float value) {
    unsigned short bits; asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value)); return bits;
}
__device__ __forceinline__ unsigned short to_half(double value) {
    unsigned short bits; asm("cvt.rn.f16.f64 %0, %1;" : "=h"(bits) : "d"(value)); return bits;
}
__device__ __forceinline__ unsigned short to_bfloat16(float value) {
#if __CUDA_ARCH__ >= 800
    unsigned short found; asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(found) : "f"(value)); return found;
#endif
    if (value != value) return 0x7fff;
    unsigned int bits = __float_as_uint(value);
    return (unsigned short)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
__device__ __forceinline__ unsigned short to_bfloat16(double value) {
    float towards_zero = __double2float_rz(value);  // round to odd: the second rounding then rounds correctly
    unsigned int bits = __float_as_uint(towards_zero);
    if ((double)towards_zero != value) bits |= 1;
    return to_bfloat16(value != value ? (float)value : __uint_as_float(bits));
}
__device__ __forceinline__ unsigned short to_half(long long value) { return to_half((double)value); }
__device__ __forceinline__ unsigned short to_bfloat16(long long value) { return to_bfloat16((double)value); }
__device__ __forceinline__ unsigned short to_half(unsigned long long value) { return to_half((double)value); }
__device__ __forceinline__ unsigned short to_bfloat16(unsigned long long value) {
    return to_bfloat16((double)value);
}
__device__ __forceinline__ double whole(double value, double least, double largest) {
    return value != value ? 0.0 : fmin(fmax(rint(value), least), largest);
}
__device__ __forceinline__ long long whole(long long value, double least, double largest) {
    if (largest > 9.2e18) return value;  // its own range, which double does not hold
    return min(max(value, (long long)least), (long long)largest);
}
__device__ __forceinline__ unsigned long long to_uint64(double value) {
    return value > 0 ? (unsigned long long)fmin(rint(value), 18446744073709549568.0) : 0;
}
__device__ __forceinline__ unsigned long long to_uint64(long long value) { return max(value, 0ll); }
__device__ __forceinline__ unsigned long long to_uint64(unsigned long long value) { return value; }
__device__ __forceinline__ unsigned long long whole(unsigned long long value, double, double largest) {
    return min(value, largest > 9.2e18 ? 9223372036854775807ull : (unsigned long long)largest);
}
"""
"""C++ functions that `load` and `store` call."""
PACK = """
template <class E, int N> struct alignas(sizeof(E) * N < 16 ? sizeof(E) * N : 16) Pack { E of[N]; };
"""
"""C++ of a pack: N neighbours that are read or written at once, or by several accesses if they are longer."""


def load(dtype: DType, element: str) -> str:
    """The C expression of the value of a stored element, itself a C expression."""
    return _LOADS.get(dtype, "{}").format(element)


def store(dtype: DType, value: str) -> str:
    """The C expression of the stored element that a value, itself a C expression, is rounded to."""
    return _STORES.get(dtype, "{}").format(value)


def value_dtype(dtype: DType) -> DType:
    """The dtype in which an element type's values are computed and added up: of 32 bits only for floats."""
    if dtype in (DType.FLOAT64, DType.UINT64):
        return dtype
    return DType.FLOAT32 if dtype.is_floating else DType.INT64


def value_type(dtype: DType) -> str:
    """The C type of an element type's values: that of its `value_dtype`."""
    return C_TYPES[value_dtype(dtype)]


def literal(value: float, kind: str) -> str:
    """A number as a C constant of a type. long long saturates; unsigned long long is modulo 2**64."""
    if kind == "long long":
        (whole,) = saturate_parameters((value,), unsigned=False)
        return f"({whole + 1}ll - 1)" if whole < 0 else f"{whole}ll"
    if kind == "unsigned long long":
        return f"{int(value) % (1 << 64)}ull"
    if math.isfinite(value):
        return f"(({kind}){float(value)!r})"
    bits = 0x7FFFFFFF if math.isnan(value) else 0x7F800000
    return f"({'-' if value < 0 else ''}({kind})__int_as_float({bits}))"
