"""Attributes and inputs that say how many or how long: each has a least value, whatever its operator does."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from cudnn_actor.onnx.schemas import Schema
from cudnn_actor.onnx.values import Contradiction

__all__ = ["check_least", "counts_of"]

_LEAST = {
    "block_shape": 1,
    "blocksize": 1,
    "depth": 0,
    "dft_length": 1,
    "dilations": 1,
    "frame_length": 1,
    "frame_step": 1,
    "group": 1,
    "hidden_size": 1,
    "image_shape": 0,
    "kernel_shape": 1,
    "num_groups": 1,
    "num_outputs": 1,
    "num_scan_inputs": 1,
    "offset_group": 1,
    "output_height": 1,
    "output_padding": 0,
    "output_width": 1,
    "repeats": 0,
    "sample_size": 0,
    "size": 0,
    "sizes": 0,
    "split": 0,
    "strides": 1,
}
"""The least values of counts, by names that mean the same for all operators."""
_OF_ONE = {
    ("CenterCropPad", "shape"): 0,
    ("ConstantOfShape", "input"): 0,
    ("Expand", "shape"): 0,
    ("RandomNormal", "shape"): 0,
    ("RandomUniform", "shape"): 0,
    ("Reshape", "shape"): -1,
    ("TopK", "K"): 0,
    ("TopK", "k"): 0,
    ("Transpose", "perm"): 0,
}
"""The least values of counts, by operators, for names that mean something else for other operators."""


def _least(op: str, name: str) -> int | None:
    return _OF_ONE.get((op, name), _LEAST.get(name))


@functools.lru_cache(maxsize=4096)
def counts_of(schema: Schema) -> Mapping[str, int | None]:
    """An operator's counts: name → the number of the input that has it, None for an attribute."""
    op = schema.name
    found: dict[str, int | None] = {name: None for name in schema.attributes if _least(op, name) is not None}
    inputs = {each.name: number for number, each in enumerate(schema.inputs)}
    return found | {name: number for name, number in inputs.items() if _least(op, name) is not None}


def check_least(op: str, name: str, numbers: Sequence[int]) -> None:
    """Raise `Contradiction` for a count that is below its least value."""
    least = _least(op, name)
    if least is not None and min(numbers, default=least) < least:
        raise Contradiction(f"has {min(numbers)} in its {name}, where {least} is the least")
