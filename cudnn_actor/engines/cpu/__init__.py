"""The NumPy engine: the default without a GPU, and the reference for the CUDA engine."""

from cudnn_actor.engines.cpu.engine import CpuEngine

__all__ = ["CpuEngine"]
