"""Functions by their names: a process tells another one by a text which function to call."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

__all__ = ["function_named"]


def function_named(text: str) -> Callable[..., Any]:
    """The function that a text `module:name` names. Imports the module, and raises what that raises."""
    module, _, name = text.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function
