"""Measures what the device can do at best: the rates that no convolution goes far beyond."""

from __future__ import annotations

import time
from collections.abc import Iterator

import msgspec
import numpy as np

from benchmarks.gpu.problems import Problem
from benchmarks.gpu.pytorch import Eager, eager
from benchmarks.gpu.setting import Setting
from benchmarks.gpu.sheet import Sheet, number
from benchmarks.gpu.stage import Call

__all__ = ["Ceilings", "floor_us", "measure", "sheets"]

_SIZE = 8192
_COPIED = 1 << 31


class Ceilings(msgspec.Struct, kw_only=True):
    """Measured on random numbers, the best of a few rounds."""

    tflops: dict[str, float]
    """Of a large square matrix product, by type: "bfloat16", "float32", "tf32"."""
    copy_gb_per_s: float
    """Of a large copy within the device's memory, bytes read and bytes written together."""


def measure(setting: Setting) -> Ceilings:
    """Blocks for a second or two."""
    setting.say("ceilings")
    return _of_gpu(setting) if setting.on_gpu else _of_host()


def floor_us(problem: Problem, ceilings: Ceilings) -> float:
    """The time of a problem at the rate of the products or of the memory, whichever takes longer.

    Where the tensors fit in the device's cache, and stay there from one run to the next, a convolution can
    be faster than the memory: the fraction of the ceiling is then over 1.
    """
    products_us = problem.flops / ceilings.tflops["tf32" if problem.tf32 else problem.dtype] / 1e6
    return max(products_us, problem.nbytes / ceilings.copy_gb_per_s / 1e3)


def _of_gpu(setting: Setting) -> Ceilings:
    with eager(setting.ordinal) as rival:
        size = setting.choose(_SIZE, 1024)
        found = Ceilings(
            tflops={name: _matmul_tflops(rival, name, size) for name in ("bfloat16", "float32", "tf32")},
            copy_gb_per_s=_copy_rate(rival, setting.choose(_COPIED, 1 << 24)),
        )
        rival.forget()
    return found


def _matmul_tflops(rival: Eager, name: str, size: int) -> float:
    torch = rival.torch
    torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
    dtype = getattr(torch, "float32" if name == "tf32" else name)
    a, b = (torch.randn((size, size), device=rival.device, dtype=dtype) for _ in range(2))
    best_us = _best_us(rival, lambda: torch.matmul(a, b))
    torch.backends.cuda.matmul.allow_tf32 = False
    return 2 * size**3 / best_us / 1e6


def _copy_rate(rival: Eager, nbytes: int) -> float:
    torch = rival.torch
    source = torch.empty(nbytes, device=rival.device, dtype=torch.uint8).random_()
    target = torch.empty_like(source)
    return 2 * nbytes / _best_us(rival, lambda: target.copy_(source)) / 1e3


def _best_us(rival: Eager, call: Call) -> float:
    rival.microseconds(call, 3)
    return min(rival.microseconds(call, 5) for _ in range(5))


def _of_host() -> Ceilings:
    a = np.ones((256, 256), "float32")
    began = time.perf_counter()
    for _ in range(20):
        a @ a
    tflops = 20 * 2 * 256**3 / (time.perf_counter() - began) / 1e12
    source = np.ones(1 << 24, "uint8")
    began = time.perf_counter()
    source.copy()
    rate = 2 * source.nbytes / (time.perf_counter() - began) / 1e9
    return Ceilings(tflops=dict.fromkeys(("bfloat16", "float32", "tf32"), tflops), copy_gb_per_s=rate)


def sheets(ceilings: Ceilings) -> Iterator[Sheet]:
    """The tables: a row for each ceiling."""
    rows = [(f"matrix product, {name}, TFLOP/s", number(rate)) for name, rate in ceilings.tflops.items()]
    rows.append(("copy within memory, GB/s read and written", number(ceilings.copy_gb_per_s)))
    yield Sheet("Ceilings, measured", ("what", "rate"), tuple(rows))
