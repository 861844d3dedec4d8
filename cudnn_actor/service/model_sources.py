"""Reads a model from a file or from bytes, or takes one that was read before."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cudnn_actor.actors.long_work import in_own_thread
from cudnn_actor.models.source import Source
from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.types.checks import require_type

__all__ = ["name_of", "source_of"]


def name_of(model: Any, given: str | None) -> str:
    """The name under which a model is counted: the given name; else the file's without its suffix; else the
    graph's. Raises `InvalidRequest`.
    """
    if given is not None:
        require_type("name", given, str)
        return given
    if isinstance(model, str | os.PathLike):
        return Path(os.fspath(model)).stem or "model"
    return str(getattr(getattr(model, "graph", None), "name", "")) or "model"


async def source_of(model: Any, given: Mapping[str, Any], earlier: Mapping[str, Any] | None = None) -> Source:
    """The argument of `load` as a source. A model that was not read before is read on a thread.

    `given`: the reader's options, with None for those that were left out. `earlier`: the values of these, of
    the model that is replaced. Raises as `CudnnRef.load`.
    """
    if hasattr(model, "specialise"):
        return _read_before(model, given)
    chosen = {name: value for name, value in given.items() if value is not None}
    return await in_own_thread(_read_model, model, {**(earlier or {}), **chosen})


def _read_before(model: Source, given: Mapping[str, Any]) -> Source:
    for name, value in given.items():
        if value is not None:
            raise InvalidRequest(
                field=name,
                value=value,
                problem="comes too late: the model was read before",
                fix=f"give it to OnnxModel(model, {name}=...)",
            )
    return model


def _read_model(model: Any, options: Mapping[str, Any]) -> Source:
    """Read and check an ONNX model. Blocks, also to import the package onnx."""
    from cudnn_actor.onnx import OnnxModel  # noqa: PLC0415 - needs an extra

    return OnnxModel(model, **{name: value for name, value in options.items() if value is not None})
