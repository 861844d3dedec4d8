"""ONNX models: read, checked and turned into graphs. `CudnnRef.load` uses it; it needs the extra `onnx`."""

from __future__ import annotations

from cudnn_actor.extras import install_command

try:
    import onnx as _onnx  # noqa: F401
except ImportError as error:  # pragma: no cover - depends on what is installed
    raise ImportError(f"models need the package onnx: {install_command('onnx')}") from error

from cudnn_actor.onnx.model_limits import ModelLimits
from cudnn_actor.onnx.onnx_model import OnnxModel

__all__ = ["ModelLimits", "OnnxModel"]
