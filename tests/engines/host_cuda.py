"""CUDA kernels, compiled for the host and run there, so that they can be tested where there is no GPU.

`CUPY` stands for what the engine uses of CuPy: a kernel is launched as it is on a device, with its own grid
and block. Blocks run one after the other. A block's threads are coroutines, which change places where they
wait for each other: at `__syncthreads`, and where the lanes of a warp exchange values, which all of them must
do alike. The threads of a kernel that does neither run one after the other. Half types are stored as on a
device; `exp` and its like are the host's.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import math
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cudnn_actor.engines.cpu.exact.evaluation import NumPy, exact, round_into
from cudnn_actor.engines.cuda.kernels import kernel
from cudnn_actor.engines.cuda.kernels.element_types import CONVERSIONS as DEVICE_PREAMBLE
from cudnn_actor.engines.cuda.library.libraries import libraries
from cudnn_actor.engines.cuda.operations import IMPLEMENTATIONS
from cudnn_actor.protocol import GraphTensor, TensorSpec
from cudnn_actor.protocol.operations import Operation

from ..once import once
from ..patience import PATIENCE_S

__all__ = [
    "CUPY",
    "KEPT",
    "PATHS",
    "PREAMBLE",
    "compile_for",
    "compile_together",
    "defined",
    "forget_unused",
    "launched",
]
__all__ += ["library", "sources_of", "stand_in", "use"]

_DEVICE = r"""
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>
extern "C" void abort();
// As in <cmath>, which takes the compiler longer than most kernels.
#define OF_ONE(name) inline double name(double x) { return __builtin_##name(x); } \
    inline float name##f(float x) { return __builtin_##name##f(x); } \
    inline float name(float x) { return name##f(x); }
#define OF_TWO(name) inline double name(double x, double y) { return __builtin_##name(x, y); } \
    inline float name##f(float x, float y) { return __builtin_##name##f(x, y); } \
    inline float name(float x, float y) { return name##f(x, y); }
OF_ONE(fabs) OF_ONE(exp) OF_ONE(expm1) OF_ONE(log) OF_ONE(log1p) OF_ONE(sin) OF_ONE(cos) OF_ONE(tan)
OF_ONE(asin) OF_ONE(acos) OF_ONE(atan) OF_ONE(sinh) OF_ONE(cosh) OF_ONE(tanh) OF_ONE(asinh) OF_ONE(acosh)
OF_ONE(atanh) OF_ONE(erf) OF_ONE(erfc) OF_ONE(sqrt) OF_ONE(ceil) OF_ONE(floor) OF_ONE(rint) OF_ONE(trunc)
OF_TWO(pow) OF_TWO(fmod) OF_TWO(copysign) OF_TWO(fmax) OF_TWO(fmin) OF_TWO(nextafter)
inline double fma(double x, double y, double z) { return __builtin_fma(x, y, z); }
inline float fmaf(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
inline float fma(float x, float y, float z) { return fmaf(x, y, z); }
inline bool isinf(double x) { return __builtin_isinf(x); }
inline bool isinf(float x) { return __builtin_isinf(x); }
inline long long llabs(long long x) { return __builtin_llabs(x); }
#undef OF_ONE
#undef OF_TWO
#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __shared__ static
template <class T> T rsqrt(T x) { return 1 / sqrt(x); }
template <class T> T min(T a, T b) { return a < b ? a : b; }
template <class T> T max(T a, T b) { return a > b ? a : b; }
template <class To, class From> To bits(From from) {
    To to;
    __builtin_memcpy(&to, &from, sizeof to);
    return to;
}
inline float __int_as_float(int x) { return bits<float>(x); }
inline float __uint_as_float(unsigned x) { return bits<float>(x); }
inline unsigned __float_as_uint(float x) { return bits<unsigned>(x); }
inline long long __double_as_longlong(double x) { return bits<long long>(x); }
inline double __longlong_as_double(long long x) { return bits<double>(x); }
template <class T> T atomicAdd(T* sum, T value) { const T before = *sum; *sum += value; return before; }
inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
    return (unsigned long long)((unsigned __int128)a * b >> 64);
}
inline float __double2float_rz(double x) {
    const float nearest = (float)x;
    return fabs(nearest) > fabs(x) ? nextafter(nearest, 0.0f) : nearest;
}

struct Place { unsigned x, y, z; };
static Place blockIdx, blockDim, gridDim;
static const int most = 1024, stack = 1 << 16;
static int me, running, waiting;
static enum { ready, at_barrier, ended } state[most];
static ucontext_t start;
static jmp_buf turn, turns[most];
static char slots[most][16];
static void (*body)(void*);
static void* arguments;
static Place place() {
    const unsigned row = me / blockDim.x;
    return {me % blockDim.x, row % blockDim.y, row / blockDim.y};
}
#define threadIdx (place())
static bool alone, begun[most];
static char* stacks;
// A coroutine runs the same thread of all blocks and launches, one after the other, and keeps its stack: to
// make it takes two system calls, and its first use of the stack a page.
static void begin() {
    for (;;) {
        body(arguments);
        state[me] = ended, --running;
        if (!_setjmp(turns[me])) _longjmp(turn, 1);
    }
}
// Without a system call, unlike swapcontext.
static void yield() { if (alone) abort(); if (!_setjmp(turns[me])) _longjmp(turn, 1); }
static void __syncthreads() { state[me] = at_barrier; ++waiting; yield(); }
static void make_coroutine() {
    ucontext_t own;
    getcontext(&own);
    own.uc_stack.ss_sp = stacks + (long)me * stack;
    own.uc_stack.ss_size = stack;
    makecontext(&own, begin, 0);
    begun[me] = true;
    swapcontext(&start, &own);
}
static void give_turn() {
    if (_setjmp(turn)) return;
    if (begun[me]) _longjmp(turns[me], 1);
    make_coroutine();
}
// In each round, all threads get on to where they yield next. So the lanes of a warp stay together.
static void run_block() {
    const int threads = blockDim.x * blockDim.y * blockDim.z;
    if (alone) {
        for (me = 0; me < threads; ++me) body(arguments);
        return;
    }
    running = threads, waiting = 0;
    for (me = 0; me < threads; ++me) state[me] = ready;
    for (me = 0; me < threads; ++me) give_turn();
    while (running) {
        if (waiting == running) {
            waiting = 0;
            for (int t = 0; t < threads; ++t) if (state[t] == at_barrier) state[t] = ready;
        }
        for (me = 0; me < threads; ++me) if (state[me] == ready) give_turn();
    }
}
template <class F> void run_grid(const unsigned* shape, bool with_others, F kernel) {
    gridDim = {shape[0], shape[1], shape[2]}, blockDim = {shape[3], shape[4], shape[5]};
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    if (with_others && !stacks)
        stacks = (char*)mmap(nullptr, (long)stack * most, PROT_READ | PROT_WRITE, flags, -1, 0);
    alone = !with_others;
    body = [](void* of) { (*(F*)of)(); };
    arguments = &kernel;
    for (blockIdx.z = 0; blockIdx.z < gridDim.z; ++blockIdx.z)
        for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y)
            for (blockIdx.x = 0; blockIdx.x < gridDim.x; ++blockIdx.x) run_block();
}
template <class T> T from_lane(T value, int lane) {
    __builtin_memcpy(slots[me], &value, sizeof value);
    yield();
    __builtin_memcpy(&value, slots[me / 32 * 32 + lane], sizeof value);
    yield();
    return value;
}
template <class T> T __shfl_xor_sync(unsigned, T value, int apart) {
    return from_lane(value, me % 32 ^ apart);
}
template <class T> T __shfl_up_sync(unsigned, T value, int apart) {
    return from_lane(value, me % 32 < apart ? me % 32 : me % 32 - apart);
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
template <class T> T atomicExch(T* at, T value) { const T old = *at; *at = value; return old; }
template <class T> T atomicMax(T* at, T value) { const T old = *at; *at = max(old, value); return old; }
static unsigned __ballot_sync(unsigned, bool vote) {
    slots[me][0] = vote;
    yield();
    unsigned votes = 0;
    for (int n = 0; n < 32; ++n) votes |= (unsigned)slots[me / 32 * 32 + n][0] << n;
    yield();
    return votes;
}
"""
_HALVES = """
inline float from_half(unsigned short x) { return (float)bits<_Float16>(x); }
inline unsigned short to_half(float x) { return bits<unsigned short>((_Float16)x); }
inline unsigned short to_half(double x) { return bits<unsigned short>((_Float16)x); }
"""
PREAMBLE = (
    _HALVES
    + DEVICE_PREAMBLE[DEVICE_PREAMBLE.index("__device__ __forceinline__ unsigned short to_bfloat16(float") :]
)
"""What kernels begin with, with other functions in the place of a GPU's assembly."""
_KERNEL = re.compile(r'extern "C" __global__ void (?:__launch_bounds__\([^)]*\) )?(\w+)\(([^)]*)\)')
_YIELDS = re.compile(r"__syncthreads|_sync\(")
"""Where a thread waits for others. The threads of a kernel without it need no coroutines."""
_SHARED = re.compile(r"extern __shared__ (\w+ \w+)\[\];")
"""Shared memory whose size a launch gives. Here it has room for 16,384 elements."""
_OPTIONS = ("-std=c++17", "-O0", "-shared", "-fPIC", "-ffp-contract=off", "-fwrapv", "-fno-strict-aliasing")
_CHECKED = ("-fsanitize=alignment", "-fsanitize-undefined-trap-on-error")
"""An access at an address that is no multiple of its size ends the process, as it ends a device's context."""
_LIBRARIES = ("-nostdlib", "-lm", "-lc", "-lgcc")
"""Without those of C++, of which nothing is used: to link them takes as long as to compile a small kernel."""
_APART = "-fno-gnu-unique"
"""Else libraries share what a kernel has as shared memory."""
PATHS: list[pytest.TempPathFactory] = []
"""Of this process; the folder's `conftest` puts it here."""
KEPT = Path(__file__).resolve().parents[2] / "build" / "kernels-of-tests"
"""Libraries by the hash of all that they are compiled from. `make clean` removes them."""
_KEPT_FOR_S = 7 * 24 * 3600.0
_DIGEST_BYTES = hashlib.sha256().digest_size
_made: dict[str, tuple[ctypes.CDLL, int]] = {}
"""Of each source that was compiled: the library, and its number there."""


def library(code: str) -> ctypes.CDLL:
    """Some C++, with what CUDA has besides. Skips the test if there is no compiler.

    It is compiled once in a run of pytest, whichever of its processes needs it first, and not at all if an
    earlier run has compiled it and left it in `KEPT`.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")

    def make(folder: Path) -> None:
        if _kept(name, folder / "kernels.so"):
            return
        (folder / "kernels.cpp").write_text(_DEVICE + code)
        command = [compiler, *options, "-w", "kernels.cpp", "-o", "kernels.so", *_LIBRARIES]
        subprocess.run(command, cwd=folder, check=True, timeout=PATIENCE_S)
        _keep(name, folder / "kernels.so")

    linker = ["-fuse-ld=gold"] if shutil.which("ld.gold") else []  # half of the time of the usual one
    options = (*_OPTIONS, *_CHECKED, _APART, *linker)
    parts = (_version_of(compiler), *options, *_LIBRARIES, _DEVICE, code)
    name = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]
    return ctypes.CDLL(str(once(PATHS[0], f"kernels-{name}", make) / "kernels.so"))


@functools.cache
def _version_of(compiler: str) -> str:
    """What the compiler says of itself, with the system's version: a new one compiles all again."""
    return subprocess.run([compiler, "-v"], capture_output=True, text=True, check=True).stderr


def _kept(name: str, into: Path) -> bool:
    """Whether an earlier run has left a library as it was made. It is then copied to `into`."""
    file = KEPT / f"{name}.so"
    try:
        content = file.read_bytes()
    except OSError:
        return False
    with contextlib.suppress(OSError):  # another user's: it is used, too
        os.utime(file)
    library, digest = content[:-_DIGEST_BYTES], content[-_DIGEST_BYTES:]
    if hashlib.sha256(library).digest() != digest:
        return False
    into.write_bytes(library)
    return True


def _keep(name: str, library: Path) -> None:
    """Leave a library for runs to come. Another run may do the same at the same time: it is there, or not.

    Its digest is behind it: where the machine stops meanwhile, a file may have its name before its content.
    """
    own = KEPT / f"{name}.{os.getpid()}"
    try:
        KEPT.mkdir(parents=True, exist_ok=True)
        content = library.read_bytes()
        own.write_bytes(content + hashlib.sha256(content).digest())
        own.replace(KEPT / f"{name}.so")
    except OSError:  # where nothing can be left, each run compiles
        with contextlib.suppress(OSError):
            own.unlink()


def forget_unused() -> None:
    """Remove the libraries that no run has used for a week: sources change, and some are drawn at random."""
    with contextlib.suppress(OSError):
        for each in KEPT.iterdir():
            if each.stat().st_mtime < time.time() - _KEPT_FOR_S:
                each.unlink(missing_ok=True)


def compile_together(sources: Iterable[str]) -> None:
    """Compile CUDA sources, which takes less time than one by one when they are launched first."""
    sources = list(dict.fromkeys(sources))
    found = library("\n".join(_wrapped(number, source) for number, source in enumerate(sources)))
    _made.update({source: (found, number) for number, source in enumerate(sources)})


def _wrapped(number: int, source: str) -> str:
    """A source in a namespace of its own, with a function that runs each of its kernels."""
    source = _SHARED.sub(r"__shared__ \1[16384];", source.replace(DEVICE_PREAMBLE, PREAMBLE))
    with_others = str(_YIELDS.search(source) is not None).lower()
    launches = []
    for name, parameters in _KERNEL.findall(source):
        names = ", ".join(re.split(r"\W+", parameter.strip())[-1] for parameter in parameters.split(","))
        start = f'extern "C" void launch{number}_{name}(const unsigned* shape, {parameters})'
        launches.append(f"{start} {{ run_grid(shape, {with_others}, [=] {{ {name}({names}); }}); }}")
    text = source.replace('extern "C" __global__', "static __global__")
    return f"namespace n{number} {{ {text}\n{chr(10).join(launches)} }}"


class RawModule:
    """As CuPy's."""

    def __init__(self, code: str, options: tuple[str, ...] = ()) -> None:
        del options
        if code not in _made:
            compile_together([code])
        self._library, self._number = _made[code]

    def get_function(self, name: str) -> Callable[..., None]:
        """What launches a kernel."""
        kernel = getattr(self._library, f"launch{self._number}_{name}")

        def launch(
            grid: Sequence[int], block: Sequence[int], arguments: Sequence[Any], shared_mem: int = 0
        ) -> None:
            del shared_mem
            shape = (ctypes.c_uint * 6)(*(*grid, 1, 1)[:3], *(*block, 1, 1)[:3])
            kernel(shape, *map(_argument, arguments))

        return launch


class RawKernel:
    """As CuPy's."""

    def __init__(self, code: str, name: str, options: tuple[str, ...] = ()) -> None:
        self._launch = RawModule(code, options).get_function(name)

    def compile(self) -> None:
        """It is."""

    def __call__(self, grid: Sequence[int], block: Sequence[int], arguments: Sequence[Any]) -> None:
        self._launch(grid, block, arguments)


class Memory:
    """As CuPy's of a device: bytes, which start at a multiple of 512."""

    def __init__(self, nbytes: int) -> None:
        self._bytes = np.zeros(nbytes + 512, np.uint8)
        self.ptr = -(-self._bytes.ctypes.data // 512) * 512


class DeviceArray:
    """As CuPy's arrays, as far as self-checks use them."""

    def __init__(self, shape: tuple[int, ...], dtype: Any, memory: Memory | None = None) -> None:
        self.shape, self.dtype, self.itemsize = shape, dtype, np.dtype(dtype).itemsize
        self.data = memory or Memory(self.itemsize * math.prod(shape))

    def get(self) -> np.ndarray:
        """A copy of its values."""
        size = math.prod(self.shape)
        data = (ctypes.c_ubyte * (size * self.itemsize)).from_address(self.data.ptr)
        return np.frombuffer(data, self.dtype, size).reshape(self.shape).copy()


class Stream:
    """As CuPy's. Nothing is ever behind."""

    ptr = 0

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def synchronize(self) -> None:
        """Everything has run."""


class MemoryPool:
    """As CuPy's."""

    malloc = Memory

    def free_all_blocks(self) -> None:
        """They are."""

    def total_bytes(self) -> int:
        """None are kept."""
        return 0


CUPY = SimpleNamespace(
    RawModule=RawModule,
    RawKernel=RawKernel,
    float32=np.float32,
    float64=np.float64,
    uint32=np.uint32,
    uint64=np.uint64,
    ndarray=DeviceArray,
    zeros=lambda count, dtype: DeviceArray((count,), dtype),
    asnumpy=lambda array: array.get() if isinstance(array, DeviceArray) else np.array(array),
    empty=np.empty,
    asarray=np.asarray,
    ascontiguousarray=np.ascontiguousarray,
    cuda=SimpleNamespace(
        MemoryPool=MemoryPool,
        memory=SimpleNamespace(OutOfMemoryError=MemoryError),
        using_allocator=contextlib.nullcontext,
        get_current_stream=Stream,
        runtime=SimpleNamespace(
            memcpyDeviceToHost=2,
            memcpyHostToDevice=1,
            memcpyAsync=lambda to, of, nbytes, kind, stream: ctypes.memmove(to, of, nbytes),
            memsetAsync=lambda to, value, nbytes, stream: ctypes.memset(to, value, nbytes),
            memGetInfo=lambda: (1 << 30, 1 << 30),
        ),
    ),
)


def use(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """Have kernels compiled by `CUPY`, which some of the engine's modules use, too."""
    for module in (kernel, *modules):
        monkeypatch.setattr(module, "libraries", lambda: SimpleNamespace(cupy=CUPY))


def _argument(value: Any) -> Any:
    if isinstance(value, np.float32):
        return ctypes.c_float(float(value))
    if isinstance(value, np.ndarray):
        return ctypes.c_void_p(value.ctypes.data)
    if isinstance(value, DeviceArray):
        return ctypes.c_void_p(value.data.ptr)
    return ctypes.c_double(value) if isinstance(value, float) else ctypes.c_longlong(value)


def sources_of(
    operation: Operation[Any], tensors: Sequence[GraphTensor], launcher: str = "kernel"
) -> tuple[str, ...]:
    """The source of each launch of an operation's own kernels, on operands in the order of its fields."""
    operands = [name for name, _ in operation.named()]
    launches = IMPLEMENTATIONS[type(operation)].launchers[launcher].launches
    assert launches is not None
    return tuple(launch.source for launch in launches(operation.with_operands(operands.index), tensors))


def compile_for(launches: Iterable[tuple[Operation[Any], Mapping[str, TensorSpec]]]) -> None:
    """Compile, in one go, what `launched` runs for these operations on operands of these specs."""
    sources: list[str] = []
    for operation, specs in launches:
        tensors = [
            GraphTensor(uid=uid, dims=spec.dims, strides=spec.strides, dtype=spec.dtype)
            for uid, spec in enumerate(specs[name] for name, _ in operation.named())
        ]
        sources += sources_of(operation, tensors)
    compile_together(sources)


def launched(
    operation: Operation[Any],
    specs: dict[str, TensorSpec],
    given: dict[str, np.ndarray],
    launcher: str = "kernel",
) -> dict[str, np.ndarray]:
    """What an operation's own kernels write, on operands of these specs, which it has by their names."""
    operands = [name for name, _ in operation.named()]
    node = operation.with_operands({name: number for number, name in enumerate(operands)}.__getitem__)
    tensors, buffers, views = [], [], {}
    for uid, name in enumerate(operands):
        spec = specs[name]
        tensors.append(GraphTensor(uid=uid, dims=spec.dims, strides=spec.strides, dtype=spec.dtype))
        buffer = np.full(spec.nbytes + 64, 0xA5, np.uint8)
        steps = tuple(step * spec.dtype.itemsize for step in spec.strides)
        start = -buffer.ctypes.data % 64
        views[name] = np.ndarray(spec.dims, spec.dtype.numpy, buffer.data, start, steps)
        if name in given:
            views[name][...] = given[name]
        buffers.append((buffer, buffer.ctypes.data + start))
    way = IMPLEMENTATIONS[type(node)].launchers[launcher]
    nbytes = 0 if way.workspace is None else way.workspace(node, tensors)
    workspace = np.full(nbytes + 128, 0xA5, np.uint8)
    start = -workspace.ctypes.data % 64
    places = [address for _, address in buffers] + [workspace.ctypes.data + start] * (nbytes > 0)
    way.make(node, tensors, None)(places, ())
    assert (workspace[start + nbytes :] == 0xA5).all(), "it writes behind its workspace"
    return {name: views[name].copy() for name, _ in operation.named(operation.outputs)}


def defined(
    operation: Operation[Any], specs: dict[str, TensorSpec], given: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """What it writes by its definition, rounded."""
    outputs = {name: specs[name] for name, _ in operation.named(operation.outputs)}
    with np.errstate(all="ignore"):
        values = {name: exact(given[name]) for name, _ in operation.named(operation.inputs)}
        found = operation.evaluate(NumPy(), values, outputs)
        results = {name: np.empty(spec.dims, spec.dtype.numpy) for name, spec in outputs.items()}
        for name, into in results.items():
            round_into(np.array(found[name]), outputs[name].dtype, into)
    return results


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the engine's code find this module's functions in place of CuPy's and of CUDA's runtime."""
    for name, module in (("cupy", CUPY), ("runtime", CUPY.cuda.runtime)):
        monkeypatch.setitem(vars(libraries()), name, module)
