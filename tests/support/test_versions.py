"""What the engine says of cuDNN's version is what its headers say."""

from __future__ import annotations

from cudnn_actor.engines.cuda.engine import CudaEngine

from .child import Child
from .headers import installed_version


def version_of_the_engine() -> str:
    return CudaEngine().cudnn_version


def test_the_engine_says_which_cudnn_it_has_loaded(child: Child) -> None:
    assert child.call(version_of_the_engine) == ".".join(map(str, installed_version()))
