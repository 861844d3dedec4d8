"""Reads a model from a file or from bytes, or takes one that was read before."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cudnn_actor.models.source import Source
from cudnn_actor.protocol.errors import InvalidRequest
from cudnn_actor.protocol.types.checks import require_type

__all__ = ["name_of", "read_before", "read_model"]


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


def read_before(model: Any, **options: Any) -> Source | None:
    """The argument of `load` as a model that was read before; None if it has to be read."""
    if not hasattr(model, "specialise"):
        return None
    for name, value in options.items():
        if value is not None:
            raise InvalidRequest(
                field=name,
                value=value,
                problem="comes too late: the model was read before",
                fix=f"give it to OnnxModel(model, {name}=...)",
            )
    source: Source = model
    return source


def read_model(model: Any, options: Mapping[str, Any]) -> Source:
    """Read and check an ONNX model. Blocks, also to import the package onnx."""
    from cudnn_actor.onnx import OnnxModel  # noqa: PLC0415 - needs an extra

    given = {name: value for name, value in options.items() if value is not None}
    return OnnxModel(model, **given)
