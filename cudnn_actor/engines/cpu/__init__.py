"""The NumPy engine: the embedded default, and the oracle of the CUDA one."""

from cudnn_actor.engines.cpu.engine import CpuEngine

__all__ = ["CpuEngine"]
