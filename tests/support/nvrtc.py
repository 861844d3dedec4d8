"""Compiles CUDA C++ for compute capability 9.0 with NVRTC, which needs no device. Used in a child.

The code is never run. So NVRTC optimises little, and leaves out what it declares for textures and surfaces,
which our kernels do not use: that halves the time. It refuses the same sources.
"""

from __future__ import annotations

import functools

__all__ = ["DoesNotCompile", "compile_cuda"]

_OPTIONS = (b"--std=c++17", b"--minimal", b"--Ofast-compile=max")


class DoesNotCompile(Exception):
    """Raised when NVRTC refuses a source. The text is its log, and the source."""


@functools.cache
def compile_cuda(source: str, assembled: bool = True) -> int:
    """Compile a kernel's source, once; returns the code's size in bytes. Raises `DoesNotCompile`.

    `assembled`: to machine code. Without, to PTX, which takes a third of the time, and checks neither inline
    assembly nor how much shared memory a kernel takes.
    """
    from cuda.bindings import nvrtc

    options = [*_OPTIONS, b"--gpu-architecture=" + (b"sm_90" if assembled else b"compute_90")]
    status, program = nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], [])
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, status
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            _, size = nvrtc.nvrtcGetProgramLogSize(program)
            log = bytearray(size)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise DoesNotCompile(f"{log.rstrip(bytes(1)).decode(errors='replace')}\n{source}")
        _, size = (nvrtc.nvrtcGetCUBINSize if assembled else nvrtc.nvrtcGetPTXSize)(program)
        return int(size)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
