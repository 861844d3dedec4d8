"""What PyTorch runs for a network: its program, as its operators, or its module.

Programs need PyTorch and nothing else. A program is written by `export.py`. Its operators are the network's
own, as `torch.export` found them.
"""

from __future__ import annotations

import importlib
import json
import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from .recipes import Recipe, made

__all__ = ["attend_without_masks", "module", "program", "tensors"]

_DEVICE = "device(type='cpu')"
_UNMASKED = "sdpa_without_masks"


def program(path: Path, device: str) -> Callable[..., tuple[Any, ...]]:
    """The network on a device, a function of its inputs' tensors, for `torch.compile` as well.

    Its outputs are a tuple.
    """
    torch = _torch()
    record = json.loads(path.read_text())
    code = textwrap.indent(record["code"].replace(_DEVICE, "device"), "    ")
    names: dict[str, Any] = {}
    exec(f"def make(torch, device, inf):\n{code}\n    return forward", names)  # no globals, for torch.compile
    # With its number: a program that asserts its tensors' devices takes "cuda" and "cuda:0" for two.
    forward = names["make"](torch, torch.empty(0, device=device).device, math.inf)
    made_of = [_tensor(*each) for each in record["given"]]
    given = [each if each is None else each.to(device) for each in made_of]

    def run(*inputs: Any) -> tuple[Any, ...]:
        found: Sequence[Any] = forward(None, *given, *inputs)
        return tuple(found)

    return run


def module(name: str, device: str) -> Callable[..., tuple[Any, ...]]:
    """The module of a network in its usual size on a device, in bfloat16, with random weights and no mask.

    Its outputs are a tuple. Needs torchvision, or transformers.
    """
    torch = _torch()
    network = importlib.import_module(".architectures", __package__).NETWORKS[name]
    made_of = network.make(True).eval().to(device, torch.bfloat16)
    attend_without_masks(made_of)
    names = [*network.inputs(True)]

    def run(*inputs: Any) -> tuple[Any, ...]:
        given = [None if key.endswith("mask") else each for key, each in zip(names, inputs, strict=True)]
        found = network.call(made_of, *given)
        return found if isinstance(found, tuple) else (found,)

    return run


def attend_without_masks(network: Any) -> None:
    """Let the attention of a module of transformers see all tokens, or all up to its own, without a mask.

    Compiled, such a module makes a mask even if it is given none: it hides nothing, or what comes later.
    PyTorch's flash attention takes no mask, and with one of 197 tokens it computes products and a softmax.
    """
    if not hasattr(network, "set_attn_implementation"):
        return
    transformers = importlib.import_module("transformers")
    attention = importlib.import_module("transformers.integrations.sdpa_attention").sdpa_attention_forward
    transformers.AttentionInterface.register(_UNMASKED, attention)
    transformers.AttentionMaskInterface.register(_UNMASKED, lambda *_, **__: None)
    network.set_attn_implementation(_UNMASKED)


def tensors(arrays: Iterable[np.ndarray], device: str) -> list[Any]:
    """Arrays as PyTorch's tensors on a device."""
    return [_of(array).to(device) for array in arrays]


def _torch() -> Any:
    return importlib.import_module("torch")


def _of(array: np.ndarray) -> Any:
    if array.dtype == ml_dtypes.bfloat16:
        return _torch().from_numpy(array.astype(np.float32)).bfloat16()
    return _torch().from_numpy(np.ascontiguousarray(array))


def _tensor(recipe: Recipe, dtype: str) -> Any:
    of = getattr(_torch(), dtype, None)
    match recipe:
        case ["unused"]:
            return None
        case ["listed", values]:
            return _torch().tensor(values, dtype=of)
        case _:
            return _of(made(recipe)).to(of)
