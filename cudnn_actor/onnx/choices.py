"""Attributes whose text is one of a few names. Any other text is an error, whatever the operator would do
with it."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from cudnn_actor.onnx.schemas import Schema
from cudnn_actor.onnx.values import Contradiction

__all__ = ["check_choice", "choices_of"]

_AUTO_PAD = ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")
_DIRECTIONS = ("forward", "reverse", "bidirectional")
_CHOICES = {
    ("BitShift", "direction"): ("LEFT", "RIGHT"),
    ("DepthToSpace", "mode"): ("DCR", "CRD"),
    ("GRU", "direction"): _DIRECTIONS,
    ("Gelu", "approximate"): ("none", "tanh"),
    ("LSTM", "direction"): _DIRECTIONS,
    ("Momentum", "mode"): ("standard", "nesterov"),
    ("Pad", "mode"): ("constant", "reflect", "edge", "wrap"),
    ("RNN", "direction"): _DIRECTIONS,
    ("RoiAlign", "coordinate_transformation_mode"): ("half_pixel", "output_half_pixel"),
    ("RoiAlign", "mode"): ("avg", "max"),
    ("TensorScatter", "mode"): ("linear", "circular"),
}
"""The valid texts, by operators and names of attributes."""


@functools.lru_cache(maxsize=4096)
def choices_of(schema: Schema) -> Mapping[str, tuple[str, ...]]:
    """An operator's attributes of this kind, and the valid texts of each."""
    found = {name: _CHOICES.get((schema.name, name)) for name in schema.attributes}
    if "auto_pad" in schema.attributes:
        found["auto_pad"] = _AUTO_PAD
    return {name: each for name, each in found.items() if each is not None}


def check_choice(name: str, value: object, takes: tuple[str, ...]) -> None:
    """Raise `Contradiction` if a text is not valid for an attribute."""
    if value not in takes:
        raise Contradiction(
            f"has the {name} {value!r}, where it takes {', '.join(takes[:-1])} and {takes[-1]}"
        )
