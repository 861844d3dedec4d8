"""Device memory for self-checks: known values between guard bytes, and checks that the guards are intact.

A few small kernels of our own, compiled together, do what CuPy's operators could do too. CuPy compiles its
operators one by one at their first use, half a second each if its disk cache is empty. This compilation took
most of the time of a service's first answer on a new machine.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from cudnn_actor.engines.cpu.exact.evaluation import round_into
from cudnn_actor.engines.cuda.kernels.index_code import THREAD, indexing
from cudnn_actor.engines.cuda.kernels.kernel import FEW_BLOCKS, grid_over
from cudnn_actor.engines.cuda.kernels.reduction_code import over_lanes
from cudnn_actor.engines.cuda.kernels.walks import Walk
from cudnn_actor.engines.cuda.library.libraries import ON_DEVICE, libraries
from cudnn_actor.protocol.operations import GraphTensor
from cudnn_actor.protocol.types.dtypes import DType

__all__ = [
    "NUMBERS",
    "CheckedTensor",
    "Findings",
    "Guarded",
    "draw_array",
    "enqueue",
    "kernel_named",
    "kernels_module",
]

_GUARD_BYTES = 4096 + 256
"""CuPy aligns memory to 512 bytes; this offset aligns a tensor to 256 bytes only, as a buffer may be."""
_GUARD, _POISON = 0xA5, 0xFF  # bytes of 0xFF are NaN in every floating type
_GUARDS_APART = 64
NUMBERS = tuple(map(float, range(-3, 5)))
"""The numbers that inputs are filled with."""
_RANK = 8


class Findings:
    """Flags that the checking kernels set. They are read together, because reading waits for the device.

    Parameters
    ----------
    pool
        The CuPy memory pool to take the flags from.
    """

    def __init__(self, pool: Any) -> None:
        cupy = libraries().cupy
        self._flags = cupy.ndarray((2,), cupy.uint32, pool.malloc(8))
        self.strayed, self.nan = (int(self._flags.data.ptr) + 4 * number for number in range(2))
        """Addresses of the flags: a guard byte has changed; an element is NaN."""
        _set(self.strayed, 0, 8)

    def read(self) -> tuple[bool, bool]:
        """Whether a guard byte has changed, and whether there was a NaN. Blocks."""
        strayed, nan = np.asarray(libraries().cupy.asnumpy(self._flags)).tolist()
        return bool(strayed), bool(nan)


class Guarded:
    """Device bytes between two guards. Its methods enqueue on the current stream.

    `seed` determines the guards' bytes, so that a copy of one tensor's guard over another's is found.

    Raises CuPy's `OutOfMemoryError`.
    """

    def __init__(self, pool: Any, nbytes: int, seed: int = 0) -> None:
        self.nbytes = nbytes
        self._guard = _GUARD + seed % _GUARDS_APART
        self._memory = pool.malloc(nbytes + 2 * _GUARD_BYTES)
        self._start = int(self._memory.ptr)
        self.pointer = self._start + _GUARD_BYTES
        self.guard()

    def guard(self) -> None:
        """Set every byte, in the guards and between them, to the guard value."""
        _set(self._start, self._guard, self.nbytes + 2 * _GUARD_BYTES)

    def poison(self) -> None:
        """Fill the memory between the guards with NaN."""
        _set(self.pointer, _POISON, self.nbytes)

    def copy_from(self, other: Guarded) -> None:
        """Enqueue a copy of the bytes between the guards of another object of the same size."""
        stream = libraries().cupy.cuda.get_current_stream().ptr
        libraries().runtime.memcpyAsync(self.pointer, other.pointer, self.nbytes, ON_DEVICE, stream)

    def add_up(self, sum_: int) -> None:
        """Enqueue a kernel that adds a checksum of the bytes between the guards to the uint64 at `sum_`."""
        enqueue("checksum", self.nbytes, (self.pointer, self.nbytes, sum_))

    def check(self, findings: Findings) -> None:
        """Enqueue a check that sets a flag if a guard byte has changed."""
        arguments = (self._start, self.pointer + self.nbytes, self._guard, findings.strayed)
        kernel_named("guards")(*grid_over(_GUARD_BYTES), arguments)


class CheckedTensor(Guarded):
    """A graph's tensor between two guards, filled with whole numbers from -3 to 4.

    `seed` determines the numbers: two tensors with different seeds differ.
    """

    def __init__(self, pool: Any, tensor: GraphTensor, seed: int) -> None:
        super().__init__(pool, tensor.spec.nbytes, 1 + seed)
        self._tensor = tensor
        self.fill(seed)

    def fill(self, seed: int) -> None:
        """Draw the numbers of a seed, and restore the guards."""
        self._seed = seed
        self.guard()
        dtype = self._tensor.dtype
        _draw(self.pointer, dtype, self.nbytes // dtype.itemsize, self._seed)

    def fill_with(self, numbers: np.ndarray) -> None:
        """Replace the values: each of `NUMBERS` by the number at the same index of `numbers`."""
        dtype = self._tensor.dtype
        count = self.nbytes // dtype.itemsize
        enqueue("fill", count, (self.pointer, dtype.itemsize, *_bits_of(numbers, dtype), count, self._seed))

    def look_for_nan(self, findings: Findings) -> None:
        """Enqueue a check that sets a flag if any element is NaN. Gaps between elements are ignored."""
        tensor = self._tensor
        if not tensor.dtype.is_floating:
            return
        walk, (infinity,) = _walk(tensor.dims, tensor.strides), _bits((np.inf,), tensor.dtype)
        numbers = tensor.dtype.itemsize, infinity, *walk.numbers.values()
        enqueue("find_nan", walk.total, (self.pointer, *numbers, findings.nan))


def draw_array(dims: tuple[int, ...], seed: int) -> Any:
    """A new float64 array on the device, with the numbers of a packed `CheckedTensor` with this seed."""
    values = libraries().cupy.empty(dims, np.float64)
    _draw(values, DType.FLOAT64, values.size, seed)
    return values


def _draw(into: Any, dtype: DType, count: int, seed: int) -> None:
    """Enqueue a kernel that writes the numbers of a seed to memory."""
    enqueue("fill", count, (into, dtype.itemsize, *_bits(NUMBERS, dtype), count, seed))


@functools.cache
def _bits(numbers: tuple[float, ...], dtype: DType) -> tuple[int, ...]:
    """The bits of a dtype's elements, as int64."""
    return _bits_of(np.array(numbers), dtype)


def _bits_of(numbers: np.ndarray, dtype: DType) -> tuple[int, ...]:
    """Like `_bits`, without its cache: a cache takes -0.0 for 0.0, and no NaN equals another one."""
    elements = np.empty(len(numbers), dtype.numpy)
    round_into(numbers.astype(np.float64), dtype, elements)
    return tuple(elements.view(f"u{dtype.itemsize}").astype(np.uint64).view(np.int64).tolist())


def enqueue(kernel: str, count: int, arguments: tuple[Any, ...]) -> None:
    """Enqueue one of the kernels for `count` elements."""
    if count:
        kernel_named(kernel)(*grid_over(count, FEW_BLOCKS), arguments)


def _set(address: int, value: int, nbytes: int) -> None:
    """Enqueue a memset of bytes."""
    if nbytes:
        stream = libraries().cupy.cuda.get_current_stream().ptr
        libraries().runtime.memsetAsync(address, value, nbytes, stream)


@functools.cache
def kernel_named(name: str) -> Any:
    """Return one of the compiled kernels, by its name."""
    return kernels_module().get_function(name)


@functools.cache
def kernels_module() -> Any:
    """Return the module of all kernels, which is compiled at the first call."""
    return libraries().cupy.RawModule(code=source(), options=("--std=c++17",))


def source() -> str:
    """The kernels in CUDA C++. They treat elements as bits, so that one serves every dtype of a size."""
    return "\n".join([indexing(wide=True), _ADD, _GUARDS, _CHECKSUM, _COMPARISON, _FILL, _find_nan()])


# Warps add to the same address in an order that varies. Sums of whole numbers do not depend on the order. In
# a sum of squares, which says how far results may be off, the last bits do not matter.
_ADD = f"""
// To add up in each warp first is faster: additions to one address wait for each other.
template <class T> __device__ __forceinline__ void add(T* sum, T part) {{
    {over_lanes("part")}
    if (threadIdx.x % 32 == 0) atomicAdd(sum, part);
}}
"""
_GUARDS = f"""
extern "C" __global__ void guards(
    const unsigned char* before, const unsigned char* behind, long long guard, unsigned int* strayed) {{
    const long long i = {THREAD};
    if (i < {_GUARD_BYTES} && (before[i] != guard || behind[i] != guard)) *strayed = 1;
}}
"""
_CHECKSUM = """
extern "C" __global__ void checksum(const unsigned char* bytes, long long count, unsigned long long* sum) {
    unsigned long long part = 0;
    EACH(i, count) part += (bytes[i] + 1ull) * ((i + 1) * 0x9e3779b97f4a7c15ull | 1);
    add(sum, part);
}
"""
_COMPARISON = """
extern "C" __global__ void squares(const double* values, long long count, long long stride, double* found) {
    double sum = 0;
    EACH(i, count) sum += values[i * stride] * values[i * stride];
    add(found, sum);
}
// Behind the sum of the squares: 1 if an element is not below the limit, or differs by more than is allowed.
extern "C" __global__ void apart(
    const double* wanted, const double* got, long long count, long long stride, double own, double sums,
    double underflow, double limit, double* found) {
    const double rest = sums * sqrt(found[0] / count) + underflow;
    EACH(i, count) {
        const double size = fabs(wanted[i * stride]), error = fabs(got[i * stride] - wanted[i * stride]);
        if (!(size < limit && error <= own * size + rest)) found[1] = 1;
    }
}
"""
# A multiplicative hash scatters the numbers: neighbours differ, whatever the strides are.
_FILL = """
extern "C" __global__ void fill(
    void* out, long long size, long long n0, long long n1, long long n2, long long n3, long long n4,
    long long n5, long long n6, long long n7, long long count, long long seed) {
    const long long numbers[8] = {n0, n1, n2, n3, n4, n5, n6, n7};
    EACH(i, count) {
        unsigned int bits = (unsigned int)i * 2654435761u ^ (unsigned int)seed * 2246822519u;
        bits = (bits ^ bits >> 15) * 3266489917u;
        const long long number = numbers[bits >> 29];
        if (size == 1) ((unsigned char*)out)[i] = (unsigned char)number;
        else if (size == 2) ((unsigned short*)out)[i] = (unsigned short)number;
        else if (size == 4) ((unsigned int*)out)[i] = (unsigned int)number;
        else ((long long*)out)[i] = number;
    }
}
"""


def _find_nan() -> str:
    """The kernel that looks for NaN, for elements of each size."""
    body = """const unsigned long long bits = size == 2 ? ((const unsigned short*)in)[in_at]
            : size == 4 ? ((const unsigned int*)in)[in_at] : ((const unsigned long long*)in)[in_at];
        if ((bits & magnitude) > infinity) *nan = 1;"""
    walk = _walk()
    return f"""
extern "C" __global__ void find_nan(
    const void* in, long long size, long long infinity, {walk.parameters}, unsigned int* nan) {{
    const unsigned long long magnitude = ~0ull >> (65 - 8 * size);
    {walk.loop(body)}
}}"""


def _walk(dims: Sequence[int] = (), strides: Sequence[int] = ()) -> Walk:
    """The walk over a tensor's elements. It always has `_RANK` axes, so that one kernel serves all ranks."""
    axes = [(1, (0,))] * (_RANK - len(dims))
    axes += ((size, (step,)) for size, step in zip(dims, strides, strict=True))
    return Walk("i", ("in",), tuple(axes))
