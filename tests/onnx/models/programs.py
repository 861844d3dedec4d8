"""What PyTorch runs for a network, as a program of its operators: needs PyTorch and nothing else.

A program is written by `export.py`. Its operators are the network's own, as `torch.export` found them.
"""

from __future__ import annotations

import importlib
import json
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .recipes import Recipe, made

__all__ = ["program"]

_DEVICE = "device(type='cpu')"


def program(path: Path, device: str) -> Callable[..., tuple[Any, ...]]:
    """The network on a device, a function of its inputs' tensors, for `torch.compile` as well.

    Its outputs are a tuple.
    """
    torch: Any = importlib.import_module("torch")
    record = json.loads(path.read_text())
    names = {"torch": torch, "device": torch.device(device), "inf": float("inf"), "nan": float("nan")}
    module = types.ModuleType(path.stem)
    vars(module).update(names)
    exec(record["code"].replace(_DEVICE, "device"), vars(module))
    tensors = [_tensor(torch, *each) for each in record["given"]]
    given = [each if each is None else each.to(device) for each in tensors]
    forward = vars(module)["forward"]

    def run(*inputs: Any) -> tuple[Any, ...]:
        found: Sequence[Any] = forward(None, *given, *inputs)
        return tuple(found)

    return run


def _tensor(torch: Any, recipe: Recipe, dtype: str) -> Any:
    match recipe:
        case ["unused"]:
            return None
        case ["listed", values]:
            return torch.tensor(values, dtype=getattr(torch, dtype))
        case _:
            return torch.from_numpy(np.ascontiguousarray(made(recipe))).to(getattr(torch, dtype))
