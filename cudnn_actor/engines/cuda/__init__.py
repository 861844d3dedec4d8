"""The engine that runs on an NVIDIA GPU, with cuDNN. Importing it imports no CUDA package."""

from cudnn_actor.engines.cuda.engine import CudaEngine
from cudnn_actor.engines.cuda.installation import unavailable

__all__ = ["CudaEngine", "unavailable"]
