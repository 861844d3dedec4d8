"""Finds names in a text that this package does not have: those in backticks, read as expressions.

`g` is a graph builder, `gpu` a service's handle and `x` a tensor of a graph; other lower-case names stand for
what a reader gives. `cudnn-actor WORD` is a command.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import re
from collections.abc import Iterator
from typing import Any

from cudnn_actor import CudnnRef, GraphBuilder
from cudnn_actor.protocol.graphs.expressions import Tensor

from ..public_names import PUBLIC

__all__ = ["unknown_names"]

_GIVEN = {"g": GraphBuilder, "gpu": CudnnRef, "x": Tensor}


def unknown_names(text: str) -> list[str]:
    """What stands in backticks in a text and is not there, or is called with arguments that it lacks."""
    return [code for code in re.findall(r"`([^`]+)`", text) if _is_wrong(code)]


def _is_wrong(code: str) -> bool:
    command, _, word = code.partition(" ")
    if command == "cudnn-actor":
        return not any(importlib.util.find_spec(f"cudnn_actor.{each}.{word}") for each in ("cli", "trials"))
    try:
        tree = ast.parse(code, mode="eval")
    except SyntaxError:
        return True
    return any(_wrongs(tree))


def _wrongs(tree: ast.AST) -> Iterator[bool]:
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name):
                yield name[0].isupper() and not name.startswith("CUDNN_") and not _found(node)
            case ast.Attribute(value=ast.Name()):
                yield not _found(node)
            case ast.Call(func=function, args=args, keywords=keywords):
                yield not _takes(_found(function), len(args), [word.arg for word in keywords if word.arg])


def _found(node: ast.AST) -> Any:
    """What an expression of names and dots is; None if it is not there."""
    match node:
        case ast.Name(id=name):
            return _GIVEN.get(name, PUBLIC.get(name))
        case ast.Attribute(value=value, attr=name):
            return getattr(_found(value), name, None)
    return None


def _takes(function: Any, count: int, keywords: list[str]) -> bool:
    if function is None:
        return False
    of_object = inspect.isfunction(function) and "self" in inspect.signature(function).parameters
    try:
        inspect.signature(function).bind_partial(*[None] * (count + of_object), **dict.fromkeys(keywords))
    except TypeError:
        return False
    return True
