"""Compiles CUDA C++ for compute capability 9.0 with NVRTC, which needs no device. Used in a child.

The code is never run, so its optimiser is told to be quick, and the headers of textures and surfaces are left
out: that halves the time. What is refused does not depend on either.
"""

from __future__ import annotations

import functools

__all__ = ["DoesNotCompile", "compile_cuda"]

_OPTIONS = (b"--std=c++17", b"--minimal", b"--Ofast-compile=max")


class DoesNotCompile(Exception):
    """Raised when NVRTC refuses a source. The text is its log, and the source."""


@functools.cache
def compile_cuda(source: str, assembled: bool = True) -> int:
    """Compile a kernel's source, once; returns the code's size in bytes.

    To machine code, or else to PTX, in a third of the time: then nothing looks at what is in `asm`, nor at
    how much shared memory there is. Raises `DoesNotCompile`.
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
