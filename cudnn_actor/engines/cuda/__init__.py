"""The engine that runs on an NVIDIA GPU, with cuDNN. Importing it imports no CUDA package."""

from cudnn_actor.engines.cuda.diagnosis.installation import unavailable
from cudnn_actor.engines.cuda.engine import CudaEngine

__all__ = ["CudaEngine", "unavailable"]
