"""Compiles CUDA C++ for sm_90 with NVRTC, which needs no device. Used in a child."""

from __future__ import annotations

import functools

__all__ = ["DoesNotCompile", "compile_cuda"]

_OPTIONS = (b"--gpu-architecture=sm_90", b"--std=c++17")


class DoesNotCompile(Exception):
    """Raised when NVRTC refuses a source. The text is its log, and the source."""


@functools.cache
def compile_cuda(source: str) -> int:
    """Compile a kernel's source to machine code, once; returns the code's size in bytes."""
    from cuda.bindings import nvrtc

    status, program = nvrtc.nvrtcCreateProgram(source.encode(), b"kernel.cu", 0, [], [])
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, status
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(_OPTIONS), list(_OPTIONS))
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            _, size = nvrtc.nvrtcGetProgramLogSize(program)
            log = bytearray(size)
            nvrtc.nvrtcGetProgramLog(program, log)
            raise DoesNotCompile(f"{log.rstrip(bytes(1)).decode(errors='replace')}\n{source}")
        _, size = nvrtc.nvrtcGetCUBINSize(program)
        return int(size)
    finally:
        nvrtc.nvrtcDestroyProgram(program)
