"""The engine of a service, by its options; and the warning of a GPU that `device="auto"` does not use."""

from __future__ import annotations

import sys
import warnings

from cudnn_actor.actors.logs import speaking_for
from cudnn_actor.engines import EngineChoice, choose_engine
from cudnn_actor.options import NAME, Options

__all__ = ["engine_for", "warn_of"]

_PACKAGE = __name__.partition(".")[0]


def engine_for(options: Options) -> EngineChoice:
    """The engine that `options.device` selects. Blocks while the driver is queried, if it is.

    Raises `InvalidRequest` if the device is not available here.
    """
    with speaking_for(options.name or NAME):
        return choose_engine(
            options.device,
            apart=options.isolation != "thread",
            executable=options.executable,
            dynamic_shapes=options.dynamic_shapes,
            exact=options.exact,
            threads=options.threads,
            onnx_runtime=options.onnx_runtime,
        )


def warn_of(unused_gpu: str) -> None:
    """Warn at the line of the program that starts a service: the first outside this package."""
    text = (
        f'device="auto" chose the CPU: {unused_gpu}. device="cuda" raises an error instead; device="cpu" or '
        "an empty CUDA_VISIBLE_DEVICES chooses the CPU without this warning"
    )
    frame, level = sys._getframe(), 1
    while frame.f_back is not None and _is_ours(frame.f_globals.get("__name__")):
        frame, level = frame.f_back, level + 1
    warnings.warn(text, RuntimeWarning, stacklevel=level)


def _is_ours(module: object) -> bool:
    return str(module).partition(".")[0] == _PACKAGE
